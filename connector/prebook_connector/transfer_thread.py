"""The one thread of a worker that owns its NIXL agent.

Every NIXL call happens here: NIXL is not thread-safe by default, and its own progress thread (whose polling interval
cannot be set from Python) would burn a core even when nothing moves. The engine's main thread only hands over small
calls (:meth:`TransferThread.submit`) and picks results up; it never waits for the network.

Polling (see :class:`Pace`): every ``active_poll_seconds`` while a request waits for what comes next; at most every
``waiting_poll_seconds`` while WRITEs are open that prefill still computes behind, because each look takes time from the
engine's own thread and hurries nothing as long as the link has something to send; not before ``idle_poll_seconds`` when
what was settled has left and the next chunk is being computed; when nothing moves, ever more rarely up to
``EXPECTING_POLL_SECONDS`` while a registration or a peer's first heartbeat is expected, and else up to
``idle_poll_seconds``. A submitted call wakes the thread at once: a request is one, and so is a chunk that has settled.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from prebook_connector.book_side import BookSide
from prebook_connector.peers import Peer, PeerTable
from prebook_connector.ports import Link, PeerSpec, Recorder
from prebook_connector.protocol import (
    AnyMessage,
    Bye,
    Cancel,
    CancelAck,
    Commit,
    Fail,
    Heartbeat,
    Progress,
    ProtocolError,
    Register,
    decode,
)
from prebook_connector.push_side import PushSide


class Pace(enum.Enum):
    """How soon the thread should look again."""

    IDLE = enum.auto()
    COMPUTING = enum.auto()
    EXPECTING = enum.auto()
    WAITING = enum.auto()
    URGENT = enum.auto()


class Fence(Protocol):
    """Something on the device that a step's KV writes precede (a CUDA event)."""

    def query(self) -> bool:
        """Whether the device has passed it; never blocks."""
        ...


T = TypeVar("T")
ASK_SECONDS = 30.0
EXPECTING_POLL_SECONDS = 0.02
"""Longest polling interval while nothing moves and a registration or a heartbeat may come any moment."""
COMMIT_STRIDE_SECONDS = 0.004
"""Decode's looks while prefill computes: the commit of a prompt of one chunk comes without any progress before it."""

Settled = Sequence[tuple[str, int]]
"""(request id, tokens whose KV is final; or, of a prompt's last chunk under way, regions)."""


