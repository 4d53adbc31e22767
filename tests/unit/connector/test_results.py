"""Results reach the engine once, only those it waits for, and never at the cost of a step that computes."""

from __future__ import annotations

import threading
import time
from dataclasses import fields

from prebook_connector.book_side import Outcome
from prebook_connector.metadata import PrebookMetadata
from prebook_connector.results import IDLE_STEP_WAIT_SECONDS, Results


def test_a_step_that_computes_is_not_held_up_by_an_open_transfer() -> None:
    results = Results()
    results.expect_recving("r")
    results.begin_step(computes=True)
    waited: list[float | None] = []
    results._condition.wait = lambda timeout=None: waited.append(timeout) is None  # type: ignore[method-assign, assignment]
    taken, invalid = results.take()
    assert not taken.finished_recving
    assert not invalid
    assert not waited
    results.begin_step(computes=False)
    results.take()
    assert waited == [IDLE_STEP_WAIT_SECONDS]


def test_an_idle_step_sees_a_result_as_soon_as_it_is_there() -> None:
    results = Results()
    results.expect_recving("r")
    results.begin_step(computes=False)
    ended = threading.Thread(target=results.received, args=(Outcome("r", invalid_blocks=(3, 4)),))
    deadline = time.monotonic() + 30
    ended.start()
    while not (taken := results.take())[0].finished_recving:
        assert time.monotonic() < deadline
    ended.join()
    assert taken[1] == {3, 4}
    assert not results.take()[0].finished_recving, "once"


def test_unknown_ids_never_reach_the_engine() -> None:
    results = Results()
    results.sent("stranger")
    results.received(Outcome("stranger"))
    taken, _ = results.take()
    assert not taken.finished_sending
    assert not taken.finished_recving


def test_a_step_without_news_has_nothing_for_the_worker() -> None:
    assert PrebookMetadata(computes=True).is_empty()
    parts = [field.name for field in fields(PrebookMetadata) if field.name != "computes"]
    assert len(parts) == 9
    for part in parts:
        assert not PrebookMetadata(**{part: ["something"]}).is_empty(), part


def test_a_step_without_anything_open_takes_no_lock() -> None:
    results = Results()
    with results._condition:
        asked = threading.Thread(target=results.take)
        asked.start()
        asked.join(5)
        assert not asked.is_alive()
    results.expect_sending("r")
    results.sent("r")
    assert results.take()[0].finished_sending == {"r"}, "what has ended is still to be taken"
