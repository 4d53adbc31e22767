"""The report, by its promises; for every picture that can occur."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from prebook_operator.api import DisaggregatedModelStatus, FieldError, Reason, Role, load
from prebook_operator.events import event, news
from prebook_operator.fabric import Verdict
from prebook_operator.pairs import PodPairs
from prebook_operator.pod_trouble import worst
from prebook_operator.records import INCOMPATIBLE_MARKS, Key, PodRecord
from prebook_operator.status import report
from prebook_operator.takeover import Step
from prebook_operator.view import Trouble, View
from tests.model_documents import minimal

SPEC = load(minimal()).spec
UP = Step(serving="new", start=True, retire=frozenset(), reason=Reason.UP_TO_DATE, message="revision new serves")


def pod(role: Role = Role.DECODE, name: str | None = None, *, ready: bool = True, **changes: Any) -> PodRecord:
    base = PodRecord(
        name=name or f"{role}-0",
        uid=f"uid-{role}-{name}",
        version=1,
        owner="set",
        role=role.value,
        revision="new",
        ip="192.0.2.1",
        scheduled=True,
        running=True,
        ready=ready,
        deleting=False,
        trouble="",
        detail="",
        restarts=0,
    )
    return replace(base, **changes)


def view(**changes: Any) -> View:
    """A model that serves, changed as asked."""
    base = View(
        name="demo",
        namespace="ns",
        generation=3,
        now="2030-01-01T00:00:00Z",
        previous={},
        spec=SPEC,
        target="new",
        step=UP,
        desired={Role.PREFILL: 1, Role.DECODE: 1},
        pods=(pod(Role.PREFILL), pod(Role.DECODE)),
        pairs={"decode-0": PodPairs(ready=1, possible=1)},
        fabric=Verdict(True, Reason.FABRIC_NOT_NEEDED, "none"),
        applied=True,
    )
    return replace(base, **changes)


def conditions(picture: View) -> dict[str, tuple[str, str]]:
    return {one.type: (one.status.value, one.reason) for one in report(picture).conditions}


def test_a_model_that_serves() -> None:
    found = conditions(view())
    assert found["Ready"] == ("True", "Serving")
    assert found["Reconciling"] == ("False", "UpToDate")
    assert found["Stalled"] == ("False", "UpToDate")
    assert found["Available"] == ("True", "Serving")
    assert found["PairsReady"] == ("True", "Paired")
    assert found["Progressing"] == ("False", "UpToDate")


def test_a_generation_that_is_only_noticed_is_not_ready_whatever_runs() -> None:
    found = conditions(view(applied=False))
    assert found["Ready"] == ("False", "NewGeneration")
    assert found["Reconciling"][0] == "True"
    assert found["Available"] == ("True", "Serving")


def test_pairs_are_never_assumed() -> None:
    assert conditions(view(pairs={}))["Ready"][0] == "False"
    silent = {"decode-0": PodPairs(error="connection refused")}
    assert conditions(view(pairs=silent))["PairsReady"] == ("Unknown", "PairsUnknown")
    assert conditions(view(pairs=silent))["Ready"][0] == "Unknown"
    failing = {"decode-0": PodPairs(ready=0, possible=1, failure="192.0.2.2:8000: other model revision")}
    message = next(one.message for one in report(view(pairs=failing)).conditions if one.type == "PairsReady")
    assert "other model revision" in message


def test_without_prefill_engines_decode_alone_is_ready() -> None:
    found = conditions(view(desired={Role.PREFILL: 0, Role.DECODE: 1}, pods=(pod(),), pairs={}))
    assert found["PairsReady"] == ("False", "LocalPrefillOnly")
    assert found["Ready"] == ("True", "Serving")


def test_what_the_user_got_wrong_stalls_and_names_the_field() -> None:
    picture = view(
        faults=(FieldError("spec.prefill.gpus", "9 are too many", "Use 8"),), spec=None, step=None, applied=False
    )
    found = conditions(picture)
    assert found["Ready"] == ("False", "InvalidSpec")
    assert found["Stalled"] == ("True", "InvalidSpec")
    assert found["Reconciling"][0] == "False"
    message = report(picture).conditions[0].message
    assert "spec.prefill.gpus: 9 are too many. Use 8" in message


def test_quota_is_trouble_but_nobody_has_to_change_the_model() -> None:
    found = conditions(view(trouble=Trouble(reason=Reason.API_ERROR, message="exceeded quota", users=False)))
    assert found["Ready"] == ("False", "APIError")
    assert found["Stalled"][0] == "False"
    assert found["Reconciling"][0] == "True"


def test_an_unschedulable_pod_is_explained_by_the_fabric() -> None:
    starting = replace(UP, reason=Reason.STARTING, message="0 of 1 decode pods are ready")
    stuck = pod(ready=False, running=False, scheduled=False, trouble="Unschedulable", detail="0/3 nodes")
    fabric = Verdict(False, Reason.TOO_FEW_EFA_DEVICES, "install the EFA device plugin")
    found = conditions(view(step=starting, pods=(stuck,), pairs={}, fabric=fabric))
    assert found["Ready"] == ("False", "TooFewEFADevices")


def test_the_worst_trouble_is_told_and_the_text_is_stable() -> None:
    pods = [
        pod(name="b", trouble="Unschedulable", detail="x"),
        pod(name="c", trouble="ImagePullBackOff", detail="no such tag"),
        pod(name="a", trouble="ImagePullBackOff", detail="no such tag"),
    ]
    first, second = worst(pods), worst(pods[::-1])
    assert first == second
    assert first is not None
    assert first.reason is Reason.IMAGE_PULL_FAILED
    assert "pod a" in first.message
    for mark in INCOMPATIBLE_MARKS:
        found = worst([pod(trouble="CrashLoopBackOff", detail=f"x {mark} y")])
        assert found is not None
        assert found.reason is Reason.ENGINE_INCOMPATIBLE


def test_times_move_only_when_a_status_does() -> None:
    before = report(view()).to_wire()
    later = view(previous=before, now="2031-01-01T00:00:00Z")
    assert report(later).to_wire() == before
    broken = report(replace(later, pairs={})).to_wire()
    times = {one["type"]: one["lastTransitionTime"] for one in broken["conditions"]}
    assert times["Ready"].startswith("2031")
    assert times["Available"].startswith("2030")


PODS = st.lists(
    st.builds(
        pod,
        st.sampled_from(Role),
        st.sampled_from(["p0", "p1", "p2"]),
        ready=st.booleans(),
        revision=st.sampled_from(["new", "old"]),
        deleting=st.booleans(),
        scheduled=st.booleans(),
        trouble=st.sampled_from(["", "Unschedulable", "ImagePullBackOff", "CrashLoopBackOff", "NeverHeardOf"]),
        detail=st.text(max_size=40),
    ),
    max_size=4,
)
VIEWS = st.builds(
    view,
    pods=PODS.map(tuple),
    generation=st.integers(1, 9),
    applied=st.booleans(),
    step=st.none()
    | st.builds(
        Step,
        serving=st.sampled_from(["", "new", "old"]),
        start=st.booleans(),
        retire=st.frozensets(st.sampled_from(["old", "other"])),
        reason=st.sampled_from([Reason.UP_TO_DATE, Reason.STARTING, Reason.ROLLING_OUT, Reason.PAUSED]),
        message=st.just("m"),
    ),
    desired=st.fixed_dictionaries({role: st.integers(0, 3) for role in Role}),
    pairs=st.dictionaries(
        st.sampled_from(["p0", "p1"]),
        st.builds(
            PodPairs, ready=st.integers(0, 3), possible=st.integers(0, 3), error=st.sampled_from(["", "timeout"])
        ),
    ),
    trouble=st.none()
    | st.builds(
        Trouble,
        reason=st.just(Reason.API_ERROR),
        message=st.text("ab \n", max_size=5000).map("quota: {}".format),
        users=st.booleans(),
    ),
    faults=st.just(()) | st.just((FieldError("spec.x", "is wrong", "Change it"),)),
)


@given(VIEWS)
def test_every_picture_has_a_report_that_the_schema_accepts(picture: View) -> None:
    status = report(picture)
    assert DisaggregatedModelStatus.model_validate(status.to_wire()) == status
    assert status.observed_generation == picture.generation
    assert all(one.observed_generation == picture.generation for one in status.conditions)
    assert len({one.type for one in status.conditions}) == len(status.conditions)
    assert all(one.message for one in status.conditions)


@given(VIEWS)
def test_kstatus_never_contradicts_itself(picture: View) -> None:
    found = conditions(picture)
    if found["Ready"][0] == "True":
        assert found["Reconciling"][0] == "False"
        assert picture.applied
        assert not picture.faults
        assert picture.trouble is None
    if found["Stalled"][0] == "True":
        assert found["Reconciling"][0] == "False"
    assert "True" in (found["Ready"][0], found["Reconciling"][0], found["Stalled"][0]), (
        "somebody must say what is going on"
    )


@given(VIEWS)
def test_the_same_picture_gives_the_same_status_and_no_news(picture: View) -> None:
    wire = report(picture).to_wire()
    again = replace(picture, previous=wire, now="2040-01-01T00:00:00Z")
    if picture.step is not None or not picture.spec:
        assert report(again).to_wire()["conditions"] == wire["conditions"]
    assert news(wire, report(again).conditions) == [] or picture.step is None


@given(VIEWS)
def test_events_fit_the_api(picture: View) -> None:
    for item in news({}, report(picture).conditions):
        body = event(item, key=Key("ns", "demo"), uid="u", reporter="r" * 300, at="t")
        assert len(body["note"]) <= 1024
        assert len(body["reportingInstance"]) <= 128
        assert body == event(item, key=Key("ns", "demo"), uid="u", reporter="r" * 300, at="t")
