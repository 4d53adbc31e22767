"""The change of revision, by its promises: for every observation that can occur."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prebook_operator.api import Reason, Role
from prebook_operator.records import SetCounts
from prebook_operator.takeover import Fleet, Step, decide

REVISIONS = ("old", "new", "other")


def counts(ready: int, desired: int = 1, *, current: bool = True) -> SetCounts:
    return SetCounts(desired=desired, replicas=desired, ready=ready, updated=desired, current=current)


def fleet(
    target: str = "new",
    front: str = "old",
    *,
    old: tuple[int, int] | None = (1, 1),
    new: tuple[int, int] | None = None,
    pairs: int = 0,
    paused: bool = False,
) -> Fleet:
    """A fleet of one-engine roles; tuples are ready (prefill, decode)."""
    sets = {
        (role, revision): counts(ready[index])
        for revision, ready in (("old", old), ("new", new))
        if ready is not None
        for index, role in enumerate(Role)
    }
    desired = {Role.PREFILL: 1, Role.DECODE: 1}
    return Fleet(target=target, front=front, sets=sets, desired=desired, pairs=pairs, paused=paused)


def test_a_new_revision_comes_up_beside_the_serving_one() -> None:
    step = decide(fleet())
    assert (step.serving, step.start, step.retire, step.reason) == ("old", True, frozenset(), Reason.ROLLING_OUT)


def test_it_does_not_take_over_before_it_is_ready_and_paired() -> None:
    assert decide(fleet(new=(1, 0), pairs=0)).serving == "old"
    assert decide(fleet(new=(0, 1), pairs=0)).serving == "old"
    assert decide(fleet(new=(1, 1), pairs=0)).serving == "old"
    assert decide(fleet(new=(1, 1), pairs=1)).serving == "new"


def test_the_old_sets_go_only_after_the_front_has_moved() -> None:
    assert decide(fleet(new=(1, 1), pairs=1)).retire == frozenset()
    after = decide(fleet(front="new", new=(1, 1), pairs=1))
    assert (after.serving, after.retire) == ("new", frozenset({"old"}))


def test_going_back_is_complete_at_once() -> None:
    step = decide(fleet(target="old", new=(0, 0), pairs=1))
    assert (step.serving, step.retire, step.reason) == ("old", frozenset({"new"}), Reason.UP_TO_DATE)


def test_a_dead_revision_does_not_hold_on_to_the_front() -> None:
    assert decide(fleet(old=(1, 0), new=(0, 1))).serving == "new"
    assert decide(fleet(old=(1, 0), new=(0, 0))).serving == "old"


def test_a_front_service_that_was_deleted_comes_back_where_pods_are_ready() -> None:
    step = decide(fleet(front="", old=(1, 1), new=(0, 0)))
    assert (step.serving, step.retire) == ("old", frozenset())


def test_paused_starts_nothing_new() -> None:
    step = decide(fleet(paused=True, new=(0, 0)))
    assert (step.serving, step.start, step.retire, step.reason) == ("old", False, frozenset({"new"}), Reason.PAUSED)
    first = decide(fleet(front="", old=None, paused=True))
    assert (first.start, first.reason) == (False, Reason.PAUSED)


COUNTS = st.builds(
    lambda desired, ready, current: counts(min(ready, desired), desired, current=current),
    st.integers(0, 3),
    st.integers(0, 3),
    st.booleans(),
)
FLEETS = st.builds(
    lambda target, front, sets, prefill, decode, pairs, paused: Fleet(
        target=target,
        front=front,
        sets=sets,
        desired={Role.PREFILL: prefill, Role.DECODE: decode},
        pairs=pairs,
        paused=paused,
    ),
    st.sampled_from(REVISIONS),
    st.sampled_from(("", *REVISIONS)),
    st.dictionaries(st.tuples(st.sampled_from(Role), st.sampled_from(REVISIONS)), COUNTS),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 9),
    st.booleans(),
)


@given(FLEETS)
def test_what_serves_and_what_is_wanted_is_never_retired(observed: Fleet) -> None:
    step = decide(observed)
    assert step.serving not in step.retire
    assert observed.target not in step.retire or not step.start
    assert step.retire <= observed.revisions()
    if observed.front and (Role.DECODE, observed.front) in observed.sets and step.serving != observed.front:
        assert observed.front not in step.retire, "the front has not moved yet"


@given(FLEETS)
def test_clients_are_never_moved_from_ready_pods_to_none(observed: Fleet) -> None:
    before = observed.ready(Role.DECODE, observed.front)
    after = observed.ready(Role.DECODE, decide(observed).serving)
    assert not (before > 0 and after == 0 and observed.desired[Role.DECODE] > 0)


@given(FLEETS)
def test_up_to_date_means_complete(observed: Fleet) -> None:
    step = decide(observed)
    if step.reason is Reason.UP_TO_DATE:
        assert step.serving == observed.target
        for role in Role:
            found = observed.sets[role, observed.target]
            assert found.current
            assert found.ready >= observed.desired[role]


@given(FLEETS)
def test_a_healthy_world_converges(observed: Fleet) -> None:
    """Whatever it starts from: when sets that are asked for become ready and paired, a few steps later the target
    alone is left, and it serves."""
    unpaused = Fleet(
        target=observed.target, front=observed.front, sets=observed.sets, desired=observed.desired, pairs=9
    )
    for _ in range(6):
        unpaused = obey(unpaused, decide(unpaused))
    step = decide(unpaused)
    assert (step.serving, step.reason, step.retire) == (observed.target, Reason.UP_TO_DATE, frozenset())
    assert unpaused.revisions() == {observed.target}


def obey(observed: Fleet, step: Step) -> Fleet:
    """The world after a step, if everything goes well."""
    sets = {place: one for place, one in observed.sets.items() if place[1] not in step.retire}
    if step.start:
        for role in Role:
            sets[role, observed.target] = counts(observed.desired[role], observed.desired[role])
    return Fleet(
        target=observed.target, front=step.serving or observed.target, sets=sets, desired=observed.desired, pairs=9
    )
