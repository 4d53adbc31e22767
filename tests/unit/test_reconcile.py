"""The reconciler, fuzzed: whatever happens in whatever order, it ends where a creation from nothing ends, and then
writes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prebook_operator.execute import Outcome
from prebook_operator.kube.errors import RetryLater
from prebook_operator.kube.transport import Request, Response
from tests.model_documents import changed, minimal
from tests.unit.fake_api import respond
from tests.unit.fake_cluster import MODEL_PATH, FakeCluster, FakeOperator


def spec(context: int = 1024, prefill: int = 1, decode: int = 1, policy: bool = True) -> dict[str, Any]:
    """A model's spec; `context` decides the revision."""
    document = changed(
        minimal(),
        {
            "spec/engine/args": [f"--max-model-len={context}"],
            "spec/prefill/replicas": prefill,
            "spec/decode/replicas": decode,
            "spec/networkPolicy": {"enabled": policy},
        },
    )
    return dict(document["spec"])


SPECS = st.builds(spec, st.sampled_from([1024, 2048]), st.integers(0, 2), st.integers(0, 2), st.booleans())


def contents(cluster: FakeCluster) -> dict[str, Any]:
    """What children say, without identities."""
    model_uid = cluster.objects[MODEL_PATH]["metadata"]["uid"]
    return {
        path: {
            "labels": one["metadata"]["labels"],
            "spec": one.get("spec"),
            "ours": one["metadata"]["ownerReferences"][0]["uid"] == model_uid,
        }
        for path, one in cluster.children().items()
    }


async def from_nothing(wanted: dict[str, Any]) -> dict[str, Any]:
    cluster = FakeCluster()
    cluster.put_model(wanted)
    await FakeOperator(cluster).settle()
    return contents(cluster)


def conditions(cluster: FakeCluster) -> dict[str, str]:
    status = cluster.objects[MODEL_PATH]["status"]
    return {one["type"]: one["status"] for one in status["conditions"]}


async def test_a_creation_is_complete_and_ready() -> None:
    cluster = FakeCluster()
    cluster.put_model(spec())
    await FakeOperator(cluster).settle()
    assert len(cluster.children()) == 10
    assert conditions(cluster)["Ready"] == "True"


