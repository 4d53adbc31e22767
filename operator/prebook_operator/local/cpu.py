"""What the processor can compute, read from /proc/cpuinfo. Pure: the text comes from the caller."""

from __future__ import annotations

from typing import Final

# Vector extensions that decide how fast a CPU engine is, best first; x86 names, then Arm's.
_UNITS: Final = ("amx_bf16", "avx512_bf16", "avx512bw", "avx2", "bf16", "sve", "asimd")
# What torch's matrix library (oneDNN) asks for before it computes bfloat16 with vector instructions.
_BFLOAT16: Final = frozenset({"amx_bf16", "avx512_bf16", "avx512bw", "bf16"})


def vector_units(cpuinfo: str) -> tuple[str, ...]:
    """The vector extensions among those that matter here that every processor in the text has, best first."""
    lines = [line.partition(":") for line in cpuinfo.splitlines()]
    flags = [set(words.split()) for key, _, words in lines if key.strip() in ("flags", "Features")]
    common = set.intersection(*flags) if flags else set()
    return tuple(unit for unit in _UNITS if unit in common)


def fast_bfloat16(cpuinfo: str) -> bool:
    """Whether bfloat16 pays on this processor. Without AVX-512 (x86) or BF16 (Arm) its matrix products fall back to
    scalar code, and an engine's step takes many times as long as in float32.
    """
    return not _BFLOAT16.isdisjoint(vector_units(cpuinfo))
