"""The table of peer engines: pre-warmed handshakes, heartbeats, replaced and dead peers.

Runs on the transfer thread; the only blocking step, fetching a peer's handshake payload over ZMQ, is handed to
``fetch`` (a pool) and picked up as a future, so that a dead peer delays nobody.

A peer is *ready* when its agents are attached and it has been heard: for decode that proves that prefill holds its
descriptors, since prefill cannot send to an agent that it has not attached.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from prebook_connector.leases import PeerClock, heartbeat_interval
from prebook_connector.ports import Link, LinkError, PeerSpec, Recorder
from prebook_connector.protocol import Bye, Heartbeat, encode

Payloads = dict[tuple[int, int], bytes]
Fetch = Callable[[PeerSpec], "Future[Payloads]"]

RETRY_FIRST_SECONDS = 0.25
RETRY_MOST_SECONDS = 10.0


@dataclass
class Peer:
    """One remote engine. ``agents`` maps NIXL agent names to (pp, tp) ranks."""

    spec: PeerSpec
    clock: PeerClock
    agents: dict[str, tuple[int, int]] = field(default_factory=dict)
    error: str | None = None
    draining: bool = False
    undesired_since: float | None = None
    fetching: Future[Payloads] | None = None
    next_attempt: float = 0.0
    attempts: int = 0
    started: float = 0.0
    last_sent: float = 0.0
    echo_sent: float = 0.0  # the peer's stamp in our last heartbeat

    @property
    def attached(self) -> bool:
        """Whether notifications can be sent."""
        return bool(self.agents)

    @property
    def ready(self) -> bool:
        """Whether the pair is warm in both directions."""
        return self.attached and self.clock.heard_at > 0.0

    def state(self, now: float) -> tuple[str, str | None]:
        """(ready | connecting | failed, why), for the status.

        A peer that was silent for a whole lease has failed: heartbeats are due three times in it, also when idle.
        """
        silent = self.clock.silent_for(now)
        if self.ready and silent > self.clock.lease_seconds:
            return "failed", f"silent for {silent:.0f} s"
        if self.ready:
            return "ready", None
        return ("failed" if self.error and not self.attached else "connecting"), self.error


class PeerTable:
    """All peers of one worker."""

    def __init__(self, *, link: Link, fetch: Fetch, engine_id: str, lease_seconds: float, recorder: Recorder) -> None:
        self._link = link
        self._fetch = fetch
        self._engine_id = engine_id
        self._lease = lease_seconds
        self._soonest = min(RETRY_FIRST_SECONDS, heartbeat_interval(lease_seconds, active=True))
        self._recorder = recorder
        self.peers: dict[str, Peer] = {}
        self._by_agent: dict[str, Peer] = {}
        self._managed = False

    @property
    def meeting(self) -> bool:
        """Whether a peer that notifications can be sent to has not been heard yet."""
        return any(peer.attached and not peer.ready for peer in self.peers.values())

    def by_agent(self, agent: str) -> Peer | None:
        """The peer that ``agent`` belongs to, None for a stranger."""
        return self._by_agent.get(agent)

    def ensure(self, spec: PeerSpec, now: float) -> Peer:
        """The peer of ``spec``, which is met when it is new: routers without a dispatcher name peers by request."""
        peer = self.peers.get(spec.engine_id)
        if peer is None:
            peer = Peer(spec=spec, clock=PeerClock(self._lease))
            self.peers[spec.engine_id] = peer
            if self._managed:
                peer.undesired_since = now
        return peer

    def set_desired(self, specs: Iterable[PeerSpec], now: float) -> list[Peer]:
        """Takes the whole list of peers that exist; returns those that were *replaced* and are therefore dead.

        Those that are merely missing stay until they have been missing for a whole lease (see :meth:`expired`).
        """
        self._managed = True
        wanted = {spec.engine_id: spec for spec in specs if spec.engine_id != self._engine_id}
        places = {spec.place: spec.engine_id for spec in wanted.values()}
        for spec in wanted.values():
            peer = self.ensure(spec, now)
            peer.undesired_since = None
        replaced = []
        for engine_id, peer in self.peers.items():
            if engine_id in wanted:
                continue
            if places.get(peer.spec.place, engine_id) != engine_id:
                replaced.append(peer)
            elif peer.undesired_since is None:
                peer.undesired_since = now
        return replaced

    def expired(self, now: float) -> list[Peer]:
        """Peers that have been missing from the list, and silent, for a whole lease."""
        return [
            peer
            for peer in self.peers.values()
            if peer.undesired_since is not None
            and now - peer.undesired_since > self._lease
            and peer.clock.silent_for(now) > self._lease
        ]

    def forget(self, peer: Peer) -> None:
        """Drops a dead peer; the caller has ended its transfers and released their handles."""
        if self.peers.get(peer.spec.engine_id) is peer:
            del self.peers[peer.spec.engine_id]
        self.disconnect(peer)
        self._recorder.count("peers_dropped")

    def disconnect(self, peer: Peer) -> None:
        """Closes the connection to a peer, so that nothing that is under way can land; it is met again later."""
        for agent in peer.agents:
            self._by_agent.pop(agent, None)
        if peer.agents:
            self._link.detach(peer.spec.engine_id)
        peer.agents = {}
        peer.clock = PeerClock(self._lease)

    def heard(self, peer: Peer, *, now: float, at: float, echo: float) -> bool:
        """Notes a sign of life; True when the peer should get our heartbeat at once.

        That is when it does not hold our clock yet, and when it sends a stamp that is much newer than the one we echoed
        last: one side was paused, the lease has run out, and the regular heartbeats would take their time to renew it.
        """
        first = peer.clock.heard_at == 0.0
        peer.clock.heard(now=now, peer_at=at, echo=echo)
        return first or echo == 0.0 or at - peer.echo_sent > self._lease / 2

    def connect(self, now: float) -> bool:
        """Starts and finishes handshakes; True while one is under way."""
        busy = False
        for peer in self.peers.values():
            if peer.attached:
                continue
            if peer.fetching is None:
                if now < peer.next_attempt:
                    continue
                peer.started = now
                peer.fetching = self._fetch(peer.spec)
            busy = True
            if peer.fetching.done():
                self._finish(peer, peer.fetching, now)
        return busy

    def _finish(self, peer: Peer, future: Future[Payloads], now: float) -> None:
        peer.fetching = None
        try:
            agents = self._link.attach(peer.spec, future.result())
        except (LinkError, OSError) as error:
            peer.error = str(error)
            peer.attempts += 1
            delay = min(RETRY_MOST_SECONDS, RETRY_FIRST_SECONDS * 2 ** min(peer.attempts, 8))
            peer.next_attempt = now + delay * random.uniform(0.75, 1.25)
            self._recorder.count("handshakes", ("failed",))
            return
        peer.agents = agents
        peer.error = None
        self._by_agent.update(dict.fromkeys(agents, peer))
        self._recorder.count("handshakes", ("ok",))
        self._recorder.observe("handshake_seconds", now - peer.started)

    def beat(self, now: float, held: Callable[[], dict[str, list[str]]], *, force: Peer | None = None) -> None:
        """Sends the heartbeats that are due. ``held`` gives engine id to the transfers that we hold with it."""
        known: dict[str, list[str]] | None = None
        for peer in self.peers.values():
            if not peer.attached or (peer is not force and now - peer.last_sent < self._soonest):
                continue
            known = held() if known is None else known
            ids = known.get(peer.spec.engine_id, [])
            interval = heartbeat_interval(self._lease, active=bool(ids))
            if not peer.ready:
                interval = min(interval, RETRY_FIRST_SECONDS)
            if peer is not force and now - peer.last_sent < interval:
                continue
            peer.last_sent, peer.echo_sent = now, peer.clock.peer_at
            self.send_all(peer, encode(Heartbeat(self._engine_id, now, peer.clock.peer_at, ids)))

    def say_bye(self) -> None:
        """Tells every peer that this engine drains."""
        for peer in self.peers.values():
            self.send_all(peer, encode(Bye(self._engine_id)))

    def send_all(self, peer: Peer, payload: bytes) -> None:
        """Notifies every agent of ``peer``; a failure is counted (the peer's silence has its own consequences)."""
        for agent in peer.agents:
            self.send(agent, payload)

    def send(self, agent: str, payload: bytes) -> bool:
        """Notifies one agent; False (and counted) when the transport refuses."""
        try:
            self._link.notify(agent, payload)
        except LinkError:
            self._recorder.count("notifications_failed")
            return False
        return True
