"""Manifests → the pods, Services, Secrets and ConfigMaps of one run. Pure.

This plays the controllers' part: a StatefulSet becomes ``replicas`` pods named ``<set>-<ordinal>``. Kinds that only
matter in a cluster (PDBs, network policies, role bindings …) are skipped.
"""

from __future__ import annotations

import base64
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from prebook_operator.local.errors import UserError
from prebook_operator.local.kube import Manifest, PodSpec, ServiceSpec

_Spec = TypeVar("_Spec", PodSpec, ServiceSpec)
ROLE_LABEL = "prebook.dev/role"
_SKIPPED = frozenset(
    {
        "ModelRole",
        "PodDisruptionBudget",
        "NetworkPolicy",
        "ServiceAccount",
        "Role",
        "RoleBinding",
        "PodMonitor",
        "ServiceMonitor",
        "ResourceClaimTemplate",
        "HorizontalPodAutoscaler",
        "Namespace",
    }
)


@dataclass(frozen=True)
class PodPlan:
    """One pod to run. ``short`` is what people see: ``decode-0``."""

    name: str
    short: str
    namespace: str
    uid: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: PodSpec

    @property
    def role(self) -> str:
        """``prefill``, ``decode`` or, for a pod without the label, an empty string."""
        return self.labels.get(ROLE_LABEL, "")

    @property
    def port(self) -> int:
        """The first declared port of the first container: its HTTP port; 0 when it has none."""
        ports = self.spec.containers[0].ports
        return ports[0].container_port if ports else 0


@dataclass(frozen=True)
class ServicePlan:
    """One Service."""

    name: str
    spec: ServiceSpec


@dataclass(frozen=True)
class Workload:
    """Everything that one run starts."""

    pods: tuple[PodPlan, ...]
    services: tuple[ServicePlan, ...]
    secrets: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    config_maps: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)

    @property
    def front(self) -> ServicePlan:
        """The Service that clients use: the one that is not headless.

        Raises ``UserError`` when there is none or more than one.
        """
        found = [service for service in self.services if not service.spec.headless]
        if len(found) != 1:
            names = ", ".join(service.name for service in found) or "none"
            raise UserError(f"expected exactly one Service that is not headless, found {names}")
        return found[0]


def build_workload(manifests: Sequence[Manifest], *, new_token: Callable[[], str]) -> Workload:
    """Reads ``manifests``; a Secret that ends in ``-peer-token`` and has no token yet gets one from ``new_token``.

    Raises ``UserError`` that names the object and the field that cannot be run here.
    """
    pods: list[PodPlan] = []
    services: list[ServicePlan] = []
    secrets: dict[str, Mapping[str, bytes]] = {}
    config_maps: dict[str, Mapping[str, bytes]] = {}
    for manifest in manifests:
        kind, name = str(manifest.get("kind", "")), str(manifest.get("metadata", {}).get("name", ""))
        if kind == "StatefulSet":
            pods.extend(_pods_of(manifest))
        elif kind == "Service":
            services.append(
                ServicePlan(name=name, spec=_parse(ServiceSpec, manifest.get("spec", {}), what=f"Service {name}"))
            )
        elif kind == "Secret":
            secrets[name] = _payload(manifest, encoded="data", plain="stringData")
        elif kind == "ConfigMap":
            config_maps[name] = _payload(manifest, encoded="binaryData", plain="data")
        elif kind not in _SKIPPED:
            raise UserError(f"{kind or 'an object without kind'} {name!r} cannot be run on this machine")
    for secret in _peer_token_names(pods):
        if "token" not in secrets.get(secret, {}):
            secrets[secret] = {**secrets.get(secret, {}), "token": new_token().encode()}
    if not pods:
        raise UserError("there is nothing to run: no StatefulSet with replicas")
    return Workload(pods=_with_short_names(pods), services=tuple(services), secrets=secrets, config_maps=config_maps)


def _pods_of(manifest: Manifest) -> list[PodPlan]:
    metadata, spec = manifest["metadata"], manifest["spec"]
    template = spec["template"]
    claims = {str(claim["metadata"]["name"]) for claim in spec.get("volumeClaimTemplates") or []}
    if claims:
        raise UserError(f"StatefulSet {metadata['name']}: volumeClaimTemplates are not supported by the local runner")
    parsed = _parse(PodSpec, template["spec"], what=f"StatefulSet {metadata['name']}: spec.template.spec")
    start = int((spec.get("ordinals") or {}).get("start", 0))
    replicas = 1 if spec.get("replicas") is None else int(spec["replicas"])
    pods = []
    for ordinal in range(start, start + replicas):
        name = f"{metadata['name']}-{ordinal}"
        labels = {**(template.get("metadata", {}).get("labels") or {}), "statefulset.kubernetes.io/pod-name": name}
        labels["apps.kubernetes.io/pod-index"] = str(ordinal)
        namespace = metadata.get("namespace", "default")
        pods.append(
            PodPlan(
                name=name,
                short=name,
                namespace=namespace,
                uid=str(uuid.uuid5(uuid.NAMESPACE_URL, f"prebook:{namespace}/{name}")),
                labels=labels,
                annotations=template.get("metadata", {}).get("annotations") or {},
                spec=parsed,
            )
        )
    return pods


def _with_short_names(pods: Sequence[PodPlan]) -> tuple[PodPlan, ...]:
    def short(pod: PodPlan) -> str:
        return f"{pod.role}-{pod.labels['apps.kubernetes.io/pod-index']}" if pod.role else pod.name

    taken = Counter(short(pod) for pod in pods)
    return tuple(
        PodPlan(
            name=pod.name,
            short=short(pod) if taken[short(pod)] == 1 else pod.name,
            namespace=pod.namespace,
            uid=pod.uid,
            labels=pod.labels,
            annotations=pod.annotations,
            spec=pod.spec,
        )
        for pod in pods
    )


def _peer_token_names(pods: Sequence[PodPlan]) -> set[str]:
    names: set[str] = set()
    for pod in pods:
        for volume in pod.spec.volumes:
            if volume.secret is not None:
                names.add(volume.secret.secret_name)
            if volume.projected is not None:
                names.update(source.secret.name for source in volume.projected.sources if source.secret is not None)
        for container in (*pod.spec.init_containers, *pod.spec.containers):
            for variable in container.env:
                if variable.value_from is not None and variable.value_from.secret_key_ref is not None:
                    names.add(variable.value_from.secret_key_ref.name)
    return {name for name in names if name.endswith("-peer-token")}


def _payload(manifest: Manifest, *, encoded: str, plain: str) -> dict[str, bytes]:
    binary = {str(key): base64.b64decode(value) for key, value in (manifest.get(encoded) or {}).items()}
    text = {str(key): str(value).encode() for key, value in (manifest.get(plain) or {}).items()}
    return {**binary, **text}


def _parse(model: type[_Spec], value: Any, *, what: str) -> _Spec:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise UserError(
                f"{what}: {where} is not supported by the local runner",
                remedy="use emptyDir, secret, configMap, projected, persistentVolumeClaim or hostPath; "
                "other kinds need a cluster",
            ) from error
        raise UserError(f"{what}: {where}: {first['msg']}") from error
