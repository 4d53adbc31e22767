"""The peers this pod knows, as a pure state machine: observations in, events out. Time is given, never read.

A peer is an address from discovery plus the engine that was last seen there. Rules:

- another engine id at the same address replaces the engine at once: everything under way with the old one is lost;
- a refused connection loses the engine at once (the process is gone), time-outs only after ``lost_after`` seconds;
- an address that discovery no longer lists takes no new work, but stays known until its work here has ended;
- whether KV can flow is the connector's word (:meth:`PeerTable.paired`); in the stock modes, which have no such word,
  an engine that was seen and fits counts as paired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from prebook_connector.dispatch.identity import Identity
from prebook_connector.dispatch.reasons import Failure


class PeerState(StrEnum):
    """Where a peer stands."""

    UNKNOWN = "unknown"
    """Never answered yet."""
    CONNECTING = "connecting"
    """Answers and fits; the connector has not finished its handshake."""
    READY = "ready"
    DRAINING = "draining"
    INCOMPATIBLE = "incompatible"
    """Answers, but must not pair; the error says why."""
    FAILED = "failed"
    """The connector's handshake failed; it tries again."""
    LOST = "lost"
    """Used to answer and does not any more."""


class PollFailure(StrEnum):
    """How an identity poll went wrong."""

    REFUSED = "refused"
    TIMEOUT = "timeout"
    GARBAGE = "garbage"


@dataclass(frozen=True)
class Pair:
    """What the connector says about the pair with one engine: ready, connecting or failed, and why."""

    state: str
    error: str | None = None


@dataclass(frozen=True)
class Peer:
    """One address. ``load_others`` is the load the engine reported beyond what came from this pod (tokens)."""

    address: str
    identity: Identity | None = None
    error: str | None = None
    lost: bool = False
    silent: bool = False
    """Lost because it does not answer, not because its process is known to be gone: it may still write."""
    leaving: bool = False
    pair: Pair | None = None
    in_flight_tokens: int = 0
    in_flight: int = 0
    load_others: int = 0
    picked: int = 0
    failing_since: float | None = None
    changed: float = 0.0
    avoid_until: float = float("-inf")

    def state(self, *, needs_pair: bool) -> PeerState:
        """The state that policy, metrics and status go by."""
        if self.lost:
            return PeerState.LOST
        if self.identity is None:
            return PeerState.INCOMPATIBLE if self.error else PeerState.UNKNOWN
        if self.error:
            return PeerState.INCOMPATIBLE
        if self.identity.draining or self.leaving:
            return PeerState.DRAINING
        if not needs_pair or (self.pair is not None and self.pair.state == "ready"):
            return PeerState.READY
        failed = self.pair is not None and self.pair.state == "failed"
        return PeerState.FAILED if failed else PeerState.CONNECTING

    @property
    def score(self) -> int:
        """Tokens that a new leg would queue behind."""
        return self.in_flight_tokens + self.load_others


@dataclass(frozen=True)
class Gone:
    """Work under way with ``engine_id`` will not end well."""

    engine_id: str
    why: Failure


