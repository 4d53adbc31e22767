"""The queue: debounce, urgency, back-off, and one worker per model; on a clock of its own."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prebook_operator.records import Key
from prebook_operator.workqueue import BackOff, WorkQueue

A, B = Key("ns", "a"), Key("ns", "b")


class Clock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> WorkQueue:
    return WorkQueue(debounce=1.0, clock=clock, jitter=lambda: 0.5)


def due(queue: WorkQueue, clock: Clock) -> Key | None:
    return queue._pop(clock())


def test_a_burst_is_one_look_and_does_not_put_it_off(queue: WorkQueue, clock: Clock) -> None:
    for _ in range(5):
        queue.add(A)
        clock.now += 0.2
    assert due(queue, clock) == A
    assert due(queue, clock) is None


def test_what_happened_goes_before_what_is_looked_at_again(queue: WorkQueue, clock: Clock) -> None:
    queue.add_after(A, 0.0)
    queue.add(B)
    clock.now += 1.0
    assert [due(queue, clock), due(queue, clock)] == [B, A]


def test_an_event_brings_a_later_look_forward(queue: WorkQueue, clock: Clock) -> None:
    queue.add_after(A, 600.0)
    queue.add(A)
    clock.now += 1.0
    assert due(queue, clock) == A
    clock.now += 1000.0
    assert due(queue, clock) is None


def test_nobody_works_on_a_model_twice_at_once(queue: WorkQueue, clock: Clock) -> None:
    queue.add(A)
    clock.now += 1.0
    assert due(queue, clock) == A
    queue.add(A)
    clock.now += 5.0
    assert due(queue, clock) is None
    queue.done(A)
    assert due(queue, clock) == A


def test_events_do_not_cut_a_back_off_short_but_a_new_spec_does(queue: WorkQueue, clock: Clock) -> None:
    queue.fail(A, after=30.0)
    queue.add(A)
    clock.now += 20.0
    assert due(queue, clock) is None
    queue.add_fresh(A)
    clock.now += 1.0
    assert due(queue, clock) == A


def test_a_hold_keeps_echoes_out(queue: WorkQueue, clock: Clock) -> None:
    queue.hold(A, 3.0)
    queue.add(A)
    clock.now += 2.9
    assert due(queue, clock) is None
    clock.now += 0.1
    assert due(queue, clock) == A


def test_failures_in_a_row_wait_longer_and_success_forgets(queue: WorkQueue, clock: Clock) -> None:
    pauses = [queue.fail(A) for _ in range(4)]
    assert pauses == sorted(pauses)
    assert pauses[3] == 8 * pauses[0]
    queue.succeed(A)
    assert queue.fail(A) == pauses[0]


@given(st.integers(1, 1000), st.floats(0, 0.999), st.none() | st.floats(0, 120))
def test_back_off_is_bounded_and_obeys_the_server(failures: int, jitter: float, after: float | None) -> None:
    back_off = BackOff(base=0.5, limit=60.0)
    pause = back_off.delay(failures, after=after, jitter=jitter)
    assert 0 < pause <= 90.0 + (after or 0.0)
    assert after is None or pause >= after


async def test_take_wakes_up_for_a_new_key() -> None:
    queue = WorkQueue(debounce=0.01)
    waiting = asyncio.create_task(queue.take())
    await asyncio.sleep(0.02)
    queue.add(A)
    assert await asyncio.wait_for(waiting, timeout=2.0) == A
