"""`DisaggregatedModel.spec`: what a user asks for. Field docstrings become the text of `kubectl explain`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from pydantic import Field, StringConstraints

from prebook_operator.api.base import AbsolutePath, ApiModel, Bytes, Label, LabelValue, ObjectName, Quantity
from prebook_operator.api.pod_template import (
    ATOMIC,
    SET,
    EnvList,
    NodeSelector,
    PodTemplate,
    SecretKeySelector,
    Tolerations,
)
from prebook_operator.api.profiles import HardwareProfile

MODEL_URI: Final = r"^(hf://[A-Za-z0-9][-A-Za-z0-9._]*/[A-Za-z0-9][-A-Za-z0-9._]*|s3://[-a-z0-9.]+/[^\s$]+|pvc://[-a-z0-9.]+(/[^\s$]*)?|file:///[^\s$]+)$"

IMAGE: Final = r"^[A-Za-z0-9][^\s]*$"
RATIO: Final = r"^[1-9][0-9]{0,2}:[1-9][0-9]{0,2}$"

Replicas = Annotated[int, Field(ge=0, le=256)]


class EmptyDirCache(ApiModel):
    """A model cache that lives as long as the pod: every new pod downloads the model again."""

    size_limit: Quantity | None = None
    """Largest size of the cache."""


class ModelCache(ApiModel):
    """Where downloaded weights are kept: exactly one of the three. Absent: an emptyDir."""

    persistent_volume_claim: ObjectName | None = None
    """Name of a ReadWriteMany claim that all pods share, so that a model is downloaded once."""
    empty_dir: EmptyDirCache | None = None
    """Scratch space of the pod."""
    host_path: AbsolutePath | None = None
    """Folder of the node; refused unless the operator was started to allow it."""


class Model(ApiModel):
    """Which model to serve, and where its weights come from."""

    uri: Annotated[str, StringConstraints(min_length=6, max_length=512, pattern=MODEL_URI)]
    """Source of the weights: `hf://org/name` (Hugging Face), `s3://bucket/path` (streamed), `pvc://claim/path` (a
    PersistentVolumeClaim) or `file:///path` (a folder in the engine's image or volumes)."""
    revision: Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[-A-Za-z0-9._/]+$")] | None = (
        None
    )
    """Commit or tag of the weights. Pin it: prefill and decode with different weights would produce wrong tokens, and
    a moved branch is not noticed. A change starts a rollout."""
    served_name: (
        Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][-A-Za-z0-9._/:]*$")]
        | None
    ) = None
    """Name that clients put into `model`. Absent: the name of the object."""
    hf_token_secret_ref: SecretKeySelector | None = None
    """Secret key that holds a Hugging Face token, for gated models."""
    cache: ModelCache = ModelCache()
    """Where downloaded weights are kept."""


EngineArg = Annotated[str, StringConstraints(min_length=1, max_length=2048)]


class Engine(ApiModel):
    """How vLLM is started. The same image and arguments serve both roles, because prefill and decode of different
    versions never pair."""

    image: Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=IMAGE)]
    """vLLM image, such as `vllm/vllm-openai:v0.32.0`. Prebook adds its connector when the pod starts; no image of its
    own is needed."""
    args: Annotated[list[EngineArg], Field(max_length=128, json_schema_extra=ATOMIC)] = Field(default_factory=list)
    """Further vLLM arguments, as `--name=value` or as two elements. Options that Prebook sets itself are refused by
    name."""
    env: EnvList = Field(default_factory=list)
    """Further environment variables. Names that Prebook sets itself are refused; credentials need
    `valueFrom.secretKeyRef`."""
    shared_memory: Quantity | None = None
    """Size of the memory-backed /dev/shm. Absent: 20Gi with GPUs, 2Gi without."""
    startup_timeout_seconds: Annotated[int, Field(ge=60, le=86400)] = 3600
    """How long an engine may take to load the model before it is restarted. Large models from cold storage take 10
    minutes or more."""
    shutdown_seconds: Annotated[int, Field(ge=0, le=3600)] = 60
    """How long an engine that is told to stop may work on requests that it already has."""


class Connector(StrEnum):
    """Who moves the KV cache."""

    PREBOOK = "Prebook"
    NIXL_PUSH = "NixlPush"
    NIXL_PULL = "NixlPull"


class Backend(StrEnum):
    """NIXL's transport."""

    LIBFABRIC = "LIBFABRIC"
    UCX = "UCX"


