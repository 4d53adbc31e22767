"""The prefill side of the protocol: matches requests with registrations and pushes blocks as they settle.

Runs on the transfer thread, free of vLLM and NIXL (see ``ports``). A transfer (``push.Push``) may begin with either
half: the request (``announce``, ``admit``) or decode's registration (``on_register``).

What the scheduler waits for (``release``) is reported only when no WRITE that reads the request's blocks is open: a
reaper that looks at deadlines alone would free blocks under an in-flight WRITE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prebook_connector import looks
from prebook_connector.ledger import Ledger
from prebook_connector.peers import Peer, PeerTable
from prebook_connector.ports import Groups, Link, LinkError, PeerSpec, Recorder
from prebook_connector.protocol import CancelAck, Commit, Fail, Register, encode
from prebook_connector.push import Push, PushSettings
from prebook_connector.timeline import Timeline
from prebook_connector.turns import Room, in_turn
from prebook_connector.writer import Writer

TOMBSTONE_LEASES = 10.0
"""How long, in leases, the end of a transfer is remembered, so that a late registration is answered at once."""


class PushSide:
    """All transfers that this prefill rank sends."""

    def __init__(
        self,
        *,
        link: Link,
        peers: PeerTable,
        settings: PushSettings,
        recorder: Recorder,
        timeline: Timeline,
        release: Callable[[str], None],
        checksum: Callable[[Sequence[int]], int] | None = None,
    ) -> None:
        self._link = link
        self._peers = peers
        self._settings = settings
        self._recorder = recorder
        self._timeline = timeline
        self._release = release
        self._writer = Writer(
            link=link, peers=peers, settings=settings, recorder=recorder, timeline=timeline, checksum=checksum
        )
        self._pushes: dict[str, Push] = {}
        self._by_request: dict[str, Push] = {}
        self._tombstones: dict[str, tuple[float, str]] = {}
        self.draining = False
        self._now = 0.0
        self.regions_of_use = 0
        """Reports of fewer regions of last chunks under way change nothing. The engine's thread reads and resets it."""

    # -- what the scheduler says ---------------------------------------------------------------------------------

    def announce(self, request_id: str, transfer_id: str, now: float) -> None:
        """A request for this transfer is queued on this engine."""
        push = self._pushes.setdefault(transfer_id, Push(transfer_id, now))
        push.request_id = request_id
        self._by_request[request_id] = push
        self._timeline.record("queued", transfer_id, request_id=request_id)

    def admit(self, request_id: str, *, prompt_tokens: int, digest: bytes, now: float) -> None:
        """The request starts (or starts over, after a preemption) to prefill."""
        push = self._by_request.get(request_id)
        if push is None:
            return
        if push.ledger is None:
            push.prompt_tokens, push.digest, push.admitted_at = prompt_tokens, digest, now
            push.ledger = self._new_ledger(prompt_tokens)
            self._timeline.record("prefill_started", push.transfer_id, tokens=prompt_tokens)
            self._match(push, now)

    def _new_ledger(self, prompt_tokens: int) -> Ledger:
        settings = self._settings
        return Ledger(
            prompt_tokens,
            settings.block_size,
            min_blocks=max(1, settings.min_bytes // max(1, settings.block_bytes)),
        )

    def grow(self, request_id: str, blocks: Sequence[int]) -> None:
        """The scheduler gave the request more KV blocks (the next ones of the prompt)."""
        if (push := self._by_request.get(request_id)) is not None:
            push.blocks.extend(blocks)

    def settle(self, request_id: str, tokens: int, now: float) -> None:
        """The KV of the first ``tokens`` tokens is final on the device."""
        push = self._by_request.get(request_id)
        if push is None or push.ledger is None:
            return
        if not push.completed_at:
            if tokens > push.ledger.settled_tokens or push.whole:
                push.settled_at = now
                self._timeline.record("chunk_settled", push.transfer_id, tokens=min(tokens, push.prompt_tokens))
            if tokens >= push.prompt_tokens:
                push.completed_at = now
                self._timeline.record("prefill_finished", push.transfer_id)
        if not push.whole:
            push.ledger.settle(tokens)

    def settle_layers(self, request_id: str, regions: int, now: float) -> None:
        """The KV of the prompt's last chunk, which is being computed, is final in its first ``regions`` regions."""
        push = self._by_request.get(request_id)
        if push is not None and push.ledger is not None and not push.whole and not push.completed_at:
            push.settled_regions = regions
            push.region_seconds = (now - max(push.settled_at, push.admitted_at)) / regions

    def preempt(self, request_id: str) -> None:
        """The request lost its blocks; it will be admitted again."""
        push = self._by_request.get(request_id)
        if push is None or push.ledger is None:
            return
        push.ledger.preempt()
        if push.rest is not None:
            self._writer.close_rest(push, push.rest)
        push.rest, push.settled_regions, push.next_part, push.passed_over_at = None, 0, 0, 0.0
        push.blocks.clear()
        push.completed_at = 0.0
        push.bytes_done = push.bytes_early = push.writes_done = 0
        push.checksums.clear()
        self._recorder.count("preemptions")
        self._timeline.record("preempted", push.transfer_id, epoch=push.ledger.epoch)

    def finish(self, request_id: str, groups: Groups, now: float) -> None:
        """Prefill is over; the scheduler keeps ``groups`` until the release."""
        push = self._by_request.get(request_id)
        if push is None:
            self._release(request_id)
            return
        push.held = True
        if push.ledger is None:  # never admitted here (nothing was computed): nothing can be sent
            self._fail(push, "not_computed", now)
            return
        self.settle(request_id, push.prompt_tokens, now)
        push.final_groups = groups
        if push.whole:
            push.ledger.settle(1)
        push.since = now  # from now on a registration must come within a lease

    def abort(self, request_id: str, *, held: bool, now: float) -> None:
        """The request was aborted; ``held``: the scheduler waits for the release of its blocks."""
        push = self._by_request.get(request_id)
        if push is None:
            if held:
                self._release(request_id)
            return
        push.held = push.held or held
        self._fail(push, "prefill_aborted", now)

    # -- what decode says ----------------------------------------------------------------------------------------

    def on_register(self, agent: str, message: Register, now: float) -> None:
        """Decode booked blocks for a transfer."""
        if self._answer_finished(agent, message):
            return
        push = self._pushes.get(message.transfer_id)
        if push is None:
            push = self._pushes[message.transfer_id] = Push(message.transfer_id, now)
        if push.engine_id not in (None, message.decode_engine_id):
            self._recorder.count("late_registrations", ("duplicate",))
            refusal = Fail(message.transfer_id, 0, self._settings.rank, "duplicate_transfer_id", quiesced=True)
            self._peers.send(agent, encode(refusal))
            return
        push.registrations[agent] = message
        push.registered_at = push.registered_at or now
        self._timeline.record("reg_received", message.transfer_id, first_block=message.first_block)
        if message.decode_engine_id not in self._peers.peers:
            self._peers.ensure(
                PeerSpec(message.decode_engine_id, message.host, message.port, tp_size=message.tp_size), now
            )
        if push.failure:
            self._tell_failure(push)
        else:
            self._match(push, now)

    def _answer_finished(self, agent: str, message: Register) -> bool:
        tombstone = self._tombstones.get(message.transfer_id)
        reason = "draining" if self.draining and message.transfer_id not in self._pushes else tombstone and tombstone[1]
        if not reason:
            return False
        self._recorder.count("late_registrations", (reason,))
        self._peers.send(agent, encode(Fail(message.transfer_id, 0, self._settings.rank, reason, quiesced=True)))
        return True

    def _match(self, push: Push, now: float) -> None:
        """Both halves are there: check that they agree, then open the ledger for posting."""
        if push.ledger is None or push.ledger.first_block is not None or not push.registrations:
            return
        message = next(iter(push.registrations.values()))
        peer = self._peers.peers.get(message.decode_engine_id)
        if peer is None or not peer.attached:
            return  # tried again when the handshake is done
        if not self._link.targets(message.decode_engine_id) <= push.registrations.keys():
            return  # other decode ranks have not booked yet
        if (message.prompt_tokens, message.prompt_digest) != (push.prompt_tokens, push.digest):
            self._fail(push, "prompt_mismatch", now)
            return
        same_blocks = len(message.block_ids) == 1 and message.block_size == self._settings.block_size
        if same_blocks:
            wanted = push.ledger.prompt_blocks - message.first_block
            if message.first_block < 0 or not 0 < wanted == len(message.block_ids[0]):
                self._fail(push, "bad_registration", now)
                return
            push.ledger.register(message.first_block)
            if not self._settings.progressive:
                push.ledger.min_blocks = push.ledger.prompt_blocks + 1
            return
        # Layouts whose blocks cannot be matched one to one are sent whole, at the end of prefill.
        push.whole, push.settled_regions = True, 0
        push.ledger = Ledger(prompt_tokens=1, block_size=1, epoch=push.ledger.epoch)
        push.ledger.register(0)
        if push.final_groups is not None:
            push.ledger.settle(1)

    def on_cancel(self, agent: str, transfer_id: str, now: float) -> None:
        """Decode does not want the KV any more: stop, drain, acknowledge."""
        push = self._pushes.get(transfer_id)
        if push is None:
            self._bury(transfer_id, "cancelled", now)
            self._peers.send(agent, encode(CancelAck(transfer_id, self._settings.rank)))
            return
        self._fail(push, "cancelled", now)

    def on_held(self, peer: Peer, at: float, transfer_ids: Sequence[str], now: float) -> None:
        """Decode's heartbeat lists what it still holds; what it registered earlier and no longer lists is over."""
        listed = set(transfer_ids)
        for push in list(self._pushes.values()):
            if push.engine_id != peer.spec.engine_id or push.transfer_id in listed or push.failure:
                continue
            if all(registration.at < at for registration in push.registrations.values()):
                self._fail(push, "dropped_by_decode", now)

    def on_dead(self, peer: Peer, now: float) -> None:
        """The decode engine is gone: nothing can be delivered, and nobody waits for an answer."""
        for push in list(self._pushes.values()):
            if push.engine_id == peer.spec.engine_id:
                push.severed = push.announced_failure = True
                self._fail(push, "decode_dead", now)

    def reading(self, request_id: str) -> str | None:
        """The decode engine that a WRITE of this request's blocks is still under way to."""
        push = self._by_request.get(request_id)
        return push.engine_id if push is not None and push.writes else None

    def sever(self, engine_id: str, now: float) -> None:
        """Gives up on every transfer with this engine and aborts its WRITEs, whose sources are about to change."""
        for push in list(self._pushes.values()):
            if push.engine_id == engine_id:
                push.severed = True
                self._fail(push, "severed", now)
                self._writer.poll(push, now)
                self._close(push, now)

    # -- time ----------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any transfer is open."""
        return bool(self._pushes)

    @property
    def expecting(self) -> bool:
        """Whether a request waits for a registration."""
        return any(push.expecting for push in self._pushes.values())

    @property
    def urgent(self) -> bool:
        """Whether the end of a WRITE that somebody waits for may come any moment."""
        return looks.urgent(self._pushes.values(), self._now)

    @property
    def stride(self) -> float:
        """Seconds until the next look that keeps the link busy and misses no end; infinite without open WRITEs."""
        return looks.until_next(self._pushes.values(), self._now, stride=self._writer.stride)

    @property
    def open(self) -> int:
        """Transfers that have not ended."""
        return len(self._pushes)

    def undisturbed(self, now: float) -> bool:
        """Whether no end is due, no registration waited for and every open WRITE still under way; moves those on."""
        self._now = now
        if self.urgent or self.expecting:
            return False
        return all(self._writer.undisturbed(push) for push in self._pushes.values())

    def held_with(self) -> dict[str, list[str]]:
        """Engine id to the transfers that are open with it, for heartbeats."""
        held: dict[str, list[str]] = {}
        for push in self._pushes.values():
            if (engine_id := push.engine_id) is not None:
                held.setdefault(engine_id, []).append(push.transfer_id)
        return held

    def step(self, now: float) -> None:
        """Polls WRITEs, posts what may be posted, commits, expires."""
        self._now = now
        for push in list(self._pushes.values()):
            if self._writer.poll(push, now):
                self._fail(push, "write_failed", now)
        room = Room(self._pushes.values(), most=self._settings.max_in_flight)
        for push in in_turn(self._pushes.values(), now):
            try:
                self._step(push, room, now)
            except LinkError as error:
                self._recorder.count("post_failures")
                self._timeline.record("post_failed", push.transfer_id, error=str(error))
                self._fail(push, "post_failed", now)
        last_chunks = [push for push in self._pushes.values() if push.settled_regions and not push.completed_at]
        self.regions_of_use = min((push.next_part for push in last_chunks), default=0)
        if self._tombstones:
            horizon = now - TOMBSTONE_LEASES * self._settings.lease_seconds
            while self._tombstones and next(iter(self._tombstones.values()))[0] < horizon:
                del self._tombstones[next(iter(self._tombstones))]

    def _step(self, push: Push, room: Room, now: float) -> None:
        if not push.failure:
            self._match(push, now)
            ledger = push.ledger
            if ledger is not None and ledger.first_block is not None:
                self._writer.post(push, ledger, room, now)
            if ledger is not None and ledger.all_done:
                self._commit(push, ledger, now)
                return
            self._expire(push, now)
        self._close(push, now)

    def _commit(self, push: Push, ledger: Ledger, now: float) -> None:
        engine_id = push.engine_id
        assert engine_id is not None
        registration = next(iter(push.registrations.values()))
        peer = self._peers.peers[engine_id]
        lead = push.completed_at - push.registered_at
        overlap = push.bytes_early / push.bytes_done if push.bytes_done else 0.0
        blocks = sum(map(len, registration.block_ids))
        message = Commit(
            push.transfer_id,
            ledger.epoch,
            self._settings.rank,
            self._link.writers(registration.tp_size),
            blocks,
            push.bytes_done,
            push.writes_done,
            lead,
            now - push.settled_at,
            overlap,
            push.completed_at - push.admitted_at,
            push.checksums,
            peer.clock.peer_at,
        )
        payload = encode(message)
        for agent in self._link.targets(engine_id):
            self._peers.send(agent, payload)
        self._recorder.observe("registration_lead_seconds", lead)
        self._recorder.observe("overlap_ratio", overlap)
        self._recorder.count("pushed_bytes", by=push.bytes_done)
        self._recorder.count("pushed_blocks", by=blocks)
        self._timeline.record("commit_sent", push.transfer_id, bytes=push.bytes_done, writes=push.writes_done)
        self._end(push, "committed", now)

    def _expire(self, push: Push, now: float) -> None:
        """Nothing waits for ever: half a transfer expires after a lease without its other half."""
        lease = self._settings.lease_seconds
        if push.registrations:
            peer = self._peers.peers.get(push.engine_id or "")
            silent = peer.clock.silent_for(now) if peer is not None and peer.ready else now - push.registered_at
            if silent > lease:
                self._fail(push, "lease_expired", now)
            elif push.request_id is None and now - push.registered_at > lease:
                self._fail(push, "unknown_transfer", now)
        elif push.held and now - push.since > lease:
            self._fail(push, "never_registered", now)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _fail(self, push: Push, reason: str, now: float) -> None:
        if not push.failure:
            push.failure = reason
            if push.rest is not None:
                self._writer.close_rest(push, push.rest)
            self._timeline.record("failed", push.transfer_id, reason=reason)
        self._close(push, now)

    def _close(self, push: Push, now: float) -> None:
        """Ends a transfer that has failed, once nothing of it is open."""
        if push.failure and (push.ledger is None or push.ledger.quiesced):
            self._tell_failure(push)
            self._end(push, push.failure, now)

    def _tell_failure(self, push: Push) -> None:
        """Every decode rank learns the quiesced end; an acknowledgement when it asked for it."""
        if push.announced_failure or (push.ledger is not None and not push.ledger.quiesced):
            return
        rank = self._settings.rank
        epoch = push.ledger.epoch if push.ledger is not None else 0
        for agent in push.registrations:
            if push.failure == "cancelled":
                self._peers.send(agent, encode(CancelAck(push.transfer_id, rank)))
            else:
                self._peers.send(agent, encode(Fail(push.transfer_id, epoch, rank, push.failure, quiesced=True)))

    def _end(self, push: Push, outcome: str, now: float) -> None:
        if self._pushes.pop(push.transfer_id, None) is None:
            return
        self._bury(push.transfer_id, outcome, now)
        self._recorder.count("transfers", (outcome,))
        if push.request_id is not None:
            self._by_request.pop(push.request_id, None)
            if push.held:
                self._release(push.request_id)

    def _bury(self, transfer_id: str, outcome: str, now: float) -> None:
        self._tombstones.pop(transfer_id, None)  # keeps insertion order equal to time order
        self._tombstones[transfer_id] = (now, outcome)

    def writes_to(self, engine_id: str) -> bool:
        """Whether a WRITE to this engine is open."""
        return any(push.writes for push in self._pushes.values() if push.engine_id == engine_id)
