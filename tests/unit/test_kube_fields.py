"""The digest of an intent equals that of our share of the live object, and of nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prebook_operator.kube.fields import canonical, digest, intent_body, live_body, owned_fields, project


def live(spec: dict[str, Any], fields: dict[str, Any], **entry: Any) -> dict[str, Any]:
    """A live object with one managedFields entry of ours."""
    ours = {"manager": "prebook", "operation": "Apply", "fieldsV1": {"f:spec": fields}, **entry}
    theirs = {"manager": "kube-controller-manager", "operation": "Update", "fieldsV1": {"f:spec": {"f:extra": {}}}}
    return {
        "apiVersion": "v1",
        "kind": "Thing",
        "metadata": {"name": "a", "namespace": "b", "uid": "u", "managedFields": [theirs, ours]},
        "spec": spec,
    }


def intent(spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Thing", "metadata": {"name": "a", "namespace": "b"}, "spec": spec}


def same(spec: dict[str, Any], given_live: dict[str, Any]) -> bool:
    body = live_body(given_live)
    return body is not None and digest(body) == digest(intent_body(intent(spec)))


CONTAINER = {
    "f:containers": {
        'k:{"name":"engine"}': {
            ".": {},
            "f:name": {},
            "f:image": {},
            "f:resources": {"f:limits": {"f:memory": {}}},
            "f:ports": {'k:{"containerPort":8000,"protocol":"TCP"}': {".": {}, "f:containerPort": {}}},
        }
    }
}


def test_defaults_and_foreign_items_are_not_ours() -> None:
    wanted = {
        "containers": [
            {
                "name": "engine",
                "image": "i",
                "resources": {"limits": {"memory": "1024Mi"}},
                "ports": [{"containerPort": 8000}],
            }
        ]
    }
    stored = {
        "containers": [
            {"name": "sidecar", "image": "injected"},
            {
                "name": "engine",
                "image": "i",
                "imagePullPolicy": "IfNotPresent",
                "resources": {"limits": {"memory": "1Gi", "cpu": "2"}},
                "ports": [{"containerPort": 8000, "protocol": "TCP"}],
            },
        ],
        "extra": 1,
    }
    assert same(wanted, live(stored, CONTAINER))
    stored["containers"][1]["image"] = "other"  # type: ignore[index]
    assert not same(wanted, live(stored, CONTAINER))


def test_a_field_that_somebody_took_from_us_is_missing_from_our_share() -> None:
    assert same({"a": 1, "b": 2}, live({"a": 1, "b": 2}, {"f:a": {}, "f:b": {}}))
    assert not same({"a": 1, "b": 2}, live({"a": 1, "b": 2}, {"f:a": {}}))


def test_a_field_that_we_no_longer_want_is_noticed() -> None:
    assert not same({"a": 1}, live({"a": 1, "b": 2}, {"f:a": {}, "f:b": {}}))


def test_only_our_own_apply_entry_counts() -> None:
    fields = {"f:a": {}}
    assert owned_fields(live({"a": 1}, fields, operation="Update")) is None
    assert owned_fields(live({"a": 1}, fields, subresource="status")) is None
    assert owned_fields(live({"a": 1}, fields, manager="kubectl")) is None
    assert owned_fields({"metadata": {}}) is None


def test_sets_and_atomic_values() -> None:
    assert same({"tags": ["x"]}, live({"tags": ["w", "x"]}, {"f:tags": {'v:"x"': {}}}))
    assert same({"args": ["b", "a"]}, live({"args": ["b", "a"]}, {"f:args": {}}))
    assert not same({"args": ["a", "b"]}, live({"args": ["b", "a"]}, {"f:args": {}}))
    reference = {"fieldRef": {"fieldPath": "status.podIP"}}
    assert same(
        {"from": reference},
        live({"from": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}}, {"f:from": {}}),
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [("1Gi", "1024Mi"), ("500m", "0.5"), ("2", 2), ("1k", "1000"), ("1.50", "1500m")],
)
def test_a_quantity_has_one_digest_in_any_spelling(one: Any, other: Any) -> None:
    assert digest({"limits": {"memory": one}}) == digest({"limits": {"memory": other}})
    assert digest({"sizeLimit": one}) == digest({"sizeLimit": other})


def test_what_only_looks_like_a_quantity_is_compared_as_it_is() -> None:
    assert digest({"env": [{"name": "N", "value": "1024Mi"}]}) != digest({"env": [{"name": "N", "value": "1Gi"}]})


def test_an_empty_rule_in_a_list_is_not_an_absent_one() -> None:
    assert digest({"ingress": [{}]}) != digest({"ingress": []}), "allow all is not deny all"
    assert digest({"emptyDir": {}, "name": "x"}) == digest({"name": "x"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text("abc", max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(JSON)
def test_canonical_is_idempotent(value: Any) -> None:
    assert canonical(canonical(value)) == canonical(value)


@given(st.dictionaries(st.sampled_from("abcdef"), JSON, min_size=1))
def test_projecting_onto_all_fields_changes_nothing_and_onto_one_keeps_that_one(value: dict[str, Any]) -> None:
    assert project(value, {f"f:{name}": {} for name in value}) == value
    name = min(value)
    assert project(value, {f"f:{name}": {}}) == {name: value[name]}


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(), min_size=1), st.randoms())
def test_the_digest_does_not_depend_on_the_order_of_keys(value: dict[str, int], shuffle: Any) -> None:
    names = list(value)
    shuffle.shuffle(names)
    assert digest({name: value[name] for name in names}) == digest(value)