class PeerTable:
    """All peers of one pod. Not thread-safe: it belongs to the event loop."""

    def __init__(self, *, needs_pair: bool, lost_after: float, fits: Callable[[Identity, str], str | None]) -> None:
        self._needs_pair = needs_pair
        self._lost_after = lost_after
        self._fits = fits
        self._peers: dict[str, Peer] = {}
        self._picks = 0
        self.generation = 0
        """Grows whenever :meth:`desired` may have changed."""

    # -- looking

    def peers(self) -> list[Peer]:
        """All peers, by address."""
        return [self._peers[address] for address in sorted(self._peers)]

    def get(self, address: str) -> Peer | None:
        """The peer at an address, if known."""
        return self._peers.get(address)

    def state(self, peer: Peer) -> PeerState:
        """The peer's state under this table's mode."""
        return peer.state(needs_pair=self._needs_pair)

    def ready(self, *, now: float, without: Iterable[str] = ()) -> list[Peer]:
        """Peers that can take a leg now, except the addresses in ``without``.

        Those that just failed a leg are left out as long as there are others.
        """
        banned = set(without)
        able = [p for p in self.peers() if self.state(p) is PeerState.READY and p.address not in banned]
        return [peer for peer in able if peer.avoid_until <= now] or able

    def count(self) -> tuple[int, int]:
        """(ready, possible): pairs that work, and peers that discovery lists."""
        listed = [peer for peer in self._peers.values() if not peer.leaving]
        return sum(self.state(peer) is PeerState.READY for peer in listed), len(listed)

    def desired(self) -> list[Peer]:
        """Peers that the connector should be paired with: seen, fitting, and not known to be dead.

        A peer that is merely silent stays: what decode booked with it must not be freed, because it may come back in
        the middle of a write. The connector frees such blocks only when the peer is missing from this list.
        """
        return [
            peer
            for peer in self.peers()
            if peer.identity is not None
            and not peer.error
            and (not peer.lost or peer.silent)
            and (not peer.leaving or peer.in_flight > 0)
        ]

    # -- discovery and polls

    def resolved(self, addresses: Iterable[str], *, now: float) -> None:
        """Discovery's whole current list."""
        listed = set(addresses)
        for address in listed - self._peers.keys():
            self._put(Peer(address, changed=now))
        for address, peer in list(self._peers.items()):
            if peer.leaving != (address not in listed):
                self._put(replace(peer, leaving=address not in listed, changed=now))
        self._sweep()

    def answered(self, address: str, identity: Identity, *, now: float) -> list[Gone]:
        """A poll was answered."""
        peer = self._peers.get(address)
        if peer is None:
            return []
        gone: list[Gone] = []
        before = peer.identity
        replaced = before is not None and before.engine_id != identity.engine_id
        if before is not None and replaced and not peer.lost:
            gone.append(Gone(before.engine_id, Failure.PEER_REPLACED))
        error = self._fits(identity, address)
        fresh = before is None or replaced or peer.lost or error != peer.error
        fresh = fresh or (before is not None and before.draining != identity.draining)
        self._put(
            replace(
                peer,
                identity=identity,
                error=error,
                lost=False,
                silent=False,
                failing_since=None,
                pair=None if replaced else peer.pair,
                in_flight_tokens=0 if replaced else peer.in_flight_tokens,
                in_flight=0 if replaced else peer.in_flight,
                avoid_until=float("-inf") if replaced else peer.avoid_until,
                load_others=max(0, identity.load.tokens - peer.in_flight_tokens),
                changed=now if fresh else peer.changed,
            ),
            touch=fresh,
        )
        return gone

    def failed(self, address: str, how: PollFailure, detail: str, *, now: float) -> list[Gone]:
        """A poll failed; ``detail`` is our own words."""
        peer = self._peers.get(address)
        if peer is None:
            return []
        since = now if peer.failing_since is None else peer.failing_since
        if how is PollFailure.GARBAGE and not peer.lost:
            gone = self._lose(peer, now=now, error=detail, since=since)
        elif peer.identity is None or peer.lost:
            dead = peer.silent and how is PollFailure.REFUSED
            self._put(replace(peer, failing_since=since, silent=peer.silent and not dead), touch=dead)
            gone = []
        elif how is PollFailure.REFUSED or now - since >= self._lost_after:
            gone = self._lose(peer, now=now, error=None, since=since, silent=how is PollFailure.TIMEOUT)
        else:
            self._put(replace(peer, failing_since=since))
            gone = []
        self._sweep()
        return gone

    def _lose(self, peer: Peer, *, now: float, error: str | None, since: float, silent: bool = False) -> list[Gone]:
        self._put(
            replace(
                peer,
                lost=peer.identity is not None,
                silent=silent,
                error=error,
                pair=None,
                failing_since=since,
                load_others=0,
                changed=now,
            ),
            touch=True,
        )
        return [Gone(peer.identity.engine_id, Failure.PEER_LOST)] if peer.identity is not None else []

    def refit(self, *, now: float) -> None:
        """Judges every known identity again (this pod learnt more about itself)."""
        for peer in self.peers():
            if peer.identity is None:
                continue
            error = self._fits(peer.identity, peer.address)
            if error != peer.error:
                self._put(replace(peer, error=error, changed=now), touch=True)

    # -- the connector's word

    def paired(self, pairs: Mapping[str, Pair], *, now: float) -> list[Gone]:
        """The connector's whole view, by engine id (all workers of this pod agree on "ready").

        A pair that was ready and failed loses its work: the connector no longer reaches that engine.
        """
        gone: list[Gone] = []
        for peer in self.peers():
            if peer.identity is None:
                continue
            pair = pairs.get(peer.identity.rank_engine_id(0)) or pairs.get(peer.identity.engine_id)
            if pair == peer.pair:
                continue
            was_ready = peer.pair is not None and peer.pair.state == "ready"
            if was_ready and pair is not None and pair.state == "failed":
                gone.append(Gone(peer.identity.engine_id, Failure.QUARANTINED))
            self._put(replace(peer, pair=pair, changed=now))
        return gone

    # -- legs of this pod

    def began(self, address: str, tokens: int) -> None:
        """A leg was sent to a peer."""
        if (peer := self._peers.get(address)) is not None:
            self._picks += 1
            self._put(
                replace(
                    peer,
                    in_flight=peer.in_flight + 1,
                    in_flight_tokens=peer.in_flight_tokens + tokens,
                    picked=self._picks,
                )
            )

    def computed(self, address: str, engine_id: str, tokens: int) -> None:
        """The prefill leg ended, one way or another: nobody queues behind it any more."""
        if (peer := self._of(address, engine_id)) is not None:
            self._put(replace(peer, in_flight_tokens=max(0, peer.in_flight_tokens - tokens)))

    def ended(self, address: str, engine_id: str) -> None:
        """Nothing of the request depends on the peer any more."""
        if (peer := self._of(address, engine_id)) is not None:
            self._put(replace(peer, in_flight=max(0, peer.in_flight - 1)))
            self._sweep()

    def avoid(self, address: str, *, until: float) -> None:
        """A leg to this peer failed: others first, until then."""
        if (peer := self._peers.get(address)) is not None:
            self._put(replace(peer, avoid_until=until))

    # -- inside

    def _of(self, address: str, engine_id: str) -> Peer | None:
        """The peer, unless its engine was replaced: the load of the old one is already forgotten."""
        peer = self._peers.get(address)
        same = peer is not None and peer.identity is not None and peer.identity.engine_id == engine_id
        return peer if same else None

    def _put(self, peer: Peer, *, touch: bool = False) -> None:
        before = self._peers.get(peer.address)
        self._peers[peer.address] = peer
        if touch or before is None or before.leaving != peer.leaving:
            self.generation += 1

    def _sweep(self) -> None:
        for address, peer in list(self._peers.items()):
            if peer.leaving and (peer.in_flight == 0 or peer.lost or peer.identity is None):
                del self._peers[address]
                self.generation += 1
