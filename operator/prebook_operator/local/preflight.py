"""Can this machine run these pods? Memory, GPUs, fabric devices and the engine itself, before anything is started.

The memory figure is an estimate on purpose: weights + KV cache + what a vLLM process takes for itself. It catches
"four engines on a laptop", which otherwise ends as a silent SIGKILL in the middle of loading.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prebook_operator.local.cpu import fast_bfloat16
from prebook_operator.local.errors import MachineError, UserError
from prebook_operator.local.kube import Container
from prebook_operator.local.workload import PodPlan

GPU = "nvidia.com/gpu"
_GIB = 1 << 30
# Proportional memory of one CPU engine (API server, EngineCore, worker) beside weights and KV cache: Python, torch and
# buffers; measured with vLLM 0.32.
_ENGINE_OVERHEAD = int(2.1 * _GIB)
# vLLM's own default for VLLM_CPU_KVCACHE_SPACE, in GiB, when the variable is not set.
_DEFAULT_KV_GIB = 4.0
# Limit, usage and statistics of a memory cgroup: version 2, then version 1. Page cache that can be dropped does not
# count as used.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that one pod is expected to take."""

    pod: str
    weights: int
    kv_cache: int
    overhead: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.overhead


def is_engine(container: Container) -> bool:
    """Whether the container runs vLLM's API server."""
    return "vllm.entrypoints.openai.api_server" in container.command


def memory_needs(pods: Sequence[PodPlan], *, weights: int) -> list[MemoryNeed]:
    """What every CPU engine among ``pods`` is expected to take; ``weights`` in bytes. GPU engines are left out."""
    needs = []
    for pod in pods:
        for container in pod.spec.containers:
            if is_engine(container) and extended_resources(pod).get(GPU, 0) == 0:
                needs.append(
                    MemoryNeed(pod=pod.short, weights=weights, kv_cache=_kv_bytes(container), overhead=_ENGINE_OVERHEAD)
                )
    return needs


def check_memory(needs: Sequence[MemoryNeed], *, available: int) -> None:
    """Raises ``MachineError`` when the sum of ``needs`` does not fit into ``available`` bytes."""
    total = sum(need.total for need in needs)
    if total <= available:
        return
    each = ", ".join(f"{need.pod} {need.total / _GIB:.1f}" for need in needs)
    raise MachineError(
        f"too little memory: these pods need about {total / _GIB:.1f} GiB ({each}), "
        f"{available / _GIB:.1f} GiB are available",
        remedy="lower VLLM_CPU_KVCACHE_SPACE in spec.engine.env, run fewer replicas, or start anyway with --force",
    )


def slow_dtype(pods: Sequence[PodPlan], *, cpuinfo: str) -> str | None:
    """A warning, where CPU engines among ``pods`` would compute in a 16-bit type that this processor is slow at."""
    if fast_bfloat16(cpuinfo):
        return None
    slow = [
        pod.short
        for pod in pods
        if extended_resources(pod).get(GPU, 0) == 0
        and any(is_engine(container) and _dtype(container) != "float32" for container in pod.spec.containers)
    ]
    if not slow:
        return None
    return (
        f"{', '.join(slow)}: this processor computes bfloat16 and float16 many times slower than float32 "
        "(no AVX-512, or no BF16 on Arm); add --dtype=float32 to spec.engine.args"
    )


def available_memory(*, meminfo: Path = Path("/proc/meminfo"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that can still be had: MemAvailable, or less where a cgroup limit is closer. None when the system does
    not say.
    """
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    for limit, usage, stat in _CGROUP_FILES:
        try:
            used = int((cgroups / usage).read_text())
            cache = dict(line.split() for line in (cgroups / stat).read_text().splitlines()).get("inactive_file", "0")
            free = min(free, int((cgroups / limit).read_text()) - used + int(cache))
        except (OSError, ValueError):
            continue  # no such cgroup version, or "max": no limit
    return free


def weights_size(model_uri: str) -> int:
    """Bytes of the weights below a ``file://`` model; 0 for models that are not on this machine."""
    if not model_uri.startswith("file://"):
        return 0
    folder = Path(model_uri.removeprefix("file://"))
    for pattern in _WEIGHTS:
        sizes = [path.stat().st_size for path in folder.glob(pattern)]
        if sizes:
            return sum(sizes)
    return 0


def check_engine(pods: Sequence[PodPlan]) -> None:
    """Raises ``MachineError`` when a pod runs vLLM and this Python environment has none."""
    if (
        any(is_engine(container) for pod in pods for container in pod.spec.containers)
        and importlib.util.find_spec("vllm") is None
    ):
        raise MachineError(
            "vLLM is not installed in the Python environment that runs prebook",
            remedy="pip install 'prebook[engine]' (CPU), or vllm and nixl on a GPU machine",
        )


def extended_resources(pod: PodPlan) -> dict[str, int]:
    """Extended resources (names with a slash) that the pod asks for, summed over its containers."""
    total: dict[str, int] = {}
    for container in pod.spec.containers:
        for name, amount in {**container.resources.requests, **container.resources.limits}.items():
            if "/" in name:
                total[name] = total.get(name, 0) + int(amount)
    return {name: amount for name, amount in total.items() if amount}


def assign_gpus(pods: Sequence[PodPlan], *, present: int, shared: bool) -> Mapping[str, tuple[int, ...]]:
    """GPU indices by pod name. Exclusive, unless ``shared`` (then round robin, and the user sizes the memory).

    Raises ``UserError`` for devices that cannot be given to a local process, ``MachineError`` when there are too few
    GPUs.
    """
    chosen: dict[str, tuple[int, ...]] = {}
    following = 0
    for pod in pods:
        wanted = extended_resources(pod)
        other = sorted(set(wanted) - {GPU})
        if other:
            raise UserError(
                f"pod {pod.short} asks for {', '.join(other)}, which the local runner cannot give",
                remedy="use spec.hardware.profile: none and transfer.backend: UCX on one machine",
            )
        count = wanted.get(GPU, 0)
        if count == 0:
            continue
        if count > present or (not shared and following + count > present):
            raise MachineError(
                f"pod {pod.short} asks for {count} GPU(s), but {max(0, present - following)} of {present} are left",
                remedy="lower gpus or replicas, or let pods share GPUs with --share-gpus",
            )
        chosen[pod.name] = tuple((following + offset) % present for offset in range(count))
        following += count
    return chosen


def gpus_present() -> int:
    """Number of NVIDIA GPUs that ``nvidia-smi`` lists; 0 without it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
    return sum(1 for line in listed.stdout.splitlines() if line.startswith("GPU "))


def _dtype(container: Container) -> str:
    """What ``--dtype`` says, vLLM's "auto" (16 bits, also for a float32 model) when it is not given."""
    said = "auto"
    words = [*container.command, *container.args]
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == "--dtype":
            said = value if equals else following
    return {"float": "float32"}.get(said, said)


def _kv_bytes(container: Container) -> int:
    for variable in container.env:
        if variable.name == "VLLM_CPU_KVCACHE_SPACE" and variable.value:
            try:
                return int(float(variable.value) * _GIB)
            except ValueError as error:
                raise UserError(f"VLLM_CPU_KVCACHE_SPACE is {variable.value!r}, not a number of GiB") from error
    return int(_DEFAULT_KV_GIB * _GIB)
