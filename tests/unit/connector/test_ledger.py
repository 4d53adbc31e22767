"""The prefill ledger: order of its marks, when a range may leave, and what a preemption does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prebook_connector.ledger import Ledger, LedgerError, Range


def test_nothing_leaves_before_a_registration() -> None:
    ledger = Ledger(100, 10)
    ledger.settle(50)
    assert ledger.next_write() is None


def test_the_last_partial_block_leaves_only_when_the_prompt_is_complete() -> None:
    ledger = Ledger(25, 10)
    ledger.register(0)
    ledger.settle(24)
    assert ledger.next_write() == Range(0, 2)
    ledger.post(Range(0, 2))
    ledger.settle(25)
    assert ledger.next_write() == Range(2, 3)


def test_small_ranges_wait_until_they_are_worth_a_write() -> None:
    ledger = Ledger(100, 10, min_blocks=3)
    ledger.register(0)
    ledger.settle(20)
    assert ledger.next_write() is None
    ledger.settle(30)
    assert ledger.next_write() == Range(0, 3)
    ledger.post(Range(0, 3))
    ledger.settle(100)
    assert ledger.next_write() == Range(3, 10)


def test_a_range_is_cut_to_what_may_leave_at_once_but_stays_worth_a_write() -> None:
    ledger = Ledger(100, 10, min_blocks=3)
    ledger.register(0)
    ledger.settle(80)
    assert ledger.next_write(most=5) == Range(0, 5)
    assert ledger.next_write(most=1) == Range(0, 3)
    ledger.post(Range(0, 5))
    ledger.settle(100)
    assert ledger.next_write(most=9) == Range(5, 10)


def test_what_remains_is_what_was_registered_and_is_not_written() -> None:
    ledger = Ledger(100, 10)
    ledger.register(2)
    assert ledger.remaining_blocks == 8
    ledger.settle(50)
    ledger.post(Range(2, 5))
    assert ledger.remaining_blocks == 8, "under way is not written"
    ledger.finish_write(Range(2, 5), epoch=0)
    assert ledger.remaining_blocks == 5
    ledger.preempt()
    assert ledger.remaining_blocks == 8


def test_after_a_preemption_nothing_leaves_until_the_old_writes_have_drained() -> None:
    ledger = Ledger(40, 10)
    ledger.register(1)
    ledger.settle(30)
    ledger.post(Range(1, 3))
    ledger.preempt()
    assert (ledger.epoch, ledger.posted, ledger.settled) == (1, 1, 0)
    ledger.settle(40)
    assert ledger.next_write() is None
    assert not ledger.all_done
    ledger.finish_write(Range(1, 3), epoch=0)
    assert ledger.next_write() == Range(1, 4)


@pytest.mark.parametrize("first", [-1, 4, 9])
def test_a_registration_outside_the_prompt_is_an_error(first: int) -> None:
    with pytest.raises(LedgerError):
        Ledger(40, 10).register(first)


def test_posting_out_of_turn_is_an_error() -> None:
    ledger = Ledger(40, 10)
    ledger.register(0)
    ledger.settle(20)
    for wrong in (Range(1, 2), Range(0, 3), Range(0, 0)):
        with pytest.raises(LedgerError):
            ledger.post(wrong)


@given(
    tokens=st.integers(1, 200),
    block=st.integers(1, 32),
    least=st.integers(1, 9),
    most=st.integers(1, 20),
    first=st.integers(0, 50),
    steps=st.lists(st.tuples(st.sampled_from(["settle", "post", "done", "preempt", "register"]), st.integers(1, 60))),
)
def test_marks_never_cross_and_every_block_leaves_once(
    *, tokens: int, block: int, least: int, most: int, first: int, steps: list[tuple[str, int]]
) -> None:
    ledger = Ledger(tokens, block, min_blocks=least)
    first = min(first, ledger.prompt_blocks - 1)
    computed, old = 0, []
    for name, number in [*steps, ("register", 0), ("settle", tokens)]:
        if name == "settle":
            computed += number
            ledger.settle(computed)
        elif name == "register" and ledger.first_block is None:
            ledger.register(first)
        elif name == "post" and (write := ledger.next_write(most=most)) is not None:
            assert len(write) <= max(most, least)
            ledger.post(write)
        elif name == "done" and ledger.in_flight:
            ledger.finish_write(ledger.in_flight[0], epoch=ledger.epoch)
        elif name == "preempt":
            old += [(write, ledger.epoch) for write in ledger.in_flight]
            ledger.preempt()
            computed = 0
        assert ledger.posted <= max(ledger.settled, ledger.first_block or 0) <= ledger.prompt_blocks
    ledger.settle(tokens)
    for write, epoch in old:
        ledger.finish_write(write, epoch=epoch)
    written = ledger.done_blocks
    while not ledger.all_done:
        while ledger.in_flight:
            written += len(ledger.in_flight[0])
            ledger.finish_write(ledger.in_flight[0], epoch=ledger.epoch)
        if (write := ledger.next_write()) is not None:
            ledger.post(write)
    assert written == ledger.prompt_blocks - first
