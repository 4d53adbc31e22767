"""How often the transfer thread looks: seldom while prefill computes, often once somebody waits."""

from __future__ import annotations

import math

import pytest

from prebook_connector.protocol import Cancel, encode
from prebook_connector.transfer_thread import COMMIT_STRIDE_SECONDS, Pace
from prebook_connector.writer import FIRST_RATE, SEND_BUFFER_BYTES
from tests.unit.connector.scenario import World, resting_thread


def test_nothing_open_is_idle(world: World) -> None:
    assert world.prefill.core.pace is Pace.IDLE
    assert world.decode.core.pace is Pace.IDLE


def test_the_registration_of_a_request_is_expected(world: World) -> None:
    world.queue(world.new("t", 32))
    assert world.prefill.core.pace is Pace.EXPECTING, "its registration may come any moment"


def test_a_peer_that_was_not_heard_yet_is_being_met() -> None:
    world = World()
    assert world.decode.core.pace is Pace.IDLE
    world.net.latency = 0.4
    world.net.advance(0.1)
    assert world.decode.core.pace is Pace.EXPECTING
    world.net.advance(1.5)
    assert world.decode.core.pace is Pace.IDLE


def test_both_sides_wait_while_prefill_computes_and_hurry_at_the_end(world: World) -> None:
    transfer = world.new("t", 32)
    world.book(transfer)
    world.queue(transfer)
    world.net.advance(0.1)
    assert world.decode.core.pace is Pace.WAITING
    world.chunk(transfer, 16)
    world.net.advance(0.02, step=0.02)
    assert world.prefill.core.pace is Pace.WAITING, "half of the prompt is still to be computed"
    world.net.advance(0.5)
    assert world.prefill.core.pace is Pace.COMPUTING, "nothing moves until the next chunk has settled"
    assert world.decode.core.pace is Pace.URGENT, "what is missing may come with one WRITE as large as the last"
    world.chunk(transfer, 16)
    world.net.advance(0.04, step=0.02)
    assert world.prefill.core.pace is Pace.URGENT, "decode waits for this WRITE"
    world.net.advance(1.0)
    assert world.prefill.core.pace is Pace.IDLE
    assert world.decode.core.pace is Pace.IDLE


def test_the_registration_of_every_decode_rank_is_expected(world: World) -> None:
    transfer = world.new("t", 32)
    targets = world.prefill.link.targets
    world.prefill.link.targets = lambda engine_id: targets(engine_id) | {"another rank"}  # type: ignore[method-assign]
    world.book(transfer)
    world.queue(transfer)
    world.net.advance(0.1)
    assert world.prefill.core.pace is Pace.COMPUTING, "nothing is lost before the prompt is admitted"
    world.chunk(transfer, 16)
    world.net.advance(0.1)
    assert world.prefill.core.pace is Pace.EXPECTING


def test_decode_hurries_only_once_the_last_write_may_be_there(world: World) -> None:
    """The second WRITE lands two seconds after the first: the third, of half their size, is due 0.7 seconds later."""
    world.net.write_seconds = 0.001
    transfer = world.new("t", 80)
    world.book(transfer)
    world.queue(transfer)
    world.chunk(transfer, 32)
    world.net.advance(2.0)
    world.chunk(transfer, 32)
    world.net.advance(0.64)
    assert world.decode.core.pace is Pace.WAITING, "it cannot be there yet"
    world.net.advance(0.2)
    assert world.decode.core.pace is Pace.URGENT
    world.chunk(transfer, 16)
    world.net.advance(0.2)
    assert transfer.outcome is not None
    assert not transfer.outcome.failed


def test_an_end_that_is_asked_for_is_hurried_before_it_is_due(world: World) -> None:
    world.net.write_seconds = 0.001
    transfer = world.new("t", 80)
    world.book(transfer)
    world.queue(transfer)
    world.chunk(transfer, 32)
    world.net.advance(2.0)
    world.chunk(transfer, 32)
    world.net.advance(0.1)
    assert world.decode.core.pace is Pace.WAITING
    world.abort_decode(transfer)
    assert world.decode.core.pace is Pace.URGENT


def test_an_end_that_is_asked_for_is_hurried(world: World) -> None:
    transfer = world.new("t", 64)
    world.book(transfer)
    world.queue(transfer)
    world.chunk(transfer, 16)
    world.net.advance(0.02, step=0.02)
    assert world.decode.core.pace is Pace.WAITING
    world.abort_decode(transfer)
    assert world.decode.core.pace is Pace.URGENT, "the engine wants its blocks back"


def test_pauses_grow_as_far_as_the_pace_allows(world: World) -> None:
    thread = resting_thread(world.decode.core)
    longest = dict.fromkeys(Pace, 0.0)
    for pace in Pace:
        for _ in range(30):
            longest[pace] = thread.pause(pace, before=longest[pace])
    assert longest == {
        Pace.IDLE: 0.25,
        Pace.COMPUTING: 0.25,
        Pace.EXPECTING: 0.02,
        Pace.WAITING: 0.003,
        Pace.URGENT: 0.0005,
    }
    assert thread.pause(Pace.IDLE, before=0.0005) == pytest.approx(0.0015), "what has just moved may move again"


