"""What a pod's own status endpoint says, read with suspicion: a field that is missing or of another type is just not
known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prebook_operator.local.httpclient import HttpError, get_json
from prebook_operator.local.pod import PodSnapshot

_TIMEOUT = 2.0


class Peer(BaseModel):
    """One peer as a pod sees it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    address: str = ""
    engine_id: str | None = None
    state: str = ""
    error: str | None = None


class Pairs(BaseModel):
    """Handshaken pairs of one pod, and how many there could be."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    ready: int = 0
    possible: int = 0
    peers: tuple[Peer, ...] = ()


class Requests(BaseModel):
    """Requests by how they were served."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    remote: int = 0
    local: dict[str, int] = Field(default_factory=dict)

    @property
    def total(self) -> int:
        """All requests."""
        return self.remote + sum(self.local.values())


class PodStatus(BaseModel):
    """The part of ``/prebook/v1/status`` that the runner shows."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    role: str = ""
    engine_id: str | None = None
    ready: bool = False
    reason: str = ""
    pairs: Pairs = Pairs()
    requests: Requests = Requests()


def parse_status(value: Mapping[str, Any]) -> PodStatus | None:
    """A status document, or None when it is not one."""
    try:
        return PodStatus.model_validate(value)
    except ValidationError:
        return None


async def fetch_status(*, ip: str, port: int) -> PodStatus | None:
    """The pod's status, or None when it gives none (not up, no dispatch, too slow)."""
    try:
        code, value = await get_json(host=ip, port=port, path="/prebook/v1/status", within=_TIMEOUT)
    except HttpError:
        return None
    return parse_status(value) if code == 200 else None


async def fetch_all(pods: Sequence[PodSnapshot]) -> dict[str, PodStatus]:
    """Status by pod name, of those that give one."""
    found = await asyncio.gather(*(fetch_status(ip=pod.ip, port=pod.port) for pod in pods))
    return {pod.name: status for pod, status in zip(pods, found, strict=True) if status is not None}
