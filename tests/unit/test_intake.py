"""Which news becomes work: nothing for a standby, and for a new leader the unfinished first."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prebook_operator.cache import Cache, Seen
from prebook_operator.intake import Intake
from prebook_operator.kube.progress import Scope
from prebook_operator.kube.resources import MODEL
from prebook_operator.records import Key, ModelRecord
from prebook_operator.workqueue import WorkQueue


class Bench:
    """An intake with its queue, on a clock that stands until told."""

    def __init__(self) -> None:
        self.now = 100.0
        self.cache = Cache()
        self.queue = WorkQueue(debounce=1.0, clock=lambda: self.now, jitter=lambda: 0.5)
        self.intake = Intake(self.cache, self.queue)
        self._version = 0

    def model(
        self, name: str, *, generation: int = 1, reported: int = 1, reason: str = "Serving", listed: bool = False
    ) -> Key:
        self._version += 1
        status: dict[str, Any] = {"observedGeneration": reported, "conditions": [{"type": "Ready", "reason": reason}]}
        key = Key("ns", name)
        record = ModelRecord(
            key=key,
            uid=f"uid-{name}",
            version=self._version,
            generation=generation,
            deleting=False,
            spec=b"{}",
            status=json.dumps(status if reported else {}, separators=(",", ":")).encode(),
        )
        self.intake.seen(Seen(MODEL.plural, key, record, False, listed))
        return key

    def order(self) -> list[str]:
        """All keys that are due now, in the order in which workers get them."""
        found = []
        while (key := self.queue._pop(self.now)) is not None:
            found.append(key.name)
        return found


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_standby_queues_nothing(bench: Bench) -> None:
    bench.model("old", listed=True)
    bench.model("new", reported=0)
    bench.now += 10.0
    assert bench.order() == []


def test_a_new_leader_does_the_unfinished_first_and_then_looks_at_everything(bench: Bench) -> None:
    for name in ("a", "b", "c"):
        bench.model(name, listed=True)
    bench.model("unreported", reported=0)
    bench.model("changed", generation=2)
    bench.model("begun", reason="NewGeneration")
    bench.intake.lead(True)
    bench.now += 1.0
    order = bench.order()
    assert set(order[:3]) == {"unreported", "changed", "begun"}
    assert order[3:] == ["a", "b", "c"]


def test_what_a_list_brings_waits_behind_what_happens(bench: Bench) -> None:
    bench.intake.lead(True)
    bench.model("listed", listed=True)
    bench.model("made", reported=0)
    bench.now += 1.0
    assert bench.order() == ["made", "listed"]


def test_a_new_spec_ends_a_back_off(bench: Bench) -> None:
    bench.intake.lead(True)
    key = bench.model("one")
    bench.now += 1.0
    assert bench.order() == ["one"]
    bench.queue.done(key)
    bench.queue.fail(key, after=60.0)
    bench.model("one", generation=2)
    bench.now += 1.0
    assert bench.order() == ["one"]


def test_a_lost_leader_queues_nothing_more(bench: Bench) -> None:
    bench.intake.lead(True)
    bench.intake.lead(False)
    bench.model("one", reported=0)
    bench.now += 1.0
    assert bench.order() == []


def test_what_a_list_lacks_is_looked_at_by_the_leader_only(bench: Bench) -> None:
    bench.model("gone")
    scope = Scope(MODEL.plural, None)
    bench.cache.begin_list(scope)
    bench.intake.lead(True)
    bench.intake.list_ended(scope)
    bench.now += 1.0
    assert bench.order() == ["gone"]