def test_a_look_at_a_write_under_way_is_only_a_glance(world: World) -> None:
    """Until it ends, a call asks for more, or heartbeats may be due."""
    world.net.write_seconds = 1.0
    transfer = world.new("t", 64)
    world.book(transfer)
    world.queue(transfer)
    world.chunk(transfer, 16)
    world.net.advance(0.02, step=0.02)
    core, turns, made = world.prefill.core, [], []
    turn = core.turn

    def counted(now: float) -> Pace:
        turns.append(now)
        return turn(world.net.now)

    core.turn = counted  # type: ignore[method-assign]
    thread = resting_thread(core)
    assert thread.look(Pace.WAITING) is Pace.WAITING
    assert len(turns) == 1, "the first look is a whole one"
    thread.leave(made.append, "left")
    assert thread.look(Pace.WAITING) is Pace.WAITING
    assert (len(turns), made) == (1, ["left"])
    thread.submit(made.append, "asked")
    thread.look(Pace.WAITING)
    assert (len(turns), made) == (2, ["left", "asked"])
    thread.look(Pace.URGENT)
    assert len(turns) == 3
    core.settle(None, [("p-t", 16)])
    thread.look(Pace.WAITING)
    assert len(turns) == 4, "a chunk has settled"
    late = world.new("late", 32)
    world.queue(late)
    thread.look(Pace.WAITING)
    assert len(turns) == 5, "a registration may have come"
    world.abort_prefill(late)
    assert thread.look(Pace.WAITING) is Pace.WAITING
    assert len(turns) == 5
    thread._turned_at -= 0.25
    thread.look(Pace.WAITING)
    assert len(turns) == 6, "a heartbeat may be due"
    world.net.now += 10.0
    world.net._land()
    assert thread.look(Pace.WAITING) is not Pace.WAITING
    assert len(turns) == 7, "the WRITE has ended"


def test_a_glance_at_prefill_finds_what_decode_says(world: World) -> None:
    """A CANCEL that comes while WRITEs are under way is not left for the next heartbeat."""
    world.net.write_seconds = 1.0
    transfer = world.new("t", 64)
    world.book(transfer)
    world.queue(transfer)
    world.chunk(transfer, 16)
    world.net.advance(0.02, step=0.02)
    core = world.prefill.core
    assert core.glance(world.net.now)
    world.net.send(world.decode, world.prefill.agent, encode(Cancel("t")))
    world.net.now += world.net.latency
    assert not core.glance(world.net.now)
    assert world.prefill.push is not None
    assert not world.prefill.push.urgent
    core.turn(world.net.now)
    assert world.prefill.push.urgent, "what the glance found is not lost"


def test_a_glance_at_decode_ends_when_the_commit_is_due(world: World) -> None:
    world.net.write_seconds = 0.001
    transfer = world.new("t", 80)
    world.book(transfer)
    world.queue(transfer)
    world.chunk(transfer, 32)
    world.net.advance(2.0)
    world.chunk(transfer, 32)
    world.net.advance(0.1)
    core = world.decode.core
    assert core.pace is Pace.WAITING
    assert core.glance(world.net.now), "nothing has come, and the commit cannot come yet"
    assert not core.glance(world.net.now + 0.7), "now it can"


def test_the_stride_keeps_the_link_busy(world: World) -> None:
    push = world.prefill.push
    assert push is not None
    assert world.decode.core.stride == COMMIT_STRIDE_SECONDS
    assert push.stride == math.inf, "without an open WRITE there is nothing to keep busy"
    transfer = world.new("t", 64)
    world.book(transfer)
    world.queue(transfer)
    world.chunk(transfer, 16)
    world.net.advance(0.02, step=0.02)
    assert push.stride == SEND_BUFFER_BYTES / FIRST_RATE
    world.net.advance(1.0)
    world.chunk(transfer, 16)
    world.net.advance(0.02, step=0.02)
    assert push.stride > SEND_BUFFER_BYTES / FIRST_RATE, "the fake link is slower than first assumed"


def test_the_end_that_decode_waits_for_is_hurried_only_once_it_may_come(world: World) -> None:
    """On a link of known rate: after 0.7 of the time that the WRITE, and the one before it, should take."""
    world.net.write_seconds = 1.0
    push = world.prefill.push
    assert push is not None
    push._writer._rate = 40.0  # blocks of a byte, four tokens each: a tenth of a second for 16 tokens
    transfer = world.new("t", 32)
    world.book(transfer)
    world.queue(transfer)
    world.chunk(transfer, 16)
    world.net.advance(0.02, step=0.02)
    posted = world.net.now
    world.chunk(transfer, 16)
    world.net.advance(0.02, step=0.02)
    core = world.prefill.core
    assert core.pace is Pace.WAITING
    assert push.stride == pytest.approx(0.7 * (0.2 - 0.02))
    assert core.glance(posted + 0.14)
    assert core.pace is Pace.WAITING
    assert not core.glance(posted + 0.15)
    assert core.pace is Pace.URGENT


def test_the_rate_is_learnt_from_what_buffers_cannot_hide(world: World) -> None:
    assert world.prefill.push is not None
    writer = world.prefill.push._writer
    writer._learn(5e9, 64 * 1024)
    assert writer._rate == pytest.approx(FIRST_RATE, rel=0.02)
    writer._learn(1.2e8, 8 * 1024 * 1024)
    writer._learn(5e8, 64 * 1024)
    assert writer._rate == pytest.approx(1.2e8, rel=0.02)
    writer._learn(2.4e8, 8 * 1024 * 1024)
    assert writer._rate == pytest.approx(1.56e8, rel=0.02)
