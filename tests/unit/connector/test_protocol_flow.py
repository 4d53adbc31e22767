"""The protocol's core over a fake network: one concept a test."""

from __future__ import annotations

import pytest

from prebook_connector.protocol import Cancel, Register, encode
from tests.unit.connector.fake_net import LEASE
from tests.unit.connector.scenario import Transfer, World


def run_prefill(world: World, transfer: Transfer, *, chunk: int = 8) -> None:
    world.queue(transfer)
    while not transfer.finished:
        world.chunk(transfer, chunk)
        world.net.advance(0.3)


def complete(transfer: Transfer) -> bool:
    return transfer.outcome is not None and not transfer.outcome.failed and not transfer.outcome.invalid_blocks


def lost(transfer: Transfer) -> bool:
    return transfer.outcome is not None and transfer.outcome.failed


def quiet(world: World) -> bool:
    assert world.decode.book is not None
    assert world.prefill.push is not None
    return world.decode.book.booked == 0 and world.prefill.push.open == 0


def test_pairs_are_ready_before_any_request(world: World) -> None:
    assert world.decode.peers.peers["P"].ready
    assert world.prefill.peers.peers["D"].ready


def test_blocks_leave_while_prefill_runs(world: World) -> None:
    transfer = world.new("t", 30)
    world.book(transfer)
    world.queue(transfer)
    world.chunk(transfer, 16)
    world.net.advance(1.0)
    assert not transfer.finished
    assert [world.decode.memory.get(block) for block in transfer.d_blocks[:4]] == [transfer.value(i) for i in range(4)]
    run_prefill(world, transfer)
    world.net.advance(1.0)
    assert complete(transfer)
    assert quiet(world)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 9, 31, 32, 33])
def test_every_length_arrives_whole(world: World, tokens: int) -> None:
    transfer = world.new("t", tokens)
    world.book(transfer)
    run_prefill(world, transfer)
    world.net.advance(2.0)
    assert complete(transfer)
    assert world.prefill.released == ["p-t"]


def test_late_registration_gets_everything_at_once(world: World) -> None:
    transfer = world.new("t", 33)
    run_prefill(world, transfer)
    world.book(transfer)
    world.net.advance(2.0)
    assert complete(transfer)
    assert world.prefill.released == ["p-t"]


def test_a_prefix_hit_on_decode_registers_only_the_tail(world: World) -> None:
    transfer = world.new("t", 33, first_block=3)
    world.book(transfer)
    run_prefill(world, transfer)
    world.net.advance(2.0)
    assert complete(transfer)
    assert len(transfer.d_blocks) == 6


def test_preemption_starts_over_and_ends_right(world: World) -> None:
    transfer = world.new("t", 40)
    world.book(transfer)
    world.queue(transfer)
    world.chunk(transfer, 24)
    world.net.advance(0.1)  # WRITEs are in the air
    world.preempt(transfer)
    run_prefill(world, transfer)
    world.net.advance(2.0)
    assert complete(transfer)


def test_prefill_abort_fails_the_booking_after_the_writes_have_landed(world: World) -> None:
    transfer = world.new("t", 40)
    world.book(transfer)
    world.queue(transfer)
    world.chunk(transfer, 24)
    world.net.advance(0.1)
    world.abort_prefill(transfer)
    assert world.prefill.released == []  # a WRITE still reads the blocks
    world.net.advance(2.0)
    assert world.prefill.released == ["p-t"]
    assert transfer.outcome is not None
    # What arrived is kept: decode computes only the rest.
    assert transfer.outcome.invalid_blocks == tuple(transfer.d_blocks[6:])


def test_decode_abort_frees_only_after_the_acknowledgement(world: World) -> None:
    transfer = world.new("t", 40)
    world.book(transfer)
    world.queue(transfer)
    world.chunk(transfer, 24)
    world.net.advance(0.1)
    world.abort_decode(transfer)
    assert transfer.outcome is None
    world.net.advance(2.0)
    assert transfer.outcome is not None
    world.chunk(transfer, 16)
    world.net.advance(1.0)
    assert world.prefill.released == ["p-t"]
    assert quiet(world)


