"""One request through a fake pair, with the schedulers' part played by the test: allocation, chunks, frees."""

from __future__ import annotations

from dataclasses import dataclass, field

from prebook_connector.book_side import BookingRequest, Outcome
from prebook_connector.params import digest
from prebook_connector.transfer_thread import Core, TransferThread
from tests.unit.connector.fake_net import BLOCK, REGIONS, Net, Node


def blocks_of(tokens: int) -> int:
    """Blocks that hold ``tokens``."""
    return -(-tokens // BLOCK)


@dataclass
class Transfer:
    """The test's view of one request on both engines."""

    name: str
    tokens: int
    prefill: Node
    decode: Node
    first_block: int = 0
    computed: int = 0
    epoch: int = 0
    p_blocks: list[int] = field(default_factory=list)
    d_blocks: list[int] = field(default_factory=list)
    outcome: Outcome | None = None
    finished: bool = False
    aborted: bool = False

    def value(self, index: int) -> int:
        """What block ``index`` of the prompt holds once it is computed (the same in every epoch)."""
        return hash((self.name, index)) & 0xFFFFFFF


class World:
    """A fake pair and its requests; checks the promises as it goes."""

    def __init__(self) -> None:
        self.net = Net()
        self.prefill = Node(self.net, "P", "prefill")
        self.decode = Node(self.net, "D", "decode")
        self.transfers: dict[str, Transfer] = {}
        self._next_block = 0
        self._booked: dict[int, str] = {}  # decode block -> transfer that owns it
        self._source: dict[int, str] = {}  # prefill block -> transfer
        self.decode.guard = self._guard
        self.decode.on_outcome = self._outcome
        self.introduce()

    def introduce(self) -> None:
        """The dispatchers' lists."""
        for node in (self.prefill, self.decode):
            others = [n.spec for n in self.net.nodes.values() if n.alive and (n.push is None) != (node.push is None)]
            if node.running:
                node.core.set_peers(others, self.net.now)

    def new(self, name: str, tokens: int, *, first_block: int = 0) -> Transfer:
        """A request whose two legs will start."""
        transfer = Transfer(name, tokens, self.prefill, self.decode, first_block)
        self.transfers[name] = transfer
        return transfer

    def _allocate(self, count: int) -> list[int]:
        blocks = list(range(self._next_block, self._next_block + count))
        self._next_block += count
        return blocks

    # -- decode --------------------------------------------------------------------------------------------------

    def book(self, transfer: Transfer) -> None:
        """Decode allocates and registers."""
        transfer.d_blocks = self._allocate(blocks_of(transfer.tokens) - transfer.first_block)
        self._booked.update(dict.fromkeys(transfer.d_blocks, transfer.name))
        assert self.decode.book is not None
        request = BookingRequest(
            f"d-{transfer.name}",
            transfer.name,
            transfer.prefill.spec,
            [list(transfer.d_blocks)],
            transfer.first_block,
            transfer.tokens,
            digest(range(transfer.tokens)),
        )
        self.decode.book.book(request, self.net.now)

    def abort_decode(self, transfer: Transfer) -> None:
        """Decode's client went away."""
        assert self.decode.book is not None
        transfer.aborted = True
        self.decode.book.cancel(f"d-{transfer.name}", self.net.now)

    def _outcome(self, outcome: Outcome) -> None:
        transfer = self.transfers[outcome.request_id.removeprefix("d-")]
        assert transfer.outcome is None, "an outcome must be reported once"
        transfer.outcome = outcome
        kept = len(transfer.d_blocks)
        if outcome.failed:
            kept = 0
        elif outcome.invalid_blocks:
            kept = transfer.d_blocks.index(outcome.invalid_blocks[0])
        if not transfer.aborted:
            for index in range(kept):
                landed = self.decode.memory.get(transfer.d_blocks[index])
                expected = transfer.value(transfer.first_block + index)
                assert landed == expected, f"{transfer.name}: wrong KV in block {index} of {kept}"
        for block in transfer.d_blocks:
            del self._booked[block]

    def _guard(self, block: int) -> None:
        assert block in self._booked, "a WRITE landed in a block that decode no longer holds for it"

    # -- prefill -------------------------------------------------------------------------------------------------

    def queue(self, transfer: Transfer) -> None:
        """The prefill leg arrived."""
        assert transfer.prefill.push is not None
        transfer.prefill.push.announce(f"p-{transfer.name}", transfer.name, self.net.now)

    def chunk(self, transfer: Transfer, tokens: int, *, pause: float | None = None) -> None:
        """One step of prefill; admits first. ``pause``: seconds that each layer takes, told when it is the last chunk.

        Layers that have not run hold a wrong value, so that a part that leaves too early shows.
        """
        push = transfer.prefill.push
        assert push is not None
        request_id = f"p-{transfer.name}"
        if not transfer.p_blocks:
            prompt = digest(range(transfer.tokens))
            push.admit(request_id, prompt_tokens=transfer.tokens, digest=prompt, now=self.net.now)
        first = transfer.computed // BLOCK
        transfer.computed = min(transfer.tokens, transfer.computed + tokens)
        new = self._allocate(blocks_of(transfer.computed) - len(transfer.p_blocks))
        transfer.p_blocks += new
        push.grow(request_id, new)
        for block in transfer.p_blocks[first:]:
            transfer.prefill.fill(block, -9)
        for region in range(REGIONS):
            for index, block in enumerate(transfer.p_blocks[first:], start=first):
                transfer.prefill.fill(block, transfer.value(index), range(region, region + 1))
            if pause is not None and transfer.computed == transfer.tokens and region < REGIONS - 1:
                transfer.prefill.core.settle_layers(None, [(request_id, region + 1)])
                self.net.advance(pause)
        if not transfer.prefill.alive:
            return
        transfer.prefill.core.settle(None, [(request_id, transfer.computed)])
        if transfer.computed == transfer.tokens:
            transfer.finished = True
            push.finish(request_id, (list(transfer.p_blocks),), self.net.now)

    def preempt(self, transfer: Transfer) -> None:
        """Prefill loses the request's blocks to others, which overwrite them once the fence is passed."""
        assert transfer.prefill.push is not None
        request_id = f"p-{transfer.name}"
        transfer.prefill.core.preempt(request_id)
        for _ in range(40):
            if transfer.prefill.core.drained([request_id]):
                break
            self.net.advance(0.02)
        else:
            transfer.prefill.core.sever([request_id], self.net.now)
        for block in transfer.p_blocks:
            transfer.prefill.fill(block, -7)
        transfer.p_blocks, transfer.computed = [], 0

    def abort_prefill(self, transfer: Transfer) -> None:
        """The prefill leg was aborted."""
        assert transfer.prefill.push is not None
        transfer.finished = True
        transfer.prefill.push.abort(f"p-{transfer.name}", held=bool(transfer.p_blocks), now=self.net.now)

    def kill_prefill(self) -> Node:
        """Prefill dies and a new process takes its place."""
        old = self.prefill
        old.alive = False
        self.prefill = Node(self.net, f"P#{len(self.net.nodes)}", "prefill")
        self.introduce()
        return old


def resting_thread(core: Core) -> TransferThread:
    """The thread of ``core``, with intervals that tell the paces apart; it is not started."""
    return TransferThread(
        core,
        active_poll_seconds=0.0005,
        waiting_poll_seconds=0.003,
        idle_poll_seconds=0.25,
        prepare=lambda: None,
        on_error=lambda error, call: None,
        name="not started",
    )
