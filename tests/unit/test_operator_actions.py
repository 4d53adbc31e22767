"""From intents and records to writes: the steady state is the empty list, by property."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from prebook_operator.actions import Verb, agenda, digests_of
from prebook_operator.api import Role, load
from prebook_operator.kube.resources import resource_of
from prebook_operator.records import ChildRecord
from prebook_operator.render import Owner, cluster_context, render
from tests.model_documents import minimal, p5en

UID = "model-uid"


def intents(document: dict[str, Any] | None = None, **context: Any) -> list[dict[str, Any]]:
    """Everything that a model renders to, but the Secret, which is no child of the agenda."""
    ctx = cluster_context("ns", operator_image="image", owner=Owner(uid=UID, name="demo"), **context)
    return render(load(document or minimal()), ctx)


def record(intent: dict[str, Any], *, owner: str = UID, **changes: Any) -> ChildRecord:
    """The record of an object that is exactly as intended."""
    wanted = digests_of(intent)
    labels = intent["metadata"]["labels"]
    fields: dict[str, Any] = {
        "plural": resource_of(intent).plural,
        "name": intent["metadata"]["name"],
        "uid": "u",
        "version": 1,
        "generation": 1,
        "owner": owner,
        "deleting": False,
        "owned": wanted.owned,
        "template": wanted.template,
        "role": labels.get("prebook.dev/role", ""),
        "revision": labels.get("prebook.dev/revision", ""),
    }
    return ChildRecord(**{**fields, **changes})


def table(records: list[ChildRecord]) -> dict[tuple[str, str], ChildRecord]:
    return {(one.plural, one.name): one for one in records}


@given(st.sampled_from([minimal(), p5en()]), st.integers(0, 4), st.integers(0, 4))
def test_what_is_as_intended_is_not_written(document: dict[str, Any], prefill: int, decode: int) -> None:
    wanted = intents(document, replicas={Role.PREFILL: prefill, Role.DECODE: decode})
    plan = agenda(wanted, table([record(one) for one in wanted]), owner=UID, keep_revisions=())
    assert plan.actions == ()
    assert plan.foreign == ()


def test_what_is_absent_is_created_in_the_rendered_order() -> None:
    wanted = intents()
    plan = agenda(wanted, {}, owner=UID, keep_revisions=())
    assert [action.verb for action in plan.actions] == [Verb.CREATE] * len(wanted)
    assert [action.name for action in plan.actions] == [one["metadata"]["name"] for one in wanted]


@given(st.data())
def test_any_subset_needs_exactly_the_rest(data: st.DataObject) -> None:
    wanted = intents()
    present = data.draw(st.lists(st.sampled_from(range(len(wanted))), unique=True))
    plan = agenda(wanted, table([record(wanted[index]) for index in present]), owner=UID, keep_revisions=())
    assert len(plan.actions) == len(wanted) - len(present)


def test_foreign_objects_get_no_action() -> None:
    wanted = intents()
    plan = agenda(wanted, table([record(one, owner="other") for one in wanted]), owner=UID, keep_revisions=())
    assert plan.actions == ()
    assert len(plan.foreign) == len(wanted)


def test_a_changed_field_is_an_update_and_a_changed_template_is_looked_at() -> None:
    wanted = intents()
    changed = copy.deepcopy(wanted)
    sets = [one for one in changed if one["kind"] == "StatefulSet"]
    sets[0]["spec"]["replicas"] = 7
    sets[1]["spec"]["template"]["spec"]["initContainers"][0]["image"] = "next"
    plan = agenda(changed, table([record(one) for one in wanted]), owner=UID, keep_revisions=())
    assert [action.verb for action in plan.actions] == [Verb.UPDATE, Verb.CHECK_TEMPLATE]


def test_a_known_equivalence_needs_no_write() -> None:
    wanted = intents()
    odd = [record(one, owned=b"spelt differently") for one in wanted]
    equivalent = {(b"spelt differently", digests_of(one).owned) for one in wanted}
    assert agenda(wanted, table(odd), owner=UID, keep_revisions=(), equivalent=equivalent).actions == ()


def test_surplus_goes_unless_its_revision_is_kept() -> None:
    wanted = intents()
    other = [
        record(one, name=f"{one['metadata']['name']}x", revision="old")
        for one in wanted
        if one["kind"] == "StatefulSet"
    ]
    children = table([*(record(one) for one in wanted), *other])
    kept = agenda(wanted, children, owner=UID, keep_revisions={"old"})
    assert kept.actions == ()
    gone = agenda(wanted, children, owner=UID, keep_revisions=())
    assert [action.verb for action in gone.actions] == [Verb.DELETE, Verb.DELETE]
    foreign = table([record(wanted[0], name="theirs", owner="other")])
    assert all(action.verb is Verb.CREATE for action in agenda(wanted, foreign, owner=UID, keep_revisions=()).actions)


def test_what_is_being_deleted_is_waited_for() -> None:
    wanted = intents()
    children = table([record(one, deleting=True, owned=b"x") for one in wanted])
    assert agenda(wanted, children, owner=UID, keep_revisions=()).actions == ()
