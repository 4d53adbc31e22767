"""Checks of a role's pod template: whatever could widen privileges is refused by path unless the operator allows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prebook_operator.api import derived
from prebook_operator.api.allow import Allow
from prebook_operator.api.errors import FieldError
from prebook_operator.api.owned import OWNED_LABEL_DOMAIN, OWNED_MOUNTS, OWNED_RESOURCES, OWNED_VOLUME_PREFIX
from prebook_operator.api.pod_template import (
    ContainerSecurityContext,
    EngineContainer,
    TaintEffect,
    TemplatePodSpec,
    Toleration,
    TolerationOperator,
    Volume,
)
from prebook_operator.api.spec import DisaggregatedModelSpec, Role
from prebook_operator.api.validation_env import check_env

_KUBERNETES_LABELS = "app.kubernetes.io/"


def check_template(spec: DisaggregatedModelSpec, role: Role, *, allow: Allow) -> Iterator[FieldError]:
    """Faults of the template of `role`."""
    template = spec.role(role).template
    path = f"spec.{role}.template"
    labels = template.metadata.labels if template.metadata else {}
    for key in labels:
        if key.startswith((OWNED_LABEL_DOMAIN, _KUBERNETES_LABELS)):
            yield FieldError(f"{path}.metadata.labels[{key}]", "is set by Prebook", "Use a label of your own domain")
    yield from _tolerations(spec.role(role).tolerations, path=f"spec.{role}.tolerations")
    yield from _tolerations(template.pod.tolerations, path=f"{path}.spec.tolerations")
    yield from _privileges(template.pod, path=f"{path}.spec", allow=allow)
    least = derived.minimum_grace_seconds(spec)
    grace = template.pod.termination_grace_period_seconds
    if grace is not None and grace < least:
        yield FieldError(
            f"{path}.spec.terminationGracePeriodSeconds",
            f"{grace} s is shorter than drain, shutdown and lease together",
            f"Use at least {least}, or lower spec.transfer.drainSeconds or spec.engine.shutdownSeconds",
        )
    for index, volume in enumerate(template.pod.volumes):
        yield from _volume(volume, path=f"{path}.spec.volumes[{index}]", allow=allow)
    names = {volume.name for volume in template.pod.volumes}
    for index, container in enumerate(template.pod.containers):
        yield from _container(container, path=f"{path}.spec.containers[{index}]", volumes=names, allow=allow)


def _tolerations(given: Sequence[Toleration], *, path: str) -> Iterator[FieldError]:
    for index, toleration in enumerate(given):
        where = f"{path}[{index}]"
        exists = toleration.operator is TolerationOperator.EXISTS
        if exists and toleration.value:
            yield FieldError(
                f"{where}.value", "is not compared with operator Exists", "Remove it, or use operator Equal"
            )
        if toleration.key is None and not exists:
            yield FieldError(
                f"{where}.key", "is required with operator Equal", "Name the taint, or use operator Exists"
            )
        if toleration.toleration_seconds is not None and toleration.effect is not TaintEffect.NO_EXECUTE:
            yield FieldError(f"{where}.tolerationSeconds", "has no meaning without effect NoExecute", "Remove it")


def _privileges(pod: TemplatePodSpec, *, path: str, allow: Allow) -> Iterator[FieldError]:
    for field, given in (("hostNetwork", pod.host_network), ("hostPID", pod.host_pid), ("hostIPC", pod.host_ipc)):
        if given and not allow.host_namespaces:
            yield FieldError(
                f"{path}.{field}",
                "the node's namespaces are not allowed",
                "Remove it (EFA needs none), or start the operator with --allow-host-namespaces",
            )
    account = pod.service_account_name
    if account is not None and account not in allow.service_accounts:
        yield FieldError(
            f"{path}.serviceAccountName",
            f"service account {account!r} is not allowed",
            f"Remove it, or start the operator with --allow-service-account={account}",
        )


def _volume(volume: Volume, *, path: str, allow: Allow) -> Iterator[FieldError]:
    if volume.name.startswith(OWNED_VOLUME_PREFIX):
        yield FieldError(f"{path}.name", f"names starting with {OWNED_VOLUME_PREFIX} are Prebook's", "Use another name")
    sources = (volume.empty_dir, volume.persistent_volume_claim, volume.config_map, volume.secret, volume.host_path)
    given = sum(source is not None for source in sources)
    if given != 1:
        yield FieldError(
            path, f"has {given} sources", "Give one of emptyDir, persistentVolumeClaim, configMap, secret, hostPath"
        )
    if volume.host_path is not None and not allow.host_path:
        yield FieldError(
            f"{path}.hostPath",
            "folders of the node are not allowed",
            "Use another volume, or start the operator with --allow-host-path",
        )


def _container(container: EngineContainer, *, path: str, volumes: set[str], allow: Allow) -> Iterator[FieldError]:
    yield from check_env(container.env, path=f"{path}.env")
    if container.resources is not None:
        for kind, amounts in (("requests", container.resources.requests), ("limits", container.resources.limits)):
            for name in amounts:
                if name in OWNED_RESOURCES:
                    yield FieldError(
                        f"{path}.resources.{kind}[{name}]",
                        "is set by Prebook",
                        "Use spec.<role>.gpus and spec.hardware.efaPerGPU",
                    )
    for index, mount in enumerate(container.volume_mounts):
        where = f"{path}.volumeMounts[{index}]"
        if mount.name not in volumes:
            yield FieldError(
                f"{where}.name",
                f"there is no volume {mount.name!r} in this template",
                "Add it under volumes, or correct the name",
            )
        if any(mount.mount_path == owned or mount.mount_path.startswith(f"{owned}/") for owned in OWNED_MOUNTS):
            yield FieldError(f"{where}.mountPath", f"{mount.mount_path} is mounted by Prebook", "Mount it elsewhere")
    if container.security_context is not None:
        yield from _security(container.security_context, path=f"{path}.securityContext", allow=allow)


def _security(context: ContainerSecurityContext, *, path: str, allow: Allow) -> Iterator[FieldError]:
    if context.privileged and not allow.privileged:
        yield FieldError(
            f"{path}.privileged",
            "privileged containers are not allowed",
            "Remove it (EFA needs none), or start the operator with --allow-privileged",
        )
    added = context.capabilities.add if context.capabilities else []
    for name in added:
        if name not in allow.capabilities:
            yield FieldError(
                f"{path}.capabilities.add[{name}]",
                "this capability is not allowed",
                f"Remove it, or start the operator with --allow-capability={name}",
            )
