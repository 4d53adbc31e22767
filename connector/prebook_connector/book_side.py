"""The decode side of the protocol: registers booked blocks, waits for the commit, and never frees a block too early.

Runs on the transfer thread, free of vLLM and NIXL (see ``ports``). Every booking ends in exactly one
:class:`Outcome` for the engine; what may end it is decided by :class:`prebook_connector.booking.Booking`.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prebook_connector.booking import Booking, State
from prebook_connector.peers import Peer, PeerTable
from prebook_connector.ports import SOONEST, PeerSpec, Recorder
from prebook_connector.protocol import Cancel, Commit, Fail, Progress, Register, encode
from prebook_connector.timeline import Timeline

logger = logging.getLogger(__name__)

ACCOUNTS_KEPT = 1024


@dataclass(frozen=True)
class BookingRequest:
    """What the scheduler booked for one request. ``blocks``: logical block ids, one list a KV cache group."""

    request_id: str
    transfer_id: str
    prefill: PeerSpec
    blocks: list[list[int]]
    first_block: int
    prompt_tokens: int
    prompt_digest: bytes


@dataclass(frozen=True)
class Outcome:
    """The end of one booking for the engine.

    ``failed``: nothing usable arrived. ``invalid_blocks``: the KV before the first of them arrived and is kept.
    Neither: the KV is complete, or the request does not exist any more.
    """

    request_id: str
    failed: bool = False
    invalid_blocks: tuple[int, ...] = ()


@dataclass
class Account:
    """What became of a transfer, for the status and for people."""

    transfer_id: str
    prefill_engine_id: str
    tokens: int
    blocks: int
    state: str = "booked"
    reason: str = ""
    bytes: int = 0
    writes: int = 0
    lead_s: float | None = None
    exposed_s: float | None = None
    overlap: float | None = None
    prefill_s: float | None = None
    verified: bool | None = None
    booked_at: float = field(default_factory=time.time)  # wall clock, for people and traces only
    ended_at: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass
class _Open:
    request: BookingRequest
    booking: Booking
    account: Account
    since: float
    wanted: bool = True  # the engine still has the request
    commits: dict[str, Commit] = field(default_factory=dict)
    cancel_sent: float = 0.0
    dead_at: float | None = None
    landed_at: float = 0.0  # when the last WRITE did
    due_at: float = 0.0  # no commit is expected before


class BookSide:
    """All bookings of one decode rank. ``finish`` gets each outcome exactly once."""

    def __init__(
        self,
        *,
        peers: PeerTable,
        engine_id: str,
        place: tuple[str, int],
        rank: int,
        tp_size: int,
        block_size: int,
        lease_seconds: float,
        flight_seconds: float,
        recorder: Recorder,
        timeline: Timeline,
        finish: Callable[[Outcome], None],
        checksum: Callable[[Sequence[int]], int] | None = None,
    ) -> None:
        self._peers = peers
        self._engine_id = engine_id
        self._place = place
        self._rank = rank
        self._tp_size = tp_size
        self._block_size = block_size
        self._lease = lease_seconds
        self._flight = flight_seconds
        self._recorder = recorder
        self._timeline = timeline
        self._finish = finish
        self._checksum = checksum
        self._open: dict[str, _Open] = {}
        self._by_request: dict[str, str] = {}
        self.accounts: OrderedDict[str, Account] = OrderedDict()
        self.draining = False
        self._now = 0.0

    # -- what the engine says ------------------------------------------------------------------------------------

    def book(self, request: BookingRequest, now: float) -> None:
        """Blocks are allocated: register them with prefill."""
        if request.transfer_id in self._open:
            # Two requests with one id: only the first may be written to; the second computes for itself.
            self._recorder.count("duplicate_transfer_ids")
            self._finish(Outcome(request.request_id, failed=True))
            return
        spec = request.prefill
        account = Account(request.transfer_id, spec.engine_id, request.prompt_tokens, sum(map(len, request.blocks)))
        self.accounts[request.transfer_id] = account
        while len(self.accounts) > ACCOUNTS_KEPT:
            self.accounts.popitem(last=False)
        booking = Booking(
            request.transfer_id,
            request.first_block,
            sum(map(len, request.blocks)),
            expected_ranks=max(1, spec.tp_size // self._tp_size) * spec.pp_size,
        )
        entry = _Open(request, booking, account, now)
        self._open[request.transfer_id] = entry
        self._by_request[request.request_id] = request.transfer_id
        self._timeline.record("booked", request.transfer_id, blocks=booking.blocks, tokens=request.prompt_tokens)
        peer = self._peers.ensure(spec, now)
        if self.draining or peer.draining:
            booking.give_up("draining")
        elif peer.attached:
            self._register(entry, peer, now)
        self._settle(entry, now)

    def _register(self, entry: _Open, peer: Peer, now: float) -> None:
        request = entry.request
        payload = encode(
            Register(
                request.transfer_id,
                self._engine_id,
                request.request_id,
                self._rank,
                self._tp_size,
                request.blocks,
                request.first_block,
                request.prompt_tokens,
                request.prompt_digest,
                self._block_size,
                now,
                peer.clock.peer_at,
                *self._place,
            )
        )
        for agent in peer.agents:
            # Counted as knowing the destination even when sending fails: the transport may have sent it all the same.
            entry.booking.registered.add(agent)
            self._peers.send(agent, payload)
        self._timeline.record("reg_sent", request.transfer_id)

    def cancel(self, request_id: str, now: float) -> None:
        """The engine does not have the request any more; its blocks stay pinned until the outcome."""
        entry = self._entry_of(request_id)
        if entry is None:
            return
        entry.wanted = False
        entry.booking.cancel("aborted")
        self._send_cancel(entry, now)
        self._settle(entry, now)

    def abandon(self, transfer_id: str, spec: PeerSpec, now: float) -> None:
        """The engine needs nothing of a transfer that it never booked (cached already, or aborted while queued)."""
        peer = self._peers.ensure(spec, now)
        self._peers.send_all(peer, encode(Cancel(transfer_id)))

    def fail(self, transfer_id: str, reason: str, now: float) -> None:
        """The dispatcher knows that the prefill leg failed."""
        entry = self._open.get(transfer_id)
        if entry is None:
            return
        entry.booking.give_up(reason)
        self._send_cancel(entry, now)
        self._settle(entry, now)

    def _send_cancel(self, entry: _Open, now: float) -> None:
        peer = self._peers.peers.get(entry.request.prefill.engine_id)
        if peer is None or entry.booking.settled:
            return
        entry.cancel_sent = now
        payload = encode(Cancel(entry.request.transfer_id))
        for agent in entry.booking.registered - entry.booking.quiet:
            self._peers.send(agent, payload)

    # -- what prefill says ---------------------------------------------------------------------------------------

    def on_progress(self, agent: str, message: Progress, now: float) -> None:
        """A WRITE has landed."""
        if (entry := self._open.get(message.transfer_id)) is not None:
            entry.booking.progress(agent, epoch=message.epoch, start=message.start, stop=message.stop)
            if entry.landed_at and entry.booking.near_end:
                entry.due_at = now + SOONEST * (now - entry.landed_at) * entry.booking.missing_share
            entry.landed_at = now
            self._timeline.record("write_landed", message.transfer_id, start=message.start, stop=message.stop)

    def on_commit(self, agent: str, message: Commit, now: float) -> None:
        """One prefill rank has written everything."""
        entry = self._open.get(message.transfer_id)
        if entry is None:
            self._recorder.count("late_commits")
            return
        entry.commits[agent] = message
        entry.booking.commit(agent, epoch=message.epoch, ranks=message.ranks)
        self._settle(entry, now)

    def on_fail(self, agent: str, message: Fail, now: float) -> None:
        """One prefill rank gives up."""
        if (entry := self._open.get(message.transfer_id)) is not None:
            entry.booking.fail(agent, epoch=message.epoch, reason=message.reason, quiesced=message.quiesced)
            if not entry.booking.settled:
                self._send_cancel(entry, now)
            self._settle(entry, now)

    def on_ack(self, agent: str, transfer_id: str, now: float) -> None:
        """One prefill rank promises silence."""
        if (entry := self._open.get(transfer_id)) is not None:
            entry.booking.acknowledged(agent)
            self._settle(entry, now)

    def on_bye(self, peer: Peer) -> None:
        """Prefill drains: what is open goes on, nothing new is started (the dispatcher picks others)."""
        peer.draining = True

    def on_dead(self, peer: Peer, now: float) -> None:
        """The prefill engine does not exist any more: its blocks are safe once nothing can be under way."""
        for entry in self._with(peer):
            entry.dead_at = entry.dead_at or now
            entry.booking.give_up("prefill_dead")

    def uses(self, peer: Peer) -> bool:
        """Whether a booking still depends on ``peer``."""
        return bool(self._with(peer))

    # -- time ----------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any booking is open."""
        return bool(self._open)

    @property
    def urgent(self) -> bool:
        """Whether a commit or an acknowledgement may come any moment, with a request waiting for it.

        Looking more often than that takes time from the steps of other requests, and from prefill's where both engines
        share a machine.
        """
        return any(
            entry.booking.near_end and (self._now >= entry.due_at or entry.booking.state is not State.BOOKED)
            for entry in self._open.values()
        )

    def undisturbed(self, now: float) -> bool:
        """Whether it is still too early for a commit or an acknowledgement."""
        self._now = now
        return not self.urgent

    def held_with(self) -> dict[str, list[str]]:
        """Engine id to the transfers that are open with it, for heartbeats."""
        held: dict[str, list[str]] = {}
        for entry in self._open.values():
            held.setdefault(entry.request.prefill.engine_id, []).append(entry.request.transfer_id)
        return held

    def step(self, now: float) -> None:
        """Sends what waited for a handshake, repeats cancels, ends what a dead peer left behind."""
        self._now = now
        for entry in list(self._open.values()):
            peer = self._peers.peers.get(entry.request.prefill.engine_id)
            booking = entry.booking
            if peer is None and booking.registered and entry.dead_at is None:
                entry.dead_at = now  # booked with an engine at the very moment at which it was given up
                booking.give_up("prefill_dead")
            if entry.dead_at is not None:
                if now - entry.dead_at >= self._flight:
                    for agent in list(booking.registered):
                        booking.acknowledged(agent)
            elif not booking.registered and booking.state is State.BOOKED:
                if peer is not None and peer.attached:
                    self._register(entry, peer, now)
                elif now - entry.since > self._lease:
                    booking.give_up(f"no_handshake: {peer.error or 'timed out'}" if peer else "no_handshake")
            elif (
                not booking.settled and booking.state is not State.BOOKED and now - entry.cancel_sent > self._lease / 3
            ):
                self._send_cancel(entry, now)
            self._settle(entry, now)

    def entry(self, transfer_id: str) -> object | None:
        """The open booking of a transfer, for diagnostics."""
        return self._open.get(transfer_id)

    def quarantined(self, now: float) -> int:
        """Blocks that are neither wanted nor known to be safe because prefill is silent."""
        return sum(
            entry.booking.blocks
            for entry in list(self._open.values())  # the engine's thread asks, too
            if entry.booking.state in (State.FAILING, State.CANCELLING) and now - entry.since > self._flight
        )

    @property
    def booked_blocks(self) -> int:
        """Blocks of open bookings."""
        return sum(entry.booking.blocks for entry in list(self._open.values()))

    @property
    def booked(self) -> int:
        """Open bookings."""
        return len(self._open)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _settle(self, entry: _Open, now: float) -> None:
        booking = entry.booking
        if not booking.settled or self._open.get(booking.transfer_id) is not entry:
            return
        del self._open[booking.transfer_id]
        self._by_request.pop(entry.request.request_id, None)
        committed = booking.state is State.COMMITTED
        if committed and entry.wanted:
            committed = self._verify(entry)
        self._close_account(entry, committed, now)
        outcome = Outcome(entry.request.request_id)
        if entry.wanted and not committed:
            outcome = self._failed(entry)
        self._recorder.count("transfers", ("committed" if committed else booking.reason.split(":")[0] or "failed",))
        self._finish(outcome)

    def _failed(self, entry: _Open) -> Outcome:
        """Keeps the prefix that arrived, where block ids are unique (one KV cache group) and the KV can be trusted."""
        request, arrived = entry.request, entry.booking.arrived_blocks()
        if arrived <= 0 or len(request.blocks) != 1 or entry.account.verified is False:
            return Outcome(request.request_id, failed=True)
        lost = request.blocks[0][arrived:]
        if not lost:  # the last block is computed again: the engine needs one token to continue from
            lost = request.blocks[0][-1:]
        if len(lost) == len(request.blocks[0]):
            return Outcome(request.request_id, failed=True)
        self._recorder.count("kept_blocks", by=len(request.blocks[0]) - len(lost))
        return Outcome(request.request_id, invalid_blocks=tuple(lost))

    def _verify(self, entry: _Open) -> bool:
        """Compares checksums where both sides have the same slices; a mismatch fails the transfer."""
        request = entry.request
        commits = list(entry.commits.values())
        if self._checksum is None or len(commits) != 1 or not commits[0].checksums:
            return True
        first = request.first_block
        entry.account.verified = all(
            self._checksum(request.blocks[0][start - first : stop - first]) == value
            for start, stop, value in commits[0].checksums
        )
        if not entry.account.verified:
            entry.booking.reason = "checksum_mismatch"
            self._recorder.count("checksum_mismatches")
        return entry.account.verified

    def _close_account(self, entry: _Open, committed: bool, now: float) -> None:
        account, booking = entry.account, entry.booking
        account.state = "committed" if committed else ("released" if not entry.wanted else "failed")
        account.reason = booking.reason
        account.ended_at = time.time()
        for message in entry.commits.values():
            account.bytes += message.bytes
            account.writes += message.writes
            account.lead_s = message.lead_s
            account.overlap = message.overlap
            account.prefill_s = message.prefill_s
            # On P's clock, so without the commit's own way through the network.
            account.exposed_s = message.tail_s
        logger.debug("transfer %s", account.as_json())
        self._timeline.record("committed" if committed else "ended", booking.transfer_id, reason=booking.reason)
        if committed and account.exposed_s is not None:
            self._recorder.observe("exposed_transfer_seconds", account.exposed_s)
            self._recorder.observe("booking_seconds", now - entry.since)

    def _entry_of(self, request_id: str) -> _Open | None:
        transfer_id = self._by_request.get(request_id)
        return self._open.get(transfer_id) if transfer_id is not None else None

    def _with(self, peer: Peer) -> list[_Open]:
        return [entry for entry in self._open.values() if entry.request.prefill.engine_id == peer.spec.engine_id]
