"""The last chunk, layer by layer: which layers are final, what leaves when, and faults between two layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from prebook_connector.layers import LayerWatch, can_wait, next_part, stride
from prebook_connector.ports import Posted
from prebook_connector.writer import SLICE_BYTES
from tests.unit.connector.fake_net import LEASE, REGIONS
from tests.unit.connector.scenario import Transfer, World
from tests.unit.connector.test_protocol_flow import FakeEvent, complete, quiet, run_prefill


def told(watch: LayerWatch, layers: list[str]) -> list[int]:
    watch.begin(["r"])
    return [watch.done(layer) for layer in layers]


def test_layers_are_told_in_at_most_eight_parts_and_never_the_last() -> None:
    names = [f"l{index}" for index in range(64)]
    parts = [count for count in told(LayerWatch(names), names) if count]
    assert parts == [8, 16, 24, 32, 40, 48, 56]
    assert told(LayerWatch(names[:3]), names[:3]) == [1, 2, 0]


def test_only_regions_without_a_gap_before_them_are_final() -> None:
    assert told(LayerWatch(["a", "b", "c", "d"]), ["b", "a", "d", "c"]) == [0, 2, 0, 0]


def test_layers_of_other_steps_and_without_a_region_say_nothing() -> None:
    watch = LayerWatch(["a", "b"])
    watch.begin([])
    assert watch.done("a") == 0
    watch.begin(["r"])
    assert watch.done("shares the memory of another layer") == 0
    assert watch.done("a") == 1
    assert LayerWatch([]).regions == 0
    assert told(LayerWatch([]), ["a"]) == [0]


def parts(regions: int, *, line: float, eager: bool = False) -> tuple[list[int], float]:
    """Simulates a step whose regions take a second each, over a link that needs ``line`` seconds for one.

    Returns how many regions each part that left before the step's end had, and when the last byte has left.
    """
    posted, free, made = 0, 0.0, []
    for settled in range(stride(regions), regions, stride(regions)):
        waits = can_wait(regions, settled=settled, posted=posted, region_seconds=1.0, line_seconds=line)
        if eager or not waits:
            made.append(settled - posted)
            free = max(free, settled) + (settled - posted) * line
            posted = settled
    return made, max(free, regions) + (regions - posted) * line


def test_a_fast_link_gets_few_parts_and_a_slow_one_every_part() -> None:
    assert parts(8, line=0.28)[0] == [5, 2]
    assert parts(8, line=0.45)[0] == [4, 2, 1]
    assert parts(8, line=0.001)[0] == [7]
    assert parts(8, line=1.0)[0] == [1] * 7
    assert parts(64, line=0.28)[0] == [40, 16]


@pytest.mark.parametrize("regions", [2, 3, 8, 9, 32, 61])
@pytest.mark.parametrize("line", [0.01, 0.1, 0.3, 0.45, 0.6, 0.9, 1.1, 3.0])
def test_fewer_parts_end_when_every_part_would(regions: int, line: float) -> None:
    """But for one report's line time: a link that is about as fast as the step is idle at its beginning."""
    few, end = parts(regions, line=line)
    every, soonest = parts(regions, line=line, eager=True)
    assert len(few) <= len(every)
    assert end <= soonest + stride(regions) * line + 1e-9


def test_the_next_part_leaves_with_the_first_report_that_cannot_wait() -> None:
    step = {"region_seconds": 1.0, "line_seconds": 0.28}
    assert [next_part(8, settled=settled, posted=0, **step) for settled in range(1, 7)] == [5, 5, 5, 5, 5, 6]
    assert [next_part(8, settled=settled, posted=5, **step) for settled in (5, 6, 7)] == [7, 7, 7]
    assert next_part(8, settled=7, posted=7, **step) == 7
    assert next_part(61, settled=8, posted=0, region_seconds=1.0, line_seconds=0.0) == 56, "a multiple of the stride"


@pytest.mark.parametrize(("bytes_per_second", "of_use"), [(1.0, 1), (1e9, 2)], ids=["slow", "fast"])
def test_the_engine_need_not_tell_what_would_only_wait(world: World, bytes_per_second: float, of_use: int) -> None:
    core, push = world.prefill.core, world.prefill.push
    assert push is not None
    push._writer._rate = bytes_per_second
    transfer = by_layer(world)
    tell, before = core.settle_layers, []

    def settle_layers(*args: Any) -> None:
        before.append(push.regions_of_use)
        tell(*args)

    core.settle_layers = settle_layers  # type: ignore[method-assign]
    world.chunk(transfer, 24, pause=0.2)
    assert before == [0, of_use], "nothing is known before the first report"
    world.net.advance(1.0)
    assert push.regions_of_use == 0
    assert complete(transfer)


