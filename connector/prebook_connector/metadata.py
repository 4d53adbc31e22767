"""What the scheduler side hands to the worker side with every engine step. Plain data, pickled between processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from prebook_connector.book_side import BookingRequest
from prebook_connector.ports import PeerSpec


@dataclass(frozen=True)
class Announcement:
    """Prefill: a request for a transfer is queued."""

    request_id: str
    transfer_id: str


@dataclass(frozen=True)
class Admission:
    """Prefill: the request starts to compute (again after a preemption)."""

    request_id: str
    prompt_tokens: int
    prompt_digest: bytes


@dataclass(frozen=True)
class PrefillStep:
    """Prefill: what this step does for one request.

    ``settled_before`` tokens are final already (cached by an earlier request), ``settled_after`` once this step's
    forward pass has run on the device. ``last``: that is the whole prompt.
    """

    request_id: str
    new_blocks: list[int]
    settled_before: int
    settled_after: int
    last: bool


@dataclass(frozen=True)
class Finish:
    """Prefill: the request is over and its blocks wait for the release; block ids by KV cache group."""

    request_id: str
    groups: tuple[list[int], ...]


@dataclass(frozen=True)
class Abandon:
    """Decode: prefill need not write this transfer at all."""

    transfer_id: str
    prefill: PeerSpec


@dataclass
class PrebookMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's worth; see each part."""

    announcements: list[Announcement] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    steps: list[PrefillStep] = field(default_factory=list)
    finished: list[Finish] = field(default_factory=list)
    aborted: list[tuple[str, bool]] = field(default_factory=list)  # (request id, the scheduler waits for the release)
    bookings: list[BookingRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    abandoned: list[Abandon] = field(default_factory=list)
    computes: bool = False  # whether this step runs the model, for whatever request

    def is_empty(self) -> bool:
        """Whether the worker has nothing to do."""
        return not (
            self.announcements
            or self.preempted
            or self.admissions
            or self.steps
            or self.finished
            or self.aborted
            or self.bookings
            or self.cancelled
            or self.abandoned
        )
