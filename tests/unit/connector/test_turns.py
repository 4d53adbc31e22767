"""Several transfers on one link: the shortest goes first, none starves, no stuck engine holds up another."""

from __future__ import annotations

import pytest

from prebook_connector.push import Push
from prebook_connector.turns import PATIENCE_SECONDS, in_turn
from tests.unit.connector.fake_net import BLOCK, LEASE, Node
from tests.unit.connector.scenario import Transfer, World
from tests.unit.connector.test_protocol_flow import complete, quiet

BLOCKS_PER_SECOND = 20  # of the fake link


@pytest.fixture
def world() -> World:
    world = World()
    world.net.shared = True
    world.net.advance(1.0)
    assert world.prefill.push is not None
    # In the fakes a block is one byte. A WRITE is then two blocks at most.
    world.prefill.push._writer._rate = BLOCKS_PER_SECOND
    return world


def computed(world: World, name: str, blocks: int) -> Transfer:
    """A booked request that prefill has computed at once."""
    transfer = world.new(name, blocks * BLOCK)
    world.book(transfer)
    world.queue(transfer)
    world.net.advance(0.04)
    world.chunk(transfer, blocks * BLOCK)
    return transfer


def until_done(world: World, transfer: Transfer, *, most: float) -> float:
    """Seconds until decode has it all."""
    started = world.net.now
    while transfer.outcome is None and world.net.now - started < most:
        world.net.advance(0.02)
    return world.net.now - started


def test_a_short_transfer_overtakes_a_long_one(world: World) -> None:
    long = computed(world, "long", 100)
    world.net.advance(0.2)
    short = computed(world, "short", 2)
    own = 2 / BLOCKS_PER_SECOND
    ahead = 2 * own  # the WRITEs that were handed over before
    assert until_done(world, short, most=9.0) <= ahead + own + 0.1
    assert long.outcome is None
    until_done(world, long, most=9.0)
    assert complete(short)
    assert complete(long)
    assert quiet(world)


def test_no_transfer_starves(world: World) -> None:
    """Short ones that alone are a little more than the link can take keep coming, and the long one still gets done."""
    long = computed(world, "long", 40)
    for number in range(200):
        if long.outcome is not None:
            break
        computed(world, f"short-{number}", 4)
        world.net.advance(0.14)
    assert complete(long)


def test_who_fills_the_link_alone_is_not_passed_over(world: World) -> None:
    """On a link so slow that its own WRITEs take longer than anybody is to be passed over."""
    world.net.write_seconds = PATIENCE_SECONDS  # a WRITE of two blocks takes twice that
    long = computed(world, "long", 100)
    world.net.advance(PATIENCE_SECONDS * 1.5)
    short = computed(world, "short", 2)
    own = 2 * PATIENCE_SECONDS
    ahead = 2 * own  # the WRITEs that were handed over before
    assert until_done(world, short, most=9.0) <= ahead + own
    assert long.outcome is None


def test_an_engine_that_is_stuck_holds_up_no_other(world: World) -> None:
    stuck = [computed(world, f"stuck-{number}", 8) for number in range(3)]
    world.decode.cut = True
    first, world.decode = world.decode, Node(world.net, "D2", "decode")
    world.decode.guard, world.decode.on_outcome = first.guard, first.on_outcome
    world.introduce()
    world.net.advance(0.5)
    other = computed(world, "other", 8)
    assert until_done(world, other, most=LEASE / 2) < 1.0
    assert complete(other)
    assert all(one.outcome is None for one in stuck)


def test_open_writes_to_one_engine_are_bounded(world: World) -> None:
    for number in range(5):
        computed(world, f"t{number}", 6)
        assert len(world.net.flights) <= 2
    world.net.advance(0.1)
    assert len(world.net.flights) == 2


def test_those_passed_over_for_too_long_go_first_the_longest_of_them_before_the_others() -> None:
    now = 100.0
    names = {
        "just now": now - PATIENCE_SECONDS / 2,
        "never": 0.0,
        "long ago": now - 3 * PATIENCE_SECONDS,
        "longer ago": now - 4 * PATIENCE_SECONDS,
    }
    pushes = [Push(name, 0.0, passed_over_at=since) for name, since in names.items()]
    assert [push.transfer_id for push in in_turn(pushes, now)] == ["longer ago", "long ago", "just now", "never"]
