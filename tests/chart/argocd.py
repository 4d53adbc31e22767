"""Argo CD's health check, run by the Lua version that Argo CD runs (5.1), in a sandbox as bare as Argo CD's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lupa import lua51

from tests.chart.helm import CHART

SCRIPT = CHART / "files" / "argocd-health.lua"


@dataclass(frozen=True)
class Health:
    """What Argo CD shows."""

    status: str
    message: str


def health(document: dict[str, Any]) -> Health:
    """Health of a DisaggregatedModel given as JSON."""
    lua = lua51.LuaRuntime(unpack_returned_tuples=True, register_eval=False, register_builtins=False)
    for name in ("os", "io", "package", "require", "debug", "dofile", "loadfile"):
        lua.globals()[name] = None
    lua.globals().obj = lua.table_from(document, recursive=True)
    answer = lua.execute(SCRIPT.read_text())
    return Health(status=answer.status, message=answer.message)
