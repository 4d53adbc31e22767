"""The pod template of one role and revision."""

from __future__ import annotations

from math import ceil
from typing import Final

from prebook_operator.api import derived
from prebook_operator.api.resources import DisaggregatedModel
from prebook_operator.api.spec import Role
from prebook_operator.render.context import RenderContext
from prebook_operator.render.devices import CLAIM, resources, uses_claim
from prebook_operator.render.engine import COMMAND, engine_args, engine_env
from prebook_operator.render.names import (
    HTTP_PORT,
    LIB_DIR,
    SIDE_CHANNEL_PORT,
    labels,
    service_account_name,
    workload_name,
)
from prebook_operator.render.scheduling import affinity, node_selector, tolerations, topology_spread
from prebook_operator.render.types import Manifest, without_empty
from prebook_operator.render.volumes import LIB_VOLUME, volume_mounts, volumes

ENGINE: Final = "engine"
USER: Final = 65532
STARTUP_PERIOD: Final = 5
GRACE_MARGIN: Final = 10
"""Seconds that the process itself needs to end after its last request."""


def pod_template(model: DisaggregatedModel, ctx: RenderContext, role: Role, rev8: str) -> Manifest:
    """Template of the pods of `role`."""
    overlay = model.spec.role(role).template
    extra = overlay.metadata
    return {
        "metadata": without_empty(
            labels={**(extra.labels if extra else {}), **labels(model, role=role, rev8=rev8)},
            annotations={
                "kubectl.kubernetes.io/default-container": ENGINE,
                **(extra.annotations if extra else {}),
            },
        ),
        "spec": _pod_spec(model, ctx, role, rev8),
    }


def _pod_spec(model: DisaggregatedModel, ctx: RenderContext, role: Role, rev8: str) -> Manifest:
    pod = model.spec.role(role).template.pod
    return without_empty(
        serviceAccountName=pod.service_account_name or service_account_name(model),
        automountServiceAccountToken=False,
        # Service variables such as VLLM_PORT, from a Service called "vllm", would change the engine's settings.
        enableServiceLinks=False,
        terminationGracePeriodSeconds=pod.termination_grace_period_seconds
        or derived.minimum_grace_seconds(model.spec) + GRACE_MARGIN,
        priorityClassName=pod.priority_class_name,
        runtimeClassName=pod.runtime_class_name,
        schedulerName=pod.scheduler_name,
        imagePullSecrets=[secret.to_wire() for secret in pod.image_pull_secrets],
        hostNetwork=pod.host_network or None,
        hostPID=pod.host_pid or None,
        hostIPC=pod.host_ipc or None,
        securityContext=_pod_security(model, role),
        nodeSelector=node_selector(model, role),
        tolerations=tolerations(model, role),
        affinity=affinity(model, role, rev8),
        topologySpreadConstraints=topology_spread(model, role, rev8),
        resourceClaims=_resource_claims(model, role, rev8),
        initContainers=[_connector_container(ctx)],
        containers=[_engine_container(model, ctx, role, rev8)],
        volumes=volumes(model, role),
    )


def _resource_claims(model: DisaggregatedModel, role: Role, rev8: str) -> list[Manifest]:
    if not uses_claim(model, role):
        return []
    return [{"name": CLAIM, "resourceClaimTemplateName": workload_name(model, role, rev8)}]


def _pod_security(model: DisaggregatedModel, role: Role) -> Manifest:
    given = model.spec.role(role).template.pod.security_context
    user = given.run_as_user if given else None
    group = given.run_as_group if given else None
    fs_group = given.fs_group if given else None
    return without_empty(
        runAsNonRoot=True,
        runAsUser=USER if user is None else user,
        runAsGroup=USER if group is None else group,
        fsGroup=USER if fs_group is None else fs_group,
        fsGroupChangePolicy="OnRootMismatch",
        supplementalGroups=given.supplemental_groups if given else None,
        seccompProfile={"type": "RuntimeDefault"},
    )


def _connector_container(ctx: RenderContext) -> Manifest:
    """Copies the connector out of the operator's image, so that any stock vLLM image can load it."""
    return {
        "name": "connector",
        "image": ctx.operator_image,
        "command": ["python3", "-m", "prebook_connector.install", LIB_DIR],
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": LIB_VOLUME, "mountPath": LIB_DIR}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _engine_container(model: DisaggregatedModel, ctx: RenderContext, role: Role, rev8: str) -> Manifest:
    return without_empty(
        name=ENGINE,
        image=model.spec.engine.image,
        command=COMMAND,
        args=engine_args(model, ctx, role, rev8),
        env=engine_env(model, ctx, role, rev8),
        ports=[
            {"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"},
            {"name": "side-channel", "containerPort": SIDE_CHANNEL_PORT, "protocol": "TCP"},
        ],
        resources=resources(model, role),
        securityContext=_engine_security(model, role),
        volumeMounts=volume_mounts(model, role),
        startupProbe=_startup_probe(model),
        readinessProbe=_readiness_probe(),
        livenessProbe=_liveness_probe(),
        lifecycle={"preStop": {"exec": {"command": _drain_command(model)}}},
        terminationMessagePolicy="FallbackToLogsOnError",
    )


def _drain_command(model: DisaggregatedModel) -> list[str]:
    return ["python3", "-m", "prebook_connector.drain", "--timeout", str(model.spec.transfer.drain_seconds)]


def _engine_security(model: DisaggregatedModel, role: Role) -> Manifest:
    given = model.spec.role(role).template.engine.security_context
    added = list(given.capabilities.add) if given and given.capabilities else []
    if derived.efa_devices(model.spec, role) > 0 and "IPC_LOCK" not in added:
        added.insert(0, "IPC_LOCK")  # EFA registers memory, which pins it; nothing more is needed
    if given is not None and given.privileged:
        return {"privileged": True}
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": without_empty(drop=["ALL"], add=added),
    }


def _http_probe(path: str, *, period: int, timeout: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "http", "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
        "successThreshold": 1,
    }


def _startup_probe(model: DisaggregatedModel) -> Manifest:
    failures = ceil(model.spec.engine.startup_timeout_seconds / STARTUP_PERIOD)
    return _http_probe("/health", period=STARTUP_PERIOD, timeout=5, failures=failures)


def _readiness_probe() -> Manifest:
    return _http_probe("/prebook/v1/ready", period=3, timeout=5, failures=2)


def _liveness_probe() -> Manifest:
    """Runs only after the startup probe has succeeded, so a model that is still loading is never killed by it."""
    return _http_probe("/health", period=10, timeout=10, failures=6)
