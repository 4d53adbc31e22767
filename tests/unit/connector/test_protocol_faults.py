"""Whatever happens in whatever order: no wrong KV, no block reused too early, nothing waits for ever, nothing leaks.

The checks are in ``scenario.World``: a WRITE that lands in a block that decode gave up, a committed block with a wrong
value, a second outcome. Here Hypothesis chooses the order of events and faults.
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.connector.fake_net import LEASE
from tests.unit.connector.scenario import Transfer, World

PAUSES = st.sampled_from([None, 0.02, 0.1])


class Faults(RuleBasedStateMachine):
    """Requests, chunks, preemptions, aborts, deaths, pauses and partitions."""

    @initialize()
    def start(self) -> None:
        self.world = World()
        self.world.net.advance(0.5)
        self.count = 0

    def open(self) -> list[Transfer]:
        return [t for t in self.world.transfers.values() if not t.finished and t.prefill is self.world.prefill]

    def booked(self) -> list[Transfer]:
        return [t for t in self.world.transfers.values() if t.d_blocks and t.outcome is None]

    @rule(tokens=st.integers(1, 40), hit=st.integers(0, 3), book=st.booleans(), chunk=st.integers(0, 24), pause=PAUSES)
    def request(self, tokens: int, hit: int, book: bool, chunk: int, pause: float | None) -> None:
        """Both legs start; mostly with a first chunk in the air at once, where faults matter."""
        self.count += 1
        transfer = self.world.new(f"t{self.count}", tokens, first_block=min(hit, -(-tokens // 4) - 1))
        self.world.queue(transfer)
        if book:
            self.world.book(transfer)
            self.world.net.advance(0.06)
        if chunk:
            self.world.chunk(transfer, chunk, pause=pause)
            self.world.net.advance(0.02)

    @rule(pick=st.integers(0, 9))
    def book_late(self, pick: int) -> None:
        waiting = [t for t in self.world.transfers.values() if not t.d_blocks]
        if waiting:
            self.world.book(waiting[pick % len(waiting)])

    @precondition(lambda self: self.open())
    @rule(pick=st.integers(0, 9), tokens=st.integers(1, 24), pause=PAUSES)
    def compute(self, pick: int, tokens: int, pause: float | None) -> None:
        self.world.chunk(self.open()[pick % len(self.open())], tokens, pause=pause)
        self.world.net.advance(0.02)

    @precondition(lambda self: self.open())
    @rule(pick=st.integers(0, 9), again=st.integers(1, 24))
    def preempt(self, pick: int, again: int) -> None:
        transfer = self.open()[pick % len(self.open())]
        self.world.preempt(transfer)
        self.world.chunk(transfer, again)

    @precondition(lambda self: self.open())
    @rule(pick=st.integers(0, 9))
    def abort_prefill(self, pick: int) -> None:
        self.world.abort_prefill(self.open()[pick % len(self.open())])

    @precondition(lambda self: self.booked())
    @rule(pick=st.integers(0, 9))
    def abort_decode(self, pick: int) -> None:
        self.world.abort_decode(self.booked()[pick % len(self.booked())])

    @precondition(lambda self: self.booked())
    @rule(pick=st.integers(0, 9))
    def dispatcher_fails(self, pick: int) -> None:
        assert self.world.decode.book is not None
        self.world.decode.book.fail(self.booked()[pick % len(self.booked())].name, "leg failed", self.world.net.now)

    @precondition(lambda self: len(self.world.net.nodes) < 5)
    @rule()
    def kill_prefill(self) -> None:
        self.world.kill_prefill()

    @rule(seconds=st.sampled_from([0.1, 1.0, LEASE * 1.5]), abort=st.booleans())
    def stop_prefill_for(self, seconds: float, abort: bool) -> None:
        self.world.prefill.stopped = True
        if abort and self.booked():
            self.world.abort_decode(self.booked()[0])
        self.world.net.advance(seconds, step=0.05)
        self.world.prefill.stopped = False

    @rule(seconds=st.sampled_from([0.1, 1.0, LEASE * 1.5]), abort=st.booleans())
    def partition_for(self, seconds: float, abort: bool) -> None:
        self.world.decode.cut = True
        if abort and self.booked():
            self.world.abort_decode(self.booked()[0])
        self.world.net.advance(seconds, step=0.05)
        self.world.decode.cut = False

    @rule(refuse=st.booleans())
    def refuse_posts(self, refuse: bool) -> None:
        self.world.prefill.link.refuse_posts = refuse

    @rule(seconds=st.sampled_from([0.02, 0.1, 0.5, 2.0, LEASE * 1.5]))
    def wait(self, seconds: float) -> None:
        self.world.net.advance(seconds, step=0.02 if seconds < 1 else 0.1)

    @invariant()
    def no_internal_errors(self) -> None:
        for node in self.world.net.nodes.values():
            assert not any(name.startswith("thread_errors") for name in node.recorder.totals())

    def _why(self, transfer: Transfer) -> str:
        assert self.world.decode.book is not None
        entry = self.world.decode.book.entry(transfer.name)
        peers = {name: peer.state(self.world.net.now) for name, peer in self.world.decode.peers.peers.items()}
        return f"{transfer.name} waits for ever: {entry}; peers {peers}"

    def teardown(self) -> None:
        """Faults end: everything must come to its end, too."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.prefill.stopped = False
        world.decode.cut = False
        world.introduce()
        for transfer in self.open():
            world.abort_prefill(transfer)
        world.net.advance(LEASE * 6, step=0.1)
        for transfer in world.transfers.values():
            if transfer.d_blocks:
                assert transfer.outcome is not None, self._why(transfer)
        assert world.decode.book is not None
        assert world.prefill.push is not None
        assert world.decode.book.booked == 0
        assert world.prefill.push.open == 0
        assert len(world.prefill.released) == len(set(world.prefill.released))
        ours = [t for t in world.transfers.values() if t.prefill is world.prefill]
        owed = {f"p-{t.name}" for t in ours if t.finished and t.p_blocks}
        assert owed <= set(world.prefill.released)


Faults.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    # Shrinking a failure takes longer than finding it; run with --hypothesis-seed and Phase.shrink to study one.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
TestFaults = Faults.TestCase
