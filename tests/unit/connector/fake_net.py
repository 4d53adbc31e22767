"""A network, two kinds of workers and a clock, all fake and deterministic, for tests of the protocol's core.

KV memory is modelled as one integer per region (layer) of a block. A WRITE reads its source when it is
*posted or later* (a transport may read until completion) and lands at completion: so a source that is freed too early,
or a destination that is reused too early, shows as a wrong value, exactly like real corruption would.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from prebook_connector.book_side import BookSide, Outcome
from prebook_connector.peers import PeerTable
from prebook_connector.ports import Groups, HandleState, LinkError, PeerSpec, Posted
from prebook_connector.protocol import Progress, decode
from prebook_connector.push_side import PushSettings, PushSide
from prebook_connector.recorder import MemoryRecorder
from prebook_connector.timeline import Timeline
from prebook_connector.transfer_thread import Core

LEASE = 6.0
BLOCK = 4  # tokens
REGIONS = 3  # layers
MIXED = -2


@dataclass
class Flight:
    """A WRITE under way."""

    source: Node
    target: Node
    local: list[int]
    remote: list[int]
    payload: bytes
    regions: range
    lands_at: float
    state: HandleState = "open"


class Net:
    """All nodes, what flies between them, and the time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.nodes: dict[str, Node] = {}
        self.mail: list[tuple[float, int, str, str, bytes]] = []
        self.flights: list[Flight] = []
        self.latency = 0.01
        self.write_seconds = 0.05
        self.shared = False  # whether WRITEs between two nodes follow one another, as on a real link
        self._busy_until: dict[tuple[str, str], float] = {}
        self._order = itertools.count()

    def send(self, source: Node, agent: str, payload: bytes) -> None:
        """Queues a notification; a dead node gets nothing, a partitioned or stopped one gets it late."""
        self.mail.append((self.now + self.latency, next(self._order), source.agent, agent, payload))

    def advance(self, seconds: float, step: float = 0.02) -> None:
        """Lets time pass; every running node gets its turns."""
        end = self.now + seconds
        while self.now < end:
            self.now += step
            self._land()
            for node in list(self.nodes.values()):
                if node.running:
                    node.core.turn(self.now)

    def lands_at(self, source: Node, target: Node, seconds: float) -> float:
        """When a WRITE that takes the link so long, and is handed over now, lands."""
        link = (source.engine_id, target.engine_id)
        begins = max(self.now, self._busy_until.get(link, 0.0)) if self.shared else self.now
        self._busy_until[link] = begins + seconds
        return begins + seconds

    def _land(self) -> None:
        for flight in list(self.flights):
            blocked = flight.source.cut or flight.target.cut
            if flight.state != "open" or self.now < flight.lands_at or blocked:
                continue
            self.flights.remove(flight)
            if not flight.target.alive or not flight.source.alive or flight.source.agent in flight.target.detached:
                flight.state = "failed"
                continue
            for source, target in zip(flight.local, flight.remote, strict=True):
                flight.target.guard(target)
                for region in flight.regions:
                    flight.target.parts[target, region] = flight.source.parts.get((source, region), -1)
            flight.state = "done"
            if flight.payload:
                self.send(flight.source, flight.target.agent, flight.payload)


