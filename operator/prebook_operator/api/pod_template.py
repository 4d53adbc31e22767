"""The part of a pod template that a user may overlay on a role's pods: an allow-list, not Kubernetes' own type.

A full PodTemplateSpec would let whoever may create a model create any pod with the operator's rights
(keycloak#40188), and its schema alone is larger than an object that etcd holds. Fields that can widen privileges are
present, so that an operator that was started to allow them can honour them; all others refuse them by name
(`validation.py`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import Field, StringConstraints

from prebook_operator.api.base import (
    AbsolutePath,
    Annotations,
    ApiModel,
    EnvName,
    Label,
    LabelKey,
    Labels,
    LabelValue,
    ObjectName,
    Quantity,
)

LIST_TYPE: Final = "x-kubernetes-list-type"
LIST_KEYS: Final = "x-kubernetes-list-map-keys"


def map_list(key: str) -> dict[str, Any]:
    """Schema extension of a list whose elements are identified by `key`."""
    return {LIST_TYPE: "map", LIST_KEYS: [key]}


ATOMIC: Final[dict[str, Any]] = {LIST_TYPE: "atomic"}
SET: Final[dict[str, Any]] = {LIST_TYPE: "set"}


class SecretKeySelector(ApiModel):
    """One key of a Secret in the namespace of the model."""

    name: ObjectName
    """Name of the Secret."""
    key: Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
    """Key within the Secret."""


class ConfigMapKeySelector(ApiModel):
    """One key of a ConfigMap in the namespace of the model."""

    name: ObjectName
    """Name of the ConfigMap."""
    key: Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
    """Key within the ConfigMap."""


class FieldSelector(ApiModel):
    """A field of the pod itself (downward API)."""

    field_path: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    """Path such as `metadata.name` or `spec.nodeName`."""


class EnvSource(ApiModel):
    """Where the value of a variable comes from: exactly one of the three."""

    secret_key_ref: SecretKeySelector | None = None
    """A key of a Secret."""
    config_map_key_ref: ConfigMapKeySelector | None = None
    """A key of a ConfigMap."""
    field_ref: FieldSelector | None = None
    """A field of the pod."""


class EnvVar(ApiModel):
    """One environment variable of the engine."""

    name: EnvName
    """Name of the variable. Names that Prebook sets itself are refused."""
    value: Annotated[str, StringConstraints(max_length=4096)] | None = None
    """The value as text. Credentials must use `valueFrom.secretKeyRef` instead."""
    value_from: EnvSource | None = None
    """Source of the value, instead of `value`."""


EnvList = Annotated[list[EnvVar], Field(max_length=64, json_schema_extra=map_list("name"))]


class TolerationOperator(StrEnum):
    """How a toleration matches a taint."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    """What an untolerated taint does."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(ApiModel):
    """A node taint that the pods put up with."""

    key: LabelKey | None = None
    """Key of the taint; absent together with `operator: Exists` tolerates every taint."""
    operator: TolerationOperator = TolerationOperator.EQUAL
    """Exists ignores the value."""
    value: LabelValue | None = None
    """Value of the taint, for `operator: Equal`."""
    effect: TaintEffect | None = None
    """Effect of the taint; absent matches every effect."""
    toleration_seconds: Annotated[int, Field(ge=0, le=86400)] | None = None
    """How long a NoExecute taint is tolerated."""


class LocalObjectReference(ApiModel):
    """Name of an object in the namespace of the model."""

    name: ObjectName
    """Name of the object."""


class SeccompType(StrEnum):
    """Which seccomp profile applies."""

    RUNTIME_DEFAULT = "RuntimeDefault"
    LOCALHOST = "Localhost"


class PodSecurityContext(ApiModel):
    """Identity of the engine's processes. The pods always run as a user other than root."""

    run_as_user: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """User id. Absent: 65532."""
    run_as_group: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Group id. Absent: 65532."""
    fs_group: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Group that owns mounted volumes. Absent: 65532."""
    supplemental_groups: Annotated[
        list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(max_length=16, json_schema_extra=ATOMIC)
    ] = Field(default_factory=list)
    """Further groups of the processes."""


CapabilityName = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Z_]+$")]


class Capabilities(ApiModel):
    """Linux capabilities."""

    add: Annotated[list[CapabilityName], Field(max_length=16, json_schema_extra=SET)] = Field(default_factory=list)
    """Capabilities to add; refused unless the operator was started to allow them. IPC_LOCK comes by itself with EFA."""


class ContainerSecurityContext(ApiModel):
    """Privileges of the engine container."""

    privileged: bool = False
    """Refused unless the operator was started with it allowed. EFA does not need it."""
    capabilities: Capabilities | None = None
    """Capabilities beyond what Prebook gives."""