class Core:
    """What one turn of the thread does; synchronous and without a thread, so that tests can drive it."""

    def __init__(
        self, *, link: Link, peers: PeerTable, push: PushSide | None, book: BookSide | None, recorder: Recorder
    ) -> None:
        self.link = link
        self.peers = peers
        self.push = push
        self.book = book
        self.recorder = recorder
        self.draining = False
        self._sides: list[PushSide | BookSide] = [side for side in (push, book) if side is not None]
        self._unread: list[tuple[str, bytes]] = []  # notifications that a glance has found
        self._fences: deque[tuple[Fence | None, Settled, bool]] = deque()
        self._dying: dict[str, Peer] = {}

    @property
    def busy(self) -> bool:
        """Whether any transfer is open."""
        return any(side.busy for side in self._sides)

    @property
    def pace(self) -> Pace:
        """Whether something moves, and whether somebody waits for it."""
        if self._fences or self._dying or any(side.urgent for side in self._sides):
            return Pace.URGENT
        if self.busy and not math.isinf(self.stride):
            return Pace.WAITING
        expecting = self.peers.meeting or (self.push is not None and self.push.expecting)
        if expecting:
            return Pace.EXPECTING
        return Pace.COMPUTING if self.busy else Pace.IDLE

    def settle(self, fence: Fence | None, settled: Settled) -> None:
        """``settled`` holds once ``fence`` has passed (None: it has). Fences pass in the order in which they came."""
        self._fences.append((fence, settled, False))

    def settle_layers(self, fence: Fence | None, settled: Settled) -> None:
        """The same for the first regions of the chunks that the engine computes now, which are their prompts' last."""
        self._fences.append((fence, settled, True))

    def preempt(self, request_id: str) -> None:
        """The request loses its blocks: what its earlier steps have yet to settle is worthless."""
        self._fences = deque(
            (fence, [item for item in settled if item[0] != request_id], by_layer)
            for fence, settled, by_layer in self._fences
        )
        if self.push is not None:
            self.push.preempt(request_id)

    def set_peers(self, specs: Sequence[PeerSpec], now: float) -> None:
        """The dispatcher's current list of peer engines."""
        for peer in self.peers.set_desired(specs, now):
            self._kill(peer, now)

    def drained(self, request_ids: Sequence[str]) -> bool:
        """Whether no WRITE reads these requests' blocks."""
        return self.push is None or not any(self.push.reading(request_id) for request_id in request_ids)

    def sever(self, request_ids: Sequence[str], now: float) -> None:
        """These requests' blocks are about to be overwritten under open WRITEs: cut the connections that they use."""
        if self.push is None:
            return
        for engine_id in {self.push.reading(request_id) for request_id in request_ids} - {None}:
            assert engine_id is not None
            self.push.sever(engine_id, now)
            if (peer := self.peers.peers.get(engine_id)) is not None:
                self.peers.disconnect(peer)
            self.recorder.count("fence_timeouts")

    def drain(self) -> None:
        """Tells peers that this engine goes away; what is open goes on to its end."""
        self.draining = True
        if self.push is not None:
            self.push.draining = True
        if self.book is not None:
            self.book.draining = True
        self.peers.say_bye()

    @property
    def stride(self) -> float:
        """Seconds between two looks at the pace of WAITING."""
        return self.push.stride if self.push is not None else COMMIT_STRIDE_SECONDS

    def glance(self, now: float) -> bool:
        """Moves what is under way on. Whether that was enough: nothing has come, ended, or settled, and nothing is due.

        Most looks while prefill computes find just this, on a core whose caches hold the model: the less they touch,
        the less of a step they take.
        """
        self._unread += self.link.notifications()
        if self._unread or self._fences:
            return False
        return all(side.undisturbed(now) for side in self._sides)

    def turn(self, now: float) -> Pace:
        """One round of everything that may be due."""
        handshaking = self.peers.connect(now)
        arrived, self._unread = self._unread + self.link.notifications(), []
        for agent, payload in arrived:
            self._receive(agent, payload, now)
        if self.push is not None:
            while self._fences and (self._fences[0][0] is None or self._fences[0][0].query()):
                _, settled, by_layer = self._fences.popleft()
                for request_id, amount in settled:
                    if by_layer:
                        self.push.settle_layers(request_id, amount, now)
                    else:
                        self.push.settle(request_id, amount, now)
            self.push.step(now)
        if self.book is not None:
            self.book.step(now)
        for peer in self.peers.expired(now):
            self._kill(peer, now)
        self._bury(now)
        self.peers.beat(now, self._held)
        return Pace.URGENT if handshaking else self.pace

    def _held(self) -> dict[str, list[str]]:
        held = self.push.held_with() if self.push is not None else {}
        if self.book is not None:
            held = {**held, **self.book.held_with()}
        return held

    def _kill(self, peer: Peer, now: float) -> None:
        """The peer's process is gone: end everything with it, then forget it."""
        if self.book is not None:
            self.book.on_dead(peer, now)
        if self.push is not None:
            self.push.on_dead(peer, now)
        self._dying[peer.spec.engine_id] = peer

    def _bury(self, now: float) -> None:
        for engine_id, peer in list(self._dying.items()):
            if self.push is None or not self.push.writes_to(engine_id):
                del self._dying[engine_id]
                self.peers.forget(peer)

    def _receive(self, agent: str, payload: bytes, now: float) -> None:
        try:
            message = decode(payload)
        except ProtocolError as error:
            self.recorder.count("bad_messages", (error.kind,))
            return
        peer = self.peers.by_agent(agent)
        if peer is not None and isinstance(message, Heartbeat | Register):
            if self.peers.heard(peer, now=now, at=message.at, echo=message.echo):
                self.peers.beat(now, self._held, force=peer)
        elif peer is not None:
            peer.clock.heard_at = now
        handle = self._for_prefill if self.push is not None else self._for_decode
        if not handle(agent, peer, message, now):
            self.recorder.count("bad_messages", ("wrong_role",))

    def _for_prefill(self, agent: str, peer: Peer | None, message: AnyMessage, now: float) -> bool:
        """Handles what decode says; False when prefill cannot be meant."""
        assert self.push is not None
        match message:
            case Register():
                self.push.on_register(agent, message, now)
            case Cancel():
                self.push.on_cancel(agent, message.transfer_id, now)
            case Heartbeat():
                if peer is not None:
                    self.push.on_held(peer, message.at, message.transfer_ids, now)
            case Bye():
                pass
            case _:
                return False
        return True

    def _for_decode(self, agent: str, peer: Peer | None, message: AnyMessage, now: float) -> bool:
        """Handles what prefill says; False when decode cannot be meant."""
        assert self.book is not None
        match message:
            case Progress():
                self.book.on_progress(agent, message, now)
            case Commit():
                self.book.on_commit(agent, message, now)
            case Fail():
                self.book.on_fail(agent, message, now)
            case CancelAck():
                self.book.on_ack(agent, message.transfer_id, now)
            case Bye():
                if peer is not None:
                    self.book.on_bye(peer)
            case Heartbeat():
                pass
            case _:
                return False
        return True