class Node:
    """One worker: core, link and KV memory."""

    def __init__(self, net: Net, name: str, role: str) -> None:
        self.net = net
        self.engine_id = name
        self.agent = f"agent-{name}"
        self.parts: dict[tuple[int, int], int] = {}
        self.alive = True
        self.stopped = False
        self.cut = False
        self.detached: set[str] = set()
        self.released: list[str] = []
        self.outcomes: list[Outcome] = []
        self.on_outcome: Callable[[Outcome], None] = self.outcomes.append
        self.guard: Callable[[int], None] = lambda block: None
        self.recorder = MemoryRecorder()
        self.link = FakeLink(self)
        self.peers = PeerTable(
            link=self.link, fetch=self._fetch, engine_id=name, lease_seconds=LEASE, recorder=self.recorder
        )
        timeline = Timeline(folder=None, engine_id=name, role=role, rank=0)
        self.push = self.book = None
        if role == "prefill":
            self.push = PushSide(
                link=self.link,
                peers=self.peers,
                settings=PushSettings(
                    rank=0,
                    block_size=BLOCK,
                    block_bytes=1,
                    regions=REGIONS,
                    lease_seconds=LEASE,
                    progressive=True,
                    min_bytes=0,
                    max_in_flight=2,
                ),
                recorder=self.recorder,
                timeline=timeline,
                release=self.released.append,
            )
        else:
            self.book = BookSide(
                peers=self.peers,
                engine_id=name,
                place=(name, 1),
                rank=0,
                tp_size=1,
                block_size=BLOCK,
                lease_seconds=LEASE,
                flight_seconds=0.5,
                recorder=self.recorder,
                timeline=timeline,
                finish=self._report,
            )
        self.core = Core(link=self.link, peers=self.peers, push=self.push, book=self.book, recorder=self.recorder)
        net.nodes[name] = self

    @property
    def running(self) -> bool:
        """Whether the node gets turns."""
        return self.alive and not self.stopped

    @property
    def spec(self) -> PeerSpec:
        """How others name it."""
        return PeerSpec(self.engine_id, self.engine_id.split("#")[0], 1)

    @property
    def memory(self) -> dict[int, int]:
        """What each block holds: a value when all its regions have the same, else ``MIXED``."""
        held: dict[int, set[int]] = {}
        for (block, _), value in self.parts.items():
            held.setdefault(block, set()).add(value)
        return {block: values.pop() if len(values) == 1 else MIXED for block, values in held.items()}

    def fill(self, block: int, value: int, regions: range = range(REGIONS)) -> None:
        """The engine computes these regions of a block."""
        self.parts.update(dict.fromkeys(((block, region) for region in regions), value))

    def _report(self, outcome: Outcome) -> None:
        self.on_outcome(outcome)  # looked up late: scenarios replace it

    def _fetch(self, spec: PeerSpec) -> Future[dict[tuple[int, int], bytes]]:
        future: Future[dict[tuple[int, int], bytes]] = Future()
        node = self.net.nodes.get(spec.engine_id)
        if node is None or not node.running or node.cut or self.cut:
            future.set_exception(LinkError("no answer"))
        else:
            future.set_result({(0, 0): node.agent.encode()})
        return future


@dataclass
class FakeLink:
    """The transport of one node."""

    node: Node
    refuse_posts: bool = False
    agents: dict[str, str] = field(default_factory=dict)  # engine id -> agent

    def attach(self, spec: PeerSpec, payloads: dict[tuple[int, int], bytes]) -> dict[str, tuple[int, int]]:
        agent = payloads[(0, 0)].decode()
        self.agents[spec.engine_id] = agent
        self.node.detached.discard(agent)
        return {agent: (0, 0)}

    def detach(self, engine_id: str) -> None:
        self.node.detached.add(self.agents.pop(engine_id, ""))

    def notify(self, agent: str, payload: bytes) -> None:
        self.node.net.send(self.node, agent, payload)

    def notifications(self) -> list[tuple[str, bytes]]:
        net, mine = self.node.net, []
        for item in sorted(net.mail):
            due, _, source, target, payload = item
            if target != self.node.agent:
                continue
            sender = next((node for node in net.nodes.values() if node.agent == source), None)
            if due <= net.now and not self.node.cut and not (sender and sender.cut):
                net.mail.remove(item)
                mine.append((source, payload))
        return mine

    def targets(self, engine_id: str) -> frozenset[str]:
        agent = self.agents.get(engine_id)
        return frozenset({agent} if agent else ())

    def writers(self, tp_size: int) -> int:
        return 1

    def post(
        self, engine_id: str, *, local: Groups, remote: Groups, payload: bytes, regions: tuple[int, int] | None = None
    ) -> Posted:
        if self.refuse_posts:
            raise LinkError("refused")
        net = self.node.net
        target = next(node for node in net.nodes.values() if node.agent == self.agents[engine_id])
        assert isinstance(decode(payload), Progress) if regions is None else not payload
        moved = range(*(regions or (0, REGIONS)))
        seconds = net.write_seconds * len(local[0]) * len(moved) / REGIONS
        lands_at = net.lands_at(self.node, target, seconds)
        flight = Flight(self.node, target, list(local[0]), list(remote[0]), payload, moved, lands_at)
        net.flights.append(flight)
        return Posted((flight,), len(local[0]))

    def poll(self, handle: object) -> HandleState:
        assert isinstance(handle, Flight)
        if handle.state == "open" and not handle.target.alive:
            return "failed"
        return handle.state

    def release(self, handle: object) -> bool:
        assert isinstance(handle, Flight)
        if handle.state == "open" and handle in self.node.net.flights:
            self.node.net.flights.remove(handle)
            handle.state = "failed"
        return True