def by_layer(world: World, tokens: int = 32) -> Transfer:
    """A booked request whose last chunk, of three quarters of the prompt, is computed next."""
    transfer = world.new("t", tokens)
    world.book(transfer)
    world.queue(transfer)
    world.chunk(transfer, tokens // 4)
    world.net.advance(0.5)
    return transfer


@pytest.mark.parametrize(
    ("bytes_per_second", "before_the_end"),
    [(1.0, [(0, 1), (1, 2)]), (9.0, [(0, 1), (1, 2)]), (11.0, [(0, 2)]), (1e9, [(0, 2)])],
    ids=["slow", "just too slow", "just fast enough", "fast"],
)
def test_the_last_chunk_leaves_layer_by_layer(
    world: World, bytes_per_second: float, before_the_end: list[tuple[int, int]]
) -> None:
    """Six blocks of a byte in three layers; the first was told half a second after the chunk before had settled. Two
    layers must fit one and a quarter times, with what they need on the line, into the time of one: from 10 bytes a
    second on."""
    assert world.prefill.push is not None
    world.prefill.push._writer._rate = bytes_per_second
    transfer = by_layer(world)
    posted = []
    original = world.prefill.link.post

    def post(*args: Any, **kwargs: Any) -> Posted:
        posted.append((kwargs["regions"], transfer.finished))
        return original(*args, **kwargs)

    world.prefill.link.post = post  # type: ignore[method-assign]
    world.chunk(transfer, 24, pause=0.2)
    world.net.advance(1.0)
    assert posted == [*((part, False) for part in before_the_end), ((2, REGIONS), True)]
    assert complete(transfer)
    assert quiet(world)


def test_a_region_takes_its_share_of_the_step_under_way(world: World) -> None:
    """The step began when the request was admitted, or when the chunk before had settled."""
    push = world.prefill.push
    assert push is not None
    push.announce("p-t", "t", 9.0)
    push.admit("p-t", prompt_tokens=32, digest=b"", now=10.0)
    push.settle_layers("p-t", 2, 11.0)
    assert push._pushes["t"].region_seconds == 0.5
    push.settle("p-t", 16, 20.0)
    for regions, now in ((1, 20.25), (2, 20.5)):
        push.settle_layers("p-t", regions, now)
        assert push._pushes["t"].region_seconds == 0.25


def test_layers_that_settle_faster_than_the_link_share_a_write(world: World) -> None:
    transfer = by_layer(world)
    assert world.prefill.push is not None
    world.prefill.push._writer._rate = 1.0
    world.net.write_seconds = 1.0
    world.chunk(transfer, 24, pause=0.02)
    world.net.advance(10.0)
    assert complete(transfer)
    assert world.prefill.recorder.totals()["writes"] == 1 + 3


def test_a_chunk_that_is_not_worth_its_parts_leaves_whole(world: World) -> None:
    """And with news of its blocks, which parts cannot carry."""
    transfer = world.new("t", 32)
    assert world.prefill.push is not None
    world.prefill.push._writer._settings = dataclasses.replace(
        world.prefill.push._settings, min_bytes=SLICE_BYTES, block_bytes=SLICE_BYTES // 16
    )
    world.book(transfer)
    world.queue(transfer)
    world.chunk(transfer, 32, pause=0.2)
    world.net.advance(1.0)
    assert complete(transfer)
    assert world.prefill.recorder.totals()["writes"] == 1


@pytest.mark.parametrize("fault", ["cancelled", "decode_dies", "prefill_dies", "refused"])
def test_a_fault_between_two_layers(world: World, fault: str) -> None:
    """What was posted drains, the rest never leaves, and prefill's blocks are released."""
    transfer = by_layer(world)
    world.net.write_seconds = 0.2
    core, told = world.prefill.core, world.prefill.core.settle_layers

    def settle_layers(*args: Any) -> None:
        told(*args)
        world.net.advance(0.04)
        if fault == "cancelled":
            world.abort_decode(transfer)
        elif fault == "decode_dies":
            world.decode.alive = False
        elif fault == "prefill_dies":
            world.prefill.alive = False
        else:
            world.prefill.link.refuse_posts = True
        core.settle_layers = told  # type: ignore[method-assign]

    core.settle_layers = settle_layers  # type: ignore[method-assign]
    world.chunk(transfer, 24, pause=0.04)
    if fault == "prefill_dies":
        world.kill_prefill()
    world.net.advance(LEASE * 4, step=0.1)
    if fault != "decode_dies":
        assert transfer.outcome is not None
        assert world.decode.book is not None
        assert world.decode.book.booked == 0
    if fault != "prefill_dies":
        assert world.prefill.released == ["p-t"]
        assert world.prefill.push is not None
        assert world.prefill.push.open == 0


def test_a_preempted_steps_event_settles_nothing(world: World) -> None:
    """With asynchronous scheduling a request can lose its blocks while its step still runs on the device."""
    transfer = world.new("t", 32)
    world.book(transfer)
    world.queue(transfer)
    core, settle, event = world.prefill.core, world.prefill.core.settle, FakeEvent()
    core.settle = lambda _, settled: settle(event, settled)  # type: ignore[method-assign]
    world.chunk(transfer, 16)
    world.preempt(transfer)
    core.settle = settle  # type: ignore[method-assign]
    event.passed = True
    world.net.advance(0.5)
    assert not world.decode.memory
    run_prefill(world, transfer)
    world.net.advance(2.0)
    assert complete(transfer)