class OnFailure(StrEnum):
    """What decode does when the KV does not arrive."""

    RECOMPUTE = "Recompute"
    FAIL = "Fail"


class FirstToken(StrEnum):
    """Which engine's first token the client sees."""

    DECODE = "Decode"
    PREFILL = "Prefill"


class Verify(StrEnum):
    """How much transferred KV is compared by checksum."""

    OFF = "Off"
    SAMPLE = "Sample"
    ALL = "All"


class Progressive(ApiModel):
    """Blocks leave as each prefill chunk settles, so that the transfer overlaps the computation."""

    enabled: bool = True
    """False sends everything after prefill's end."""
    min_bytes: Bytes = "4Mi"
    """Smallest amount worth a write of its own, before the last one."""
    max_in_flight: Annotated[int, Field(ge=1, le=64)] = 2
    """Most writes to one decode engine that may be under way; the transfer with the least left opens the next one."""


class Transfer(ApiModel):
    """How the KV cache travels from prefill to decode."""

    connector: Connector = Connector.PREBOOK
    """Prebook, or vLLM's own push and pull connectors for comparison and as a way back."""
    backend: Backend | None = None
    """NIXL transport. Absent: LIBFABRIC with EFA, UCX without. With EFA only LIBFABRIC is accepted: UCX would
    silently use TCP."""
    lease_seconds: Annotated[int, Field(ge=2, le=600)] = 30
    """How long a peer that says nothing keeps its hold on booked blocks."""
    drain_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    """How long a pod that is told to stop waits for its transfers to end."""
    on_failure: OnFailure = OnFailure.RECOMPUTE
    """Recompute: decode computes the prompt itself and the client sees only latency. Fail: the client gets an error."""
    progressive: Progressive = Progressive()
    """Progressive push."""
    first_token: FirstToken = FirstToken.DECODE
    """Whose first token a client's stream starts with. Decode: decode samples it after the KV has arrived. Prefill:
    the token that prefill sampled is shown while its KV is still under way, and decode continues from it; needs the
    Prebook connector and no speculative decoding."""
    verify: Verify = Verify.OFF
    """Checksums over transferred blocks, compared by decode before use. Costs memory bandwidth; meant for
    qualification."""
    multi_head_latent_attention: bool = False
    """Say true for models with multi-head latent attention (DeepSeek-V2, -V3, -R1): only for those may prefill's
    tensor parallel size exceed decode's."""


class Devices(StrEnum):
    """How a pod asks for EFA devices."""

    PLUGIN = "Plugin"
    DRA = "DRA"


class DynamicResources(ApiModel):
    """Device classes for `devices: DRA`."""

    efa_device_class: ObjectName = "efa.networking.k8s.aws"
    """DeviceClass of EFA devices."""
    gpu_device_class: ObjectName | None = None
    """DeviceClass of GPUs, such as `gpu.nvidia.com`: each GPU is then claimed together with EFA devices under the
    same `alignAttribute`. Absent: GPUs come from the device plugin."""
    align_attribute: Annotated[
        str, StringConstraints(min_length=3, max_length=128, pattern=r"^[-a-z0-9.]+/[A-Za-z0-9_]+$")
    ] = "resource.kubernetes.io/pcieRoot"
    """Device attribute that a GPU and its EFA devices must share."""


class NodeGroups(ApiModel):
    """EKS managed node groups by role."""

    prefill: LabelValue | None = None
    """Node group of the prefill pods."""
    decode: LabelValue | None = None
    """Node group of the decode pods."""


class Hardware(ApiModel):
    """What the engines run on."""

    profile: HardwareProfile = HardwareProfile.NONE
    """Instance type; it selects the nodes and says how many GPUs and EFA devices they have. `none`: any node, no
    fabric devices."""
    efa_per_gpu: Annotated[Annotated[int, Field(ge=0, le=16)] | None, Field(alias="efaPerGPU")] = None
    """EFA devices per GPU; 0 runs without EFA. Absent: an even share of the node's devices (2 on p5en, 4 on p5 and
    p5e, 1 on p6-b200)."""
    node_groups: NodeGroups = NodeGroups()
    """EKS managed node groups. Both must be in one availability zone: EFA traffic cannot leave it."""
    devices: Devices = Devices.PLUGIN
    """Plugin asks for `vpc.amazonaws.com/efa`; DRA makes a ResourceClaimTemplate (Kubernetes 1.34 or newer)."""
    dra: DynamicResources = DynamicResources()
    """Device classes, for `devices: DRA`."""


