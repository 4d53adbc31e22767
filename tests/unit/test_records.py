"""From raw objects to records: what is kept, and that nothing strange in an object stops the watch."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from prebook_operator.handlers import seen_of
from prebook_operator.kube.resources import MODEL, MODEL_ROLE, NODE, POD, SERVICE, STATEFUL_SET
from prebook_operator.records import (
    TEXT_LIMIT,
    Key,
    child_record,
    identity_of,
    key_of_child,
    model_record,
    pod_record,
    telling,
)


def metadata(name: str = "demo-decode-abc", **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": "ns",
        "uid": "u",
        "resourceVersion": "42",
        "labels": {"prebook.dev/model": "demo", "prebook.dev/role": "edited", "prebook.dev/revision": "edited"},
        "ownerReferences": [{"uid": "other"}, {"uid": "owner", "controller": True}],
        **more,
    }


def test_a_set() -> None:
    raw = {
        "metadata": metadata(generation=3),
        "spec": {"replicas": 2},
        "status": {"observedGeneration": 2, "replicas": 2, "readyReplicas": 1},
    }
    record = child_record(raw, STATEFUL_SET)
    assert (record.owner, record.role, record.revision, record.version) == ("owner", "decode", "abc", 42)
    assert record.counts is not None
    assert (record.counts.desired, record.counts.ready, record.counts.current) == (2, 1, False)
    assert record.owned is None, "never applied by us"


def test_services_roles_and_models() -> None:
    service = {"metadata": metadata(), "spec": {"selector": {"prebook.dev/revision": "abc"}}}
    assert child_record(service, SERVICE).selects == "abc"
    role = {"metadata": metadata(generation=4), "spec": {"replicas": 0}, "status": {"replicas": 1}}
    assert child_record(role, MODEL_ROLE).role_replicas == 0
    model = {"metadata": {**metadata("demo"), "generation": 7, "deletionTimestamp": "now"}, "spec": {"b": 1, "a": 2}}
    record = model_record(model)
    assert (record.key, record.generation, record.deleting) == (Key("ns", "demo"), 7, True)
    assert record.parsed_spec() == {"a": 2, "b": 1}
    assert record.parsed_status() == {}


def pod(**status: Any) -> dict[str, Any]:
    return {"metadata": metadata("demo-decode-abc-0"), "status": status}


def container(state: dict[str, Any], last: dict[str, Any] | None = None, restarts: int = 0) -> dict[str, Any]:
    return {"name": "engine", "state": state, "lastState": last or {}, "restartCount": restarts}


@pytest.mark.parametrize(
    ("status", "trouble", "detail"),
    [
        ({"containerStatuses": [container({"waiting": {"reason": "ContainerCreating"}})]}, "", ""),
        (
            {"containerStatuses": [container({"waiting": {"reason": "ImagePullBackOff", "message": "no tag"}})]},
            "ImagePullBackOff",
            "no tag",
        ),
        (
            {
                "containerStatuses": [
                    container(
                        {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
                        {"terminated": {"exitCode": 1, "message": "out of memory"}},
                    )
                ]
            },
            "CrashLoopBackOff",
            "out of memory",
        ),
        ({"containerStatuses": [container({"terminated": {"exitCode": 0, "reason": "Completed"}})]}, "", ""),
        (
            {"containerStatuses": [container({"terminated": {"exitCode": 137, "reason": "OOMKilled"}})]},
            "OOMKilled",
            "exit code 137",
        ),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3"}]},
            "Unschedulable",
            "0/3",
        ),
        ({}, "", ""),
    ],
)
def test_trouble_of_a_pod(status: dict[str, Any], trouble: str, detail: str) -> None:
    record = pod_record(pod(**status))
    assert (record.trouble, record.detail) == (trouble, detail)


@pytest.mark.parametrize(
    ("name", "identity"),
    [
        ("demo-prefill-1f2e3d4c", ("prefill", "1f2e3d4c")),
        ("demo-decode", ("decode", "")),
        ("demo", ("", "")),
        ("demo-engine", ("", "")),
        ("other-decode-1f2e3d4c", ("", "")),
    ],
)
def test_identity_comes_from_the_name_which_nobody_can_edit(name: str, identity: tuple[str, str]) -> None:
    assert identity_of(name, "demo") == identity
    if identity[1]:
        found = pod_record({"metadata": metadata(f"{name}-0"), "status": {}})
        assert (found.role, found.revision) == identity


def test_a_long_termination_message_is_reduced_to_what_tells() -> None:
    log = "\n".join(
        ["INFO starting"] * 200
        + ["RuntimeError: vLLM 0.31.0 is installed, this Prebook connector supports 0.32.0"]
        + ["RuntimeError: Engine core failed"] * 30
    )
    assert telling(log).startswith("RuntimeError: vLLM 0.31.0")
    assert telling("x" * 5000 + " the reason").endswith("the reason")
    assert len(telling("x" * 5000)) == TEXT_LIMIT


def test_a_record_is_small() -> None:
    raw = {
        "metadata": metadata(managedFields=[{"fieldsV1": {f"f:{index}": {} for index in range(500)}}]),
        "spec": {"template": {"spec": {"containers": [{"env": [{"name": str(index)} for index in range(500)]}]}}},
        "status": {},
    }
    record = child_record(raw, STATEFUL_SET)
    held = sum(sys.getsizeof(getattr(record, name)) for name in record.__slots__) + sys.getsizeof(record)
    assert held < 2000


def test_what_belongs_to_no_model_is_left_out() -> None:
    raw = {"metadata": {"name": "x", "namespace": "ns", "uid": "u", "labels": {}}}
    assert key_of_child(raw) is None
    assert seen_of(POD, {"type": "ADDED", "object": raw}) is None


def test_events_become_seen() -> None:
    model = {"metadata": metadata("demo"), "spec": {}}
    listed = seen_of(MODEL, {"type": None, "object": model})
    assert listed is not None
    assert (listed.owner, listed.listed, listed.deleted) == (Key("ns", "demo"), True, False)
    gone = seen_of(SERVICE, {"type": "DELETED", "object": {"metadata": metadata()}})
    assert gone is not None
    assert (gone.owner, gone.deleted) == (Key("ns", "demo"), True)
    node = seen_of(NODE, {"type": "MODIFIED", "object": {"metadata": {"name": "n", "labels": {}}}})
    assert node is not None
    assert node.owner is None
