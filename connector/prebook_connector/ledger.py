"""The prefill side's ledger of one transfer: what is settled, posted and done. Pure.

``done <= posted <= settled <= prompt`` (in blocks of the prompt); only the last range may be opened before it has
settled, because it is posted layer by layer (``open_rest``). The ledger is replayable: a registration that comes
after several chunks have settled simply makes all of them postable at once. A preemption starts a new *epoch*: what
was posted before is worthless, and nothing of the new epoch is posted until every WRITE of the old one has drained,
so an old WRITE can never land on top of a new one.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class LedgerError(RuntimeError):
    """An impossible transition: a bug in the caller, never a peer's doing."""


@dataclass(frozen=True)
class Range:
    """Prompt blocks ``[start, stop)``."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass
class Ledger:
    """See the module's text.

    ``block_size`` is in tokens, ``min_blocks`` the smallest range worth a WRITE before the prompt is complete.
    """

    prompt_tokens: int
    block_size: int
    min_blocks: int = 1
    epoch: int = 0
    settled_tokens: int = 0
    posted: int = 0
    first_block: int | None = None  # set by the registration
    in_flight: list[Range] = field(default_factory=list)
    draining: int = 0  # open WRITEs of earlier epochs
    done_blocks: int = 0

    @property
    def prompt_blocks(self) -> int:
        """Blocks that hold the prompt's KV, the last one perhaps partly filled."""
        return -(-self.prompt_tokens // self.block_size)

    @property
    def complete(self) -> bool:
        """Whether all KV of the prompt is final."""
        return self.settled_tokens >= self.prompt_tokens

    @property
    def settled(self) -> int:
        """Blocks whose KV is final: full ones, and the last partial one once the prompt is complete."""
        return self.prompt_blocks if self.complete else self.settled_tokens // self.block_size

    @property
    def all_done(self) -> bool:
        """Whether everything that D registered has been written and acknowledged by the transport."""
        return (
            self.first_block is not None
            and self.complete
            and self.posted >= self.prompt_blocks
            and not self.in_flight
            and not self.draining
        )

    @property
    def quiesced(self) -> bool:
        """Whether no WRITE of any epoch is open."""
        return not self.in_flight and not self.draining

    def settle(self, tokens: int) -> None:
        """KV is final up to ``tokens``. Never goes back within an epoch."""
        self.settled_tokens = max(self.settled_tokens, min(tokens, self.prompt_tokens))

    def register(self, first_block: int) -> None:
        """D registered the prompt's blocks from ``first_block`` on (those before it are cached on D)."""
        if not 0 <= first_block < self.prompt_blocks:
            raise LedgerError(f"first block {first_block} outside a prompt of {self.prompt_blocks} blocks")
        self.first_block = first_block
        self.posted = max(self.posted, first_block)

    @property
    def remaining_blocks(self) -> int:
        """Registered blocks that have not been written yet, computed or not."""
        return self.prompt_blocks - (self.first_block or 0) - self.done_blocks

    def next_write(self, *, most: int | None = None) -> Range | None:
        """The next contiguous range to post, or None: at least ``min_blocks`` unless the prompt is complete, and not
        more than ``most`` blocks (but ``min_blocks``)."""
        if self.first_block is None or self.draining:
            return None
        ready = self.settled - self.posted
        if ready <= 0 or (not self.complete and ready < self.min_blocks):
            return None
        if most is not None:
            ready = min(ready, max(most, self.min_blocks))
        return Range(self.posted, self.posted + ready)

    def open_rest(self) -> Range | None:
        """Takes the rest of the prompt as one range, to be posted layer by layer while its last chunk is computed.

        The range is open until all its layers have moved; None when none may be opened now.
        """
        if self.first_block is None or self.draining or self.posted >= self.prompt_blocks:
            return None
        rest = Range(self.posted, self.prompt_blocks)
        self.posted = rest.stop
        self.in_flight.append(rest)
        return rest

    def post(self, write: Range) -> None:
        """``write`` was handed to the transport."""
        if self.draining or write.start != self.posted or not write.start < write.stop <= self.settled:
            raise LedgerError(f"cannot post {write} at posted={self.posted} settled={self.settled}")
        self.posted = write.stop
        self.in_flight.append(write)

    def finish_write(self, write: Range, *, epoch: int) -> None:
        """The transport reports ``write`` of ``epoch`` as ended (done, or failed and drained)."""
        if epoch != self.epoch:
            if self.draining <= 0:
                raise LedgerError(f"unknown write {write} of epoch {epoch}")
            self.draining -= 1
            return
        self.in_flight.remove(write)
        self.done_blocks += len(write)

    def preempt(self) -> None:
        """The request lost its blocks: everything starts over under a new epoch."""
        self.epoch += 1
        self.draining += len(self.in_flight)
        self.in_flight.clear()
        self.settled_tokens = 0
        self.done_blocks = 0
        self.posted = self.first_block or 0