def test_a_killed_prefill_fails_the_booking_and_nothing_lands_later(world: World) -> None:
    transfer = world.new("t", 40)
    world.book(transfer)
    world.queue(transfer)
    world.chunk(transfer, 24)
    world.net.advance(0.1)
    world.kill_prefill()
    world.net.advance(2.0)
    assert transfer.outcome is not None
    world.net.advance(LEASE * 3)
    second = world.new("u", 20)
    world.book(second)
    run_prefill(world, second)
    world.net.advance(2.0)
    assert complete(second)


def test_a_stopped_prefill_keeps_the_blocks_in_quarantine_until_it_answers(world: World) -> None:
    transfer = world.new("t", 40)
    world.book(transfer)
    world.queue(transfer)
    world.chunk(transfer, 24)
    world.net.advance(0.1)
    world.prefill.stopped = True
    world.abort_decode(transfer)
    world.net.advance(LEASE * 4)
    assert transfer.outcome is None
    assert world.decode.book is not None
    assert world.decode.book.quarantined(world.net.now) == len(transfer.d_blocks)
    world.prefill.stopped = False
    world.net.advance(2.0)
    assert transfer.outcome is not None
    assert world.decode.book.quarantined(world.net.now) == 0


def test_a_silent_peer_is_reported_as_failed_and_recovers(world: World) -> None:
    peer = world.decode.peers.peers["P"]
    assert peer.state(world.net.now) == ("ready", None)
    world.prefill.stopped = True
    world.net.advance(LEASE * 1.2)
    state, why = peer.state(world.net.now)
    assert state == "failed"
    assert why is not None
    world.prefill.stopped = False
    world.net.advance(LEASE / 2)
    assert peer.state(world.net.now) == ("ready", None)


@pytest.mark.parametrize("paused", ["both", "prefill", "decode"])
def test_a_pause_longer_than_the_lease_does_not_delay_the_next_request(world: World, paused: str) -> None:
    """The lease has run out on both sides; it must come back with the first message, not with the next heartbeat."""
    nodes = {"both": [world.prefill, world.decode], "prefill": [world.prefill], "decode": [world.decode]}[paused]
    for node in nodes:
        node.stopped = True
    world.net.advance(LEASE * 3)
    for node in nodes:
        node.stopped = False
    transfer = world.new("t", 16)
    world.book(transfer)
    world.queue(transfer)
    world.chunk(transfer, 16)
    world.net.advance(0.5)
    assert complete(transfer)


def test_without_a_lease_nothing_is_posted(world: World) -> None:
    transfer = world.new("t", 40)
    world.book(transfer)
    world.net.advance(0.2)
    world.decode.stopped = True  # decode's heartbeats stop; its memory is still there
    world.net.advance(LEASE * 0.9)
    world.prefill.peers.peers["D"].clock.heard_at = world.net.now  # not silent, but not echoing either
    world.net.advance(LEASE * 0.2)
    world.queue(transfer)
    world.chunk(transfer, 40)
    world.prefill.peers.peers["D"].clock.heard_at = world.net.now
    world.net.advance(0.5)
    assert not world.net.flights
    assert not world.decode.memory


def test_a_dead_decode_releases_prefill(world: World) -> None:
    transfer = world.new("t", 40)
    world.book(transfer)
    world.queue(transfer)
    world.chunk(transfer, 24)
    world.net.advance(0.1)
    world.decode.alive = False
    world.chunk(transfer, 40)
    world.net.advance(LEASE * 2)
    assert world.prefill.released == ["p-t"]


def test_a_registration_without_a_request_expires(world: World) -> None:
    transfer = world.new("t", 40)
    world.book(transfer)
    world.net.advance(LEASE * 1.2)
    assert lost(transfer)
    # The request that comes too late is released, not kept for ever.
    world.queue(transfer)
    world.chunk(transfer, 40)
    world.net.advance(LEASE * 1.2)
    assert world.prefill.released == ["p-t"]


def test_a_request_without_a_registration_expires(world: World) -> None:
    transfer = world.new("t", 16)
    run_prefill(world, transfer)
    world.net.advance(LEASE * 0.8)
    assert world.prefill.released == []
    world.net.advance(LEASE * 0.5)
    assert world.prefill.released == ["p-t"]