class TransferThread:
    """Drives a :class:`Core` on a thread of its own."""

    def __init__(
        self,
        core: Core,
        *,
        active_poll_seconds: float,
        waiting_poll_seconds: float,
        idle_poll_seconds: float,
        prepare: Callable[[], None],
        on_error: Callable[[BaseException, str], None],
        name: str,
    ) -> None:
        self.core = core
        self._active = active_poll_seconds
        self._waiting = waiting_poll_seconds
        self._idle = idle_poll_seconds
        self._prepare = prepare
        self._on_error = on_error
        self._inbox: deque[tuple[bool, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = deque()
        self._turned_at = -math.inf
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Has ``call`` made on the thread, soon, in order."""
        self._inbox.append((True, call, args, kwargs))
        self._wake.set()

    def leave(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Has ``call`` made on the thread, in order, but does not wake it: nothing follows from this call alone."""
        self._inbox.append((False, call, args, kwargs))

    def ask(self, call: Callable[..., T], *args: Any) -> T:
        """Has ``call`` made on the thread and waits for its result (for the rare moments when the engine must know)."""
        answer: Future[T] = Future()

        def make() -> None:
            try:
                answer.set_result(call(*args))
            except Exception as error:
                answer.set_exception(error)

        self.submit(make)
        return answer.result(timeout=ASK_SECONDS)

    def depth(self) -> int:
        """Calls that wait to be made."""
        return len(self._inbox)

    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self, timeout: float) -> None:
        """Ends the thread; says nothing to peers (their leases and this process's end do)."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        self._prepare()
        pause, pace = self._active, Pace.URGENT
        while not self._stop.is_set():
            self._wake.clear()
            pace = self.look(pace)
            pause = self.pause(pace, before=pause)
            self._wake.wait(pause)

    def pause(self, pace: Pace, *, before: float) -> float:
        """Seconds until the next look, when the pause before it was ``before``."""
        match pace:
            case Pace.URGENT:
                return self._active
            case Pace.WAITING:
                return max(min(self.core.stride, self._waiting), self._active)
            case Pace.COMPUTING:
                return self._idle
            case Pace.EXPECTING:
                longest = min(self._idle, EXPECTING_POLL_SECONDS)
            case Pace.IDLE:
                longest = self._idle
        return min(longest, max(before, 0.001) * 1.5)

    def look(self, pace: Pace) -> Pace:
        """Makes the calls and has the core do what is due: at the pace of waiting often no more than a glance.

        A whole turn comes at least every ``idle_poll_seconds``, because heartbeats are due whatever the link does.
        """
        called = False
        while self._inbox:
            asks, call, args, kwargs = self._inbox.popleft()
            called = called or asks
            try:
                call(*args, **kwargs)
            except Exception as error:  # the thread must outlive any single transfer
                self._on_error(error, getattr(call, "__name__", "call"))
        now = time.monotonic()
        try:
            if pace is Pace.WAITING and not called and now - self._turned_at < self._idle and self.core.glance(now):
                return pace
            self._turned_at = now
            return self.core.turn(now)
        except Exception as error:  # reported, counted, and retried: its state is still there
            self._on_error(error, "turn")
            return Pace.WAITING