ResourceMap = Annotated[
    dict[Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[-._/a-zA-Z0-9]+$")], Quantity],
    Field(max_length=16),
]


class Resources(ApiModel):
    """CPU, memory and other resources. GPUs and EFA devices follow from `gpus` and `hardware` and are refused here."""

    requests: ResourceMap = Field(default_factory=dict)
    """What the scheduler sets aside."""
    limits: ResourceMap = Field(default_factory=dict)
    """What the engine may not exceed."""


class VolumeMount(ApiModel):
    """Where a volume of the template appears in the engine container."""

    name: Label
    """Name of a volume of this template."""
    mount_path: AbsolutePath
    """Folder in the container. Folders that Prebook mounts are refused."""
    sub_path: Annotated[str, StringConstraints(max_length=512)] | None = None
    """Folder within the volume."""
    read_only: bool = False
    """Mount without write access."""


class ContainerName(StrEnum):
    """Containers that a template may change."""

    ENGINE = "engine"


class EngineContainer(ApiModel):
    """What may be changed on the engine container."""

    name: ContainerName
    """Always `engine`: the only container of the pod."""
    resources: Resources | None = None
    """CPU, memory and other resources."""
    env: EnvList = Field(default_factory=list)
    """Variables of this role, over those of `spec.engine.env`."""
    volume_mounts: Annotated[list[VolumeMount], Field(max_length=16, json_schema_extra=map_list("mountPath"))] = Field(
        default_factory=list
    )
    """Mounts of volumes of this template."""
    security_context: ContainerSecurityContext | None = None
    """Privileges; refused unless the operator was started to allow them."""


class EmptyDirMedium(StrEnum):
    """What backs an emptyDir."""

    DISK = ""
    MEMORY = "Memory"


class EmptyDir(ApiModel):
    """Scratch space that lives as long as the pod."""

    medium: EmptyDirMedium = EmptyDirMedium.DISK
    """Empty for the node's disk, Memory for RAM."""
    size_limit: Quantity | None = None
    """Largest size."""


class ClaimSource(ApiModel):
    """A PersistentVolumeClaim of the namespace."""

    claim_name: ObjectName
    """Name of the claim."""
    read_only: bool = False
    """Mount without write access."""


class ConfigMapSource(ApiModel):
    """Files from a ConfigMap."""

    name: ObjectName
    """Name of the ConfigMap."""
    optional: bool = False
    """Start even when it is missing."""


class SecretSource(ApiModel):
    """Files from a Secret."""

    secret_name: ObjectName
    """Name of the Secret."""
    optional: bool = False
    """Start even when it is missing."""


class HostPath(ApiModel):
    """A folder of the node; refused unless the operator was started to allow it."""

    path: AbsolutePath
    """Folder of the node."""


class Volume(ApiModel):
    """A volume of the pod, with exactly one source."""

    name: Label
    """Name; those starting with `prebook-` are refused."""
    empty_dir: EmptyDir | None = None
    """Scratch space."""
    persistent_volume_claim: ClaimSource | None = None
    """A claim of the namespace."""
    config_map: ConfigMapSource | None = None
    """Files from a ConfigMap."""
    secret: SecretSource | None = None
    """Files from a Secret."""
    host_path: HostPath | None = None
    """A folder of the node; refused unless the operator was started to allow it."""


class TemplateMetadata(ApiModel):
    """Labels and annotations to add to the pods."""

    labels: Labels = Field(default_factory=dict)
    """Labels; those that Prebook sets (`prebook.dev/…`, `app.kubernetes.io/…`) are refused."""
    annotations: Annotations = Field(default_factory=dict)
    """Annotations."""


NodeSelector = Annotated[dict[LabelKey, LabelValue], Field(max_length=32)]
Tolerations = Annotated[list[Toleration], Field(max_length=32, json_schema_extra=ATOMIC)]


class TemplatePodSpec(ApiModel):
    """What may be changed on a role's pods."""

    node_selector: NodeSelector = Field(default_factory=dict)
    """Node labels that a node must have, besides those that `hardware` asks for."""
    tolerations: Tolerations = Field(default_factory=list)
    """Taints that the pods tolerate, besides those of GPU and EFA nodes."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pods."""
    scheduler_name: ObjectName | None = None
    """Scheduler, when not the default one."""
    image_pull_secrets: Annotated[
        list[LocalObjectReference], Field(max_length=8, json_schema_extra=map_list("name"))
    ] = Field(default_factory=list)
    """Secrets for pulling the engine's image."""
    termination_grace_period_seconds: Annotated[int, Field(ge=1, le=86400)] | None = None
    """Longer grace period; it may not be shorter than drain, shutdown and lease together."""
    security_context: PodSecurityContext | None = None
    """User and groups of the processes."""
    service_account_name: ObjectName | None = None
    """Foreign service account; refused unless the operator was started to allow it. Absent: `<name>-engine`, without
    a token."""
    host_network: bool = False
    """Refused unless the operator was started to allow it. EFA does not need it."""
    host_pid: Annotated[bool, Field(alias="hostPID")] = False
    """Refused unless the operator was started to allow it."""
    host_ipc: Annotated[bool, Field(alias="hostIPC")] = False
    """Refused unless the operator was started to allow it."""
    volumes: Annotated[list[Volume], Field(max_length=16, json_schema_extra=map_list("name"))] = Field(
        default_factory=list
    )
    """Further volumes."""
    containers: Annotated[list[EngineContainer], Field(max_length=1, json_schema_extra=map_list("name"))] = Field(
        default_factory=list
    )
    """Changes to the container `engine`; no other container can be added."""


class PodTemplate(ApiModel):
    """Overlay on the pods of one role: the fields below and no others."""

    metadata: TemplateMetadata | None = None
    """Labels and annotations."""
    spec: TemplatePodSpec | None = None
    """Scheduling, volumes, identity and the engine container."""

    @property
    def pod(self) -> TemplatePodSpec:
        """The pod part, empty when absent."""
        return self.spec or TemplatePodSpec()

    @property
    def engine(self) -> EngineContainer:
        """The overlay of the engine container, empty when absent."""
        return next(iter(self.pod.containers), EngineContainer(name=ContainerName.ENGINE))