def test_a_queued_request_keeps_its_registration_past_the_lease(world: World) -> None:
    transfer = world.new("t", 16)
    world.book(transfer)
    world.queue(transfer)
    world.net.advance(LEASE * 5)
    assert transfer.outcome is None
    run_prefill(world, transfer)
    world.net.advance(1.0)
    assert complete(transfer)


def test_different_prompts_never_exchange_kv(world: World) -> None:
    transfer = world.new("t", 16)
    world.book(transfer)
    transfer.tokens = 20
    run_prefill(world, transfer)
    world.net.advance(1.0)
    assert lost(transfer)
    assert not world.decode.memory


def test_a_refused_post_fails_the_transfer(world: World) -> None:
    world.prefill.link.refuse_posts = True
    transfer = world.new("t", 16)
    world.book(transfer)
    run_prefill(world, transfer)
    world.net.advance(1.0)
    assert lost(transfer)
    assert world.prefill.released == ["p-t"]


def test_a_transfer_id_in_use_is_not_shared(world: World) -> None:
    transfer = world.new("t", 16)
    world.book(transfer)
    first = list(transfer.d_blocks)
    outcomes = []
    world.decode.on_outcome = outcomes.append
    world.book(transfer)
    assert [(o.request_id, o.failed) for o in outcomes] == [("d-t", True)]
    assert first != transfer.d_blocks


def test_garbage_and_strangers_do_no_harm(world: World) -> None:
    for payload in (b"", b"PBK", b"PBK\x01\xff", b"PBK\x09abc", b"HB:x", encode(Cancel("nope"))):
        world.net.send(world.decode, "agent-P", payload)
        world.net.send(world.prefill, "agent-D", payload)
    stranger = Register("s", "X", "r", 0, 1, [[0]], 0, 4, b"", 4, 1.0, 0.0, "nowhere", 1)
    world.net.mail.append((world.net.now, -1, "agent-X", "agent-P", encode(stranger)))
    world.net.advance(1.0)
    totals = world.prefill.recorder.totals()
    assert totals["bad_messages|foreign"] == 2
    assert totals["bad_messages|malformed"] >= 1
    assert totals["bad_messages|version"] == 2
    transfer = world.new("t", 16)
    world.book(transfer)
    run_prefill(world, transfer)
    world.net.advance(1.0)
    assert complete(transfer)


def test_drain_refuses_what_is_new_and_ends_what_is_open(world: World) -> None:
    transfer = world.new("t", 32)
    world.book(transfer)
    world.queue(transfer)
    world.chunk(transfer, 8)
    world.net.advance(0.3)
    world.prefill.core.drain()
    late = world.new("late", 8)
    world.net.advance(0.1)
    world.book(late)
    world.net.advance(0.5)
    assert lost(late)
    run_prefill(world, transfer)
    world.net.advance(1.0)
    assert complete(transfer)


def test_an_idle_pair_sends_only_heartbeats(world: World) -> None:
    before = sum(1 for _ in world.net.mail)
    sent = []
    original = world.net.send
    world.net.send = lambda source, agent, payload: (sent.append(payload), original(source, agent, payload))[1]  # type: ignore[method-assign]
    world.net.advance(LEASE * 2)
    assert before <= 4
    assert 8 <= len(sent) <= 16  # two ways, a third of a lease apart


class FakeEvent:
    """A device event that passes when the test says so."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


def test_blocks_leave_only_when_the_device_has_passed_their_fence(world: World) -> None:
    """The CUDA path: a step is launched, its KV is final when its event has passed, and events pass in order."""
    transfer = world.new("t", 32)
    world.book(transfer)
    world.queue(transfer)
    core, settle = world.prefill.core, world.prefill.core.settle
    fences = [FakeEvent(), FakeEvent(), FakeEvent()]
    for fence in fences:
        core.settle = lambda _, settled, fence=fence: settle(fence, settled)  # type: ignore[method-assign]
        world.chunk(transfer, 8)
    world.net.advance(1.0)
    assert not world.decode.memory
    fences[1].passed = True
    world.net.advance(1.0)
    assert not world.decode.memory, "the first step's event stands in front"
    fences[0].passed = True
    world.net.advance(1.0)
    assert len(world.decode.memory) == 4
    assert transfer.outcome is None
    fences[2].passed = True
    world.chunk(transfer, 8)  # the last one: prefill finishes when its outputs are there
    world.net.advance(1.0)
    assert complete(transfer)
