"""What the protocol's core needs from the outside, as protocols. Pure (``nixl_link`` has the real one).

An *agent* is the NIXL name of one remote worker; an *engine* is one vLLM instance with one agent a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Groups = Sequence[Sequence[int]]
"""Logical KV block ids, one list a KV cache group."""

SOONEST = 0.7
"""When a WRITE may have ended, as a share of the time that one of its size took before: rates and chunks differ."""

HandleState = Literal["open", "done", "failed"]


class LinkError(RuntimeError):
    """The transport refused an operation; the text says which and why."""


@dataclass(frozen=True)
class PeerSpec:
    """Where an engine's side channel is and how it is sliced."""

    engine_id: str
    host: str
    port: int
    tp_size: int = 1
    pp_size: int = 1
    dp_rank: int = 0
    address: str = ""  # its HTTP address, for people

    @property
    def place(self) -> tuple[str, int]:
        """Host and port: two engine ids at one place mean that one replaced the other."""
        return self.host, self.port


@dataclass(frozen=True)
class Posted:
    """An open WRITE: opaque transport handles and the bytes they move."""

    handles: tuple[object, ...]
    bytes: int
    descriptors: int = 0


class Link(Protocol):
    """One worker's transport. Every method is called on the transfer thread only."""

    def attach(self, spec: PeerSpec, payloads: dict[tuple[int, int], bytes]) -> dict[str, tuple[int, int]]:
        """Adds the agents of ``spec`` from their handshake payloads; agent name to (pp, tp). Raises LinkError."""
        ...

    def detach(self, engine_id: str) -> None:
        """Forgets an engine: agents, descriptors. Nothing of it can land afterwards."""
        ...

    def notify(self, agent: str, payload: bytes) -> None:
        """Sends a notification. Raises LinkError."""
        ...

    def notifications(self) -> list[tuple[str, bytes]]:
        """Drains what arrived: (agent, payload)."""
        ...

    def targets(self, engine_id: str) -> frozenset[str]:
        """Agents of ``engine_id`` that this (prefill) rank writes to."""
        ...

    def writers(self, tp_size: int) -> int:
        """How many prefill ranks write to each rank of a decode engine with ``tp_size``."""
        ...

    def post(
        self, engine_id: str, *, local: Groups, remote: Groups, payload: bytes, regions: tuple[int, int] | None = None
    ) -> Posted:
        """Posts a WRITE of local blocks into remote blocks. Raises LinkError.

        ``regions``: of every block only these pieces, from the first to before the second (layers, in order).
        ``payload`` is the notification that decode gets on completion; none when it is empty.
        """
        ...

    def poll(self, handle: object) -> HandleState:
        """State of one handle."""
        ...

    def release(self, handle: object) -> bool:
        """Frees a handle; False when the transport still works on it."""
        ...


class Recorder(Protocol):
    """Counts and times what happens; see ``metrics``."""

    def count(self, name: str, labels: tuple[str, ...] = (), by: float = 1.0) -> None: ...

    def observe(self, name: str, value: float) -> None: ...