class Role(StrEnum):
    """The two kinds of engine."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Role:
        """The role on the other end of a transfer."""
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL


class RoleSpec(ApiModel):
    """The engines of one role. Each replica is one pod with one engine."""

    replicas: Replicas | None = None
    """Number of engines. Absent: the ModelRole `<name>-<role>` owns the number, for `kubectl scale`, an HPA or KEDA."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs that share each layer of the model. Prefill's may not exceed decode's, except with multi-head latent
    attention."""
    gpus: Annotated[int, Field(ge=0, le=64)] | None = None
    """GPUs per pod; 0 runs on the CPU. Absent: `tensorParallelSize` on a hardware profile with GPUs, 0 without."""
    node_selector: NodeSelector = Field(default_factory=dict)
    """Node labels that a node must have, besides those that `hardware` asks for."""
    tolerations: Tolerations = Field(default_factory=list)
    """Taints that the pods tolerate, besides those of GPU and EFA nodes."""
    template: PodTemplate = PodTemplate()
    """Overlay on the pods of this role, limited to the fields that are listed here."""


class RoutingPolicy(StrEnum):
    """How a prefill engine is chosen."""

    LEAST_LOADED = "LeastLoaded"


class Routing(ApiModel):
    """How decode hands prompts to prefill."""

    local_prefill_max_tokens: Annotated[int, Field(ge=0, le=1_000_000)] = 64
    """Prompts up to this many tokens are prefilled by decode itself: moving them costs more than computing them."""
    policy: RoutingPolicy = RoutingPolicy.LEAST_LOADED
    """LeastLoaded takes the prefill engine with the fewest tokens waiting."""


class Rollout(ApiModel):
    """How a change of the spec reaches the pods."""

    paused: bool = False
    """True keeps the running revision and starts no new one."""


class Ratio(ApiModel):
    """Bounds on prefill engines per decode engine, as `prefill:decode`."""

    min: Annotated[str, StringConstraints(max_length=7, pattern=RATIO)] | None = None
    """Fewest prefill engines per decode engine, such as `1:4`."""
    max: Annotated[str, StringConstraints(max_length=7, pattern=RATIO)] | None = None
    """Most prefill engines per decode engine, such as `4:1`."""


class Scaling(ApiModel):
    """Limits on what an autoscaler may ask for."""

    ratio: Ratio = Ratio()
    """Bounds on prefill engines per decode engine. A number outside is clamped, and a condition says so."""


class NetworkPolicy(ApiModel):
    """Who may reach the engines. RDMA traffic bypasses network policies: the security group governs it."""

    enabled: bool = True
    """Side channel and prefill legs only between the model's own pods; decode's HTTP port stays open to clients."""
    monitoring_namespaces: Annotated[list[Label], Field(max_length=16, json_schema_extra=SET)] = Field(
        default_factory=list
    )
    """Namespaces whose pods may reach the HTTP port of prefill engines too, to scrape metrics."""


class Monitoring(ApiModel):
    """Metrics."""

    pod_monitor: bool = False
    """Make a PodMonitor for the Prometheus operator, where its CRD exists."""


class DisaggregatedModelSpec(ApiModel):
    """One model, served by prefill engines and decode engines that are paired in push mode."""

    model: Model
    """Which model to serve."""
    engine: Engine
    """How vLLM is started."""
    transfer: Transfer = Transfer()
    """How the KV cache travels."""
    hardware: Hardware = Hardware()
    """What the engines run on."""
    prefill: RoleSpec = RoleSpec()
    """Engines that compute prompts."""
    decode: RoleSpec = RoleSpec()
    """Engines that produce tokens. They are also the front door."""
    routing: Routing = Routing()
    """How decode hands prompts to prefill."""
    rollout: Rollout = Rollout()
    """How a change of the spec reaches the pods."""
    scaling: Scaling = Scaling()
    """Limits on what an autoscaler may ask for."""
    network_policy: NetworkPolicy = NetworkPolicy()
    """Who may reach the engines."""
    monitoring: Monitoring = Monitoring()
    """Metrics."""

    def role(self, role: Role) -> RoleSpec:
        """The spec of one role."""
        return self.prefill if role is Role.PREFILL else self.decode
