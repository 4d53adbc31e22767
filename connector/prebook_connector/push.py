"""What prefill keeps of one transfer, and the settings that its side of the protocol needs. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from prebook_connector.ledger import Ledger, Range
from prebook_connector.ports import Groups
from prebook_connector.protocol import Register


@dataclass(frozen=True)
class PushSettings:
    """The part of the connector's settings that prefill needs."""

    rank: int
    block_size: int
    block_bytes: int  # bytes of one logical block on this rank, all layers
    lease_seconds: float
    progressive: bool
    min_bytes: int
    max_in_flight: int
    regions: int = 0  # pieces of a block that settle one after the other, in order; 0: blocks are sent whole
    check_every: int = 1  # with a checksum function: one transfer in this many is checked


@dataclass
class Rest:
    """The last range of a prompt, posted layer by layer: regions ``[0, posted)`` have been handed to the transport."""

    range: Range
    epoch: int
    posted: int = 0
    open: int = 0  # WRITEs of it that are under way


@dataclass
class OpenWrite:
    """A WRITE under way; ``rest`` when it is a part of that, else it moves its range whole."""

    range: Range
    epoch: int
    handles: list[object]
    bytes: int
    posted_at: float
    rest: Rest | None = None
    failed: bool = False
    due_at: float = 0.0  # it is not expected to end before


@dataclass
class Push:
    """One transfer on this prefill rank; times are of the monotonic clock."""

    transfer_id: str
    since: float
    request_id: str | None = None
    prompt_tokens: int = 0
    digest: bytes = b""
    ledger: Ledger | None = None
    whole: bool = False  # terminal push: the ledger's unit is the whole prompt
    blocks: list[int] = field(default_factory=list)
    final_groups: Groups | None = None
    registrations: dict[str, Register] = field(default_factory=dict)
    writes: list[OpenWrite] = field(default_factory=list)
    passed_over_at: float = 0.0  # since when it has nothing under way because of others; 0: not
    settled_regions: int = 0  # of the last chunk, while it is computed
    region_seconds: float = 0.0  # what each of them took to compute
    next_part: int = 0  # how many of them will have settled when the next part leaves
    rest: Rest | None = None
    held: bool = False  # the scheduler waits for the release
    admitted_at: float = 0.0
    registered_at: float = 0.0
    completed_at: float = 0.0
    settled_at: float = 0.0
    first_done_at: float = 0.0
    bytes_done: int = 0
    bytes_early: int = 0
    writes_done: int = 0
    checksums: list[tuple[int, int, int]] = field(default_factory=list)
    failure: str = ""  # why it will not be completed; set once
    announced_failure: bool = False
    severed: bool = False  # its WRITEs are aborted instead of waited for

    @property
    def engine_id(self) -> str | None:
        """Decode's engine, once registered."""
        return next(iter(self.registrations.values())).decode_engine_id if self.registrations else None

    @property
    def expecting(self) -> bool:
        """Whether the engine has the request, and some decode rank's registration or handshake is still missing."""
        if self.request_id is None or self.failure:
            return False
        return not self.registrations or (self.ledger is not None and self.ledger.first_block is None)

    @property
    def due_at(self) -> float:
        """When the last of its open WRITEs may have ended at the soonest."""
        return max((write.due_at for write in self.writes), default=0.0)

    @property
    def remaining_blocks(self) -> int:
        """Blocks that decode has registered and that have not been written yet; 0 before both halves are there."""
        if self.ledger is None or not self.registrations:
            return 0
        if self.whole:
            return sum(map(len, next(iter(self.registrations.values())).block_ids))
        return self.ledger.remaining_blocks
