"""The decode side's state machine of one transfer. Pure.

``BOOKED -> COMMITTED | FAILED`` and, when decode wants out, ``BOOKED -> CANCELLING -> RELEASED``. Only COMMITTED,
a quiesced FAILED and RELEASED allow the blocks to be used or freed (``settled``): a WRITE that was posted cannot be
recalled, so anything less could let prefill write into a block that already belongs to another request.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field


class State(enum.Enum):
    """States of a booking; see the module's text."""

    BOOKED = "booked"
    FAILING = "failing"  # will not be completed, but not yet known to be quiet
    CANCELLING = "cancelling"
    COMMITTED = "committed"
    FAILED = "failed"
    RELEASED = "released"


SETTLED = frozenset({State.COMMITTED, State.FAILED, State.RELEASED})


@dataclass
class Booking:
    """One transfer as seen by one decode worker.

    ``first_block`` and ``blocks`` describe the registered range of the prompt. ``registered`` holds the prefill ranks
    that were sent a registration: only they can write, so only they must be heard before the blocks are free.
    """

    transfer_id: str
    first_block: int
    blocks: int
    expected_ranks: int
    registered: set[str] = field(default_factory=set)  # agents that know the destination
    quiet: set[str] = field(default_factory=set)  # of these, the ones that said nothing can still land
    committed: set[str] = field(default_factory=set)
    epoch: int = 0
    state: State = State.BOOKED
    reason: str = ""
    _arrived: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    # Of what has arrived, for `near_end`, which is asked at every look of the transfer thread: kept, not counted again.
    _missing: int = 1
    _largest: int = 0

    @property
    def settled(self) -> bool:
        """Whether the blocks may be used (COMMITTED) or freed."""
        return self.state in SETTLED

    def progress(self, agent: str, *, epoch: int, start: int, stop: int) -> None:
        """A WRITE of ``agent`` has landed. Messages of an older epoch are ignored, a newer one resets the count."""
        if self.settled or epoch < self.epoch:
            return
        self._enter(epoch)
        self._arrived.setdefault(agent, []).append((start, stop))
        self._missing = self.blocks - self.arrived_blocks()
        self._largest = max(self._largest, stop - start)

    def commit(self, agent: str, *, epoch: int, ranks: int) -> None:
        """``agent`` has finished its part. The transfer is committed when every writing rank has."""
        if self.settled or epoch < self.epoch:
            return
        self._enter(epoch)
        self.committed.add(agent)
        self.quiet.add(agent)
        self.expected_ranks = max(1, ranks)
        if self.state is State.BOOKED and len(self.committed) >= self.expected_ranks:
            self.state = State.COMMITTED
        else:
            self._check_quiet()

    def fail(self, agent: str, *, epoch: int, reason: str, quiesced: bool) -> None:
        """``agent`` will not complete the transfer; what arrived in an older epoch than ``epoch`` does not count."""
        if self.settled:
            return
        self._enter(epoch)
        if quiesced:
            self.quiet.add(agent)
        self.give_up(reason)

    def give_up(self, reason: str) -> None:
        """The transfer will not be completed: FAILED once every registered rank is quiet."""
        if self.state is State.BOOKED:
            self.state, self.reason = State.FAILING, reason
        self._check_quiet()

    def cancel(self, reason: str) -> None:
        """Decode does not want the KV any more (client gone, failed over)."""
        if self.state in (State.BOOKED, State.FAILING):
            self.state, self.reason = State.CANCELLING, reason
        self._check_quiet()

    def acknowledged(self, agent: str) -> None:
        """``agent`` promises that nothing of this transfer can still land (or is known to be dead)."""
        self.quiet.add(agent)
        self._check_quiet()

    def arrived_blocks(self) -> int:
        """Length of the prefix of the registered range, in blocks, that every registered rank has written."""
        if not self.registered:
            return 0
        return min(self._prefix(self._arrived.get(agent, [])) for agent in self.registered)

    @property
    def near_end(self) -> bool:
        """Whether the next WRITE may be the last one, as far as the size of those before it tells."""
        return self.state is not State.BOOKED or self._missing <= self._largest

    @property
    def missing_share(self) -> float:
        """What has not arrived, in WRITEs as large as the largest so far; infinite before the first."""
        return self._missing / self._largest if self._largest else math.inf

    def _prefix(self, ranges: list[tuple[int, int]]) -> int:
        reached = self.first_block
        for start, stop in sorted(ranges):
            if start > reached:
                break
            reached = max(reached, stop)
        return min(reached - self.first_block, self.blocks)

    def _enter(self, epoch: int) -> None:
        if epoch > self.epoch:
            self.epoch = epoch
            self._arrived.clear()
            self._missing, self._largest = 1, 0
            self.committed.clear()

    def _check_quiet(self) -> None:
        if not self.registered <= self.quiet:
            return
        if self.state is State.FAILING:
            self.state = State.FAILED
        elif self.state is State.CANCELLING:
            self.state = State.RELEASED
