"""The part of the Kubernetes API that a pod on this machine needs, as typed models.

Fields that have no meaning for a local process (affinity, security contexts, service accounts) are ignored on
purpose. Kinds of volumes and of environment sources that would change what the process sees, and that cannot be
given here, are refused by name instead.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Manifest = dict[str, Any]


class KubeModel(BaseModel):
    """Base: camelCase on the wire, unknown fields ignored, immutable."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore")


class StrictKubeModel(KubeModel):
    """Base for unions of alternatives, where an unknown key is an alternative that is not supported here."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True, extra="forbid")


class HttpHeader(KubeModel):
    """One header of an HTTP probe."""

    name: str
    value: str


class HttpGet(KubeModel):
    """HTTP probe or hook; success is a status in 200..399."""

    path: str = "/"
    port: int | str
    host: str | None = None
    scheme: Literal["HTTP"] = "HTTP"
    http_headers: list[HttpHeader] = Field(default_factory=list)


class TcpSocket(KubeModel):
    """Probe that succeeds when a connection opens."""

    port: int | str
    host: str | None = None


class ExecAction(KubeModel):
    """Command run in the container's environment; success is exit status 0."""

    command: list[str]


class Sleep(KubeModel):
    """preStop hook that only waits."""

    seconds: float


class Probe(KubeModel):
    """A probe with the API server's defaults. Times in seconds."""

    http_get: HttpGet | None = None
    tcp_socket: TcpSocket | None = None
    exec: ExecAction | None = None
    initial_delay_seconds: float = 0
    period_seconds: float = 10
    timeout_seconds: float = 1
    success_threshold: int = 1
    failure_threshold: int = 3


class Handler(KubeModel):
    """A lifecycle hook."""

    http_get: HttpGet | None = None
    exec: ExecAction | None = None
    sleep: Sleep | None = None


class Lifecycle(KubeModel):
    """Hooks of a container; only preStop is run."""

    pre_stop: Handler | None = None


class FieldRef(KubeModel):
    """A field of the pod, named as in the downward API."""

    field_path: str


class KeyRef(KubeModel):
    """One key of a Secret or ConfigMap."""

    name: str = ""
    key: str
    optional: bool = False


class EnvSource(StrictKubeModel):
    """Where a variable's value comes from: exactly one of these."""

    field_ref: FieldRef | None = None
    secret_key_ref: KeyRef | None = None
    config_map_key_ref: KeyRef | None = None


class EnvVar(KubeModel):
    """One environment variable."""

    name: str
    value: str | None = None
    value_from: EnvSource | None = None


class EnvFromRef(KubeModel):
    """A whole Secret or ConfigMap as variables."""

    name: str
    optional: bool = False


class EnvFrom(KubeModel):
    """One entry of envFrom."""

    prefix: str = ""
    secret_ref: EnvFromRef | None = None
    config_map_ref: EnvFromRef | None = None


class ContainerPort(KubeModel):
    """A named port of a container."""

    name: str | None = None
    container_port: int


class VolumeMount(KubeModel):
    """Where a volume appears in the container."""

    name: str
    mount_path: str
    sub_path: str = ""
    read_only: bool = False


class Resources(KubeModel):
    """Requests and limits; only extended resources (GPUs, fabric devices) matter here."""

    limits: dict[str, str | int | float] = Field(default_factory=dict)
    requests: dict[str, str | int | float] = Field(default_factory=dict)


class Container(KubeModel):
    """A container; the image is ignored, its command runs in the runner's own Python environment."""

    name: str
    image: str = ""
    command: list[str] = Field(default_factory=list)
    args: list[str] = Field(default_factory=list)
    working_dir: str | None = None
    env: list[EnvVar] = Field(default_factory=list)
    env_from: list[EnvFrom] = Field(default_factory=list)
    ports: list[ContainerPort] = Field(default_factory=list)
    volume_mounts: list[VolumeMount] = Field(default_factory=list)
    resources: Resources = Field(default_factory=Resources)
    startup_probe: Probe | None = None
    readiness_probe: Probe | None = None
    liveness_probe: Probe | None = None
    lifecycle: Lifecycle | None = None


class KeyToPath(KubeModel):
    """A key of a Secret or ConfigMap and the file it becomes."""

    key: str
    path: str


class SecretVolume(KubeModel):
    """A Secret as files."""

    secret_name: str
    items: list[KeyToPath] | None = None
    optional: bool = False


class NamedSource(KubeModel):
    """A ConfigMap as files, or a Secret inside a projected volume."""

    name: str
    items: list[KeyToPath] | None = None
    optional: bool = False


class DownwardItem(KubeModel):
    """A pod field and the file it becomes."""

    path: str
    field_ref: FieldRef


class DownwardVolume(KubeModel):
    """Pod fields as files."""

    items: list[DownwardItem] = Field(default_factory=list)


class ProjectedSource(StrictKubeModel):
    """One source of a projected volume."""

    secret: NamedSource | None = None
    config_map: NamedSource | None = None
    downward_api: DownwardVolume | None = Field(default=None, alias="downwardAPI")


class ProjectedVolume(KubeModel):
    """Several sources in one folder."""

    sources: list[ProjectedSource] = Field(default_factory=list)


class EmptyDir(KubeModel):
    """A folder that lives as long as the pod."""

    medium: str = ""


class ClaimVolume(KubeModel):
    """A claim; here a folder that outlives the run."""

    claim_name: str


class HostPath(KubeModel):
    """A path of this machine."""

    path: str
    type: str = ""


class Volume(StrictKubeModel):
    """A volume; kinds that are not named here are refused with a message."""

    name: str
    empty_dir: EmptyDir | None = None
    secret: SecretVolume | None = None
    config_map: NamedSource | None = None
    downward_api: DownwardVolume | None = Field(default=None, alias="downwardAPI")
    projected: ProjectedVolume | None = None
    persistent_volume_claim: ClaimVolume | None = None
    host_path: HostPath | None = None


class PodSpec(KubeModel):
    """What a pod runs."""

    containers: list[Container] = Field(min_length=1)
    init_containers: list[Container] = Field(default_factory=list)
    volumes: list[Volume] = Field(default_factory=list)
    termination_grace_period_seconds: float = 30
    service_account_name: str = "default"


class ServicePort(KubeModel):
    """A port of a Service; the target defaults to the port itself."""

    name: str | None = None
    port: int
    target_port: int | str | None = None


class ServiceSpec(KubeModel):
    """A Service, headless when clusterIP is the word None."""

    cluster_ip: str | None = Field(default=None, alias="clusterIP")
    selector: dict[str, str] = Field(default_factory=dict)
    ports: list[ServicePort] = Field(default_factory=list)
    publish_not_ready_addresses: bool = False

    @property
    def headless(self) -> bool:
        """Whether clients find the pods themselves instead of one address."""
        return self.cluster_ip == "None"