async def test_a_spec_that_changes_meanwhile_is_not_reported_as_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was decided for the old spec must not be told under the new generation."""
    cluster = FakeCluster()
    cluster.put_model(spec())
    operator = FakeOperator(cluster)
    await operator.settle()
    run = operator.executor.run

    async def then_changed(*args: Any) -> Outcome:
        outcome = await run(*args)
        cluster.put_model(spec(context=2048))
        operator.watch()
        return outcome

    monkeypatch.setattr(operator.executor, "run", then_changed)
    await operator.look()
    status = cluster.objects[MODEL_PATH]["status"]
    assert (status["observedGeneration"], conditions(cluster)["Ready"]) == (1, "True")
    monkeypatch.setattr(operator.executor, "run", run)
    await operator.settle()
    assert cluster.objects[MODEL_PATH]["status"]["observedGeneration"] == 2
    assert conditions(cluster)["Ready"] == "True"


async def test_an_interrupted_creation_is_finished_by_the_next_operator() -> None:
    expected = await from_nothing(spec())
    for call in range(20):
        cluster = FakeCluster()
        cluster.put_model(spec())
        cluster.fail_at = call
        try:
            await FakeOperator(cluster).settle()
        except RetryLater:
            pass
        else:
            assert call >= 15, "a creation takes 15 writes, and one was to fail"
        cluster.fail_at = None
        await FakeOperator(cluster).settle()
        assert contents(cluster) == expected, f"died at call {call}"


async def test_the_token_is_made_once_and_never_written_again() -> None:
    cluster = FakeCluster()
    cluster.put_model(spec())
    await FakeOperator(cluster).settle()
    (secret,) = [one for path, one in cluster.objects.items() if "/secrets/" in path]
    token = secret["stringData"]["token"]
    assert len(token) >= 32
    cluster.put_model(spec(context=4096))
    await FakeOperator(cluster).settle()
    (after,) = [one for path, one in cluster.objects.items() if "/secrets/" in path]
    assert after["stringData"]["token"] == token
    assert not any(token in str(one) for path, one in cluster.objects.items() if "/secrets/" not in path)


EVENTS = st.one_of(
    st.tuples(st.just("spec"), SPECS),
    st.tuples(st.just("delete"), st.integers(0, 30)),
    st.tuples(st.just("steal"), st.integers(0, 30)),
    st.tuples(st.just("look"), st.integers(1, 3)),
    st.tuples(st.just("die"), st.integers(0, 12)),
)


@settings(max_examples=25, deadline=None)
@given(SPECS, st.lists(EVENTS, max_size=8))
async def test_any_history_ends_in_the_same_state_and_in_silence(
    first: dict[str, Any], history: list[tuple[str, Any]]
) -> None:
    cluster = FakeCluster()
    cluster.put_model(first)
    wanted = first
    operator = FakeOperator(cluster)
    for what, value in history:
        if what == "spec":
            wanted = value
            cluster.put_model(value)
        elif what == "delete" and (paths := sorted(cluster.children())):
            del cluster.objects[paths[value % len(paths)]]
        elif what == "steal" and (paths := sorted(cluster.children())):
            # Somebody's update takes a field from us: it leaves our share, unless it has left before.
            victim = cluster.objects[paths[value % len(paths)]]
            stolen = max(name for name in victim["metadata"]["labels"] if name != "prebook.dev/model")
            victim["metadata"]["labels"][stolen] = "stolen"
            victim["metadata"]["managedFields"][0]["fieldsV1"]["f:metadata"]["f:labels"].pop(f"f:{stolen}", None)
            victim["metadata"]["resourceVersion"] = str(int(victim["metadata"]["resourceVersion"]) + 1)
        elif what == "look":
            for _ in range(value):
                await operator.look()
        elif what == "die":
            cluster.fail_at = value
            try:
                await operator.settle()
            except RetryLater:
                operator = FakeOperator(cluster)
            cluster.fail_at = None
    await operator.settle()
    assert contents(cluster) == await from_nothing(wanted)
    assert conditions(cluster)["Stalled"] == "False"
    before = len(cluster.writes)
    again = FakeOperator(cluster)
    await again.look()
    await again.look()
    assert cluster.writes[before:] == []


@pytest.mark.parametrize("broken", [{"model": {"uri": "nonsense"}}, {}, {"model": None}, {"engine": {"image": 7}}])
async def test_no_spec_is_too_broken_for_a_report(broken: dict[str, Any]) -> None:
    cluster = FakeCluster()
    cluster.put_model(spec())
    await FakeOperator(cluster).settle()
    before = contents(cluster)
    cluster.put_model(broken)
    operator = FakeOperator(cluster)
    await operator.settle()
    assert conditions(cluster)["Stalled"] == "True"
    assert contents(cluster) == before


async def test_a_server_that_does_not_create_on_our_precondition_gets_a_plain_apply_after_a_look() -> None:
    class Stubborn(FakeCluster):
        def _apply(self, request: Request) -> Response:
            absent = request.path not in self.objects and not request.path.endswith("/status")
            if absent and "resourceVersion" in request.body["metadata"]:  # type: ignore[index]
                return respond(409, {"message": "no existing object was found"})
            return super()._apply(request)

    cluster = Stubborn()
    cluster.put_model(spec())
    await FakeOperator(cluster).settle()
    assert contents(cluster) == await from_nothing(spec())


async def test_a_foreign_object_is_found_by_reading_and_left_alone() -> None:
    cluster = FakeCluster()
    path = "/api/v1/namespaces/ns/services/demo"
    theirs = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "demo", "namespace": "ns"}, "spec": {"a": 1}}
    cluster._keep(path, theirs, None)
    before = dict(cluster.objects[path])
    cluster.put_model(spec())
    await FakeOperator(cluster).settle()
    assert cluster.objects[path] == before
    status = cluster.objects[MODEL_PATH]["status"]["conditions"]
    assert [one["reason"] for one in status if one["type"] == "Stalled"] == ["ForeignObject"]
    assert sum(1 for one in cluster.writes if one == f"PATCH {path}") == 1, "it is tried once and then only read"
