"""One object applied becomes everything that it needs, in few requests, and then nothing is written any more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.apiserver.rig import World
from tests.kube.rest import Json
from tests.model_documents import changed, minimal, p5en

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.yaml"))
STEADY = 4.0


def pinned(name: str = "demo", *, prefill: int = 1, decode: int = 1) -> Json:
    """A CPU model with fixed replicas."""
    return changed(minimal(name), {"spec/prefill/replicas": prefill, "spec/decode/replicas": decode})


def test_everything_is_made_owned_and_marked(world: World) -> None:
    operator = world.operator()
    model = world.create(pinned())
    status = world.settle(operator, "demo")
    revision = status["revision"]
    children = world.children()
    assert set(children) == {
        f"statefulsets/demo-prefill-{revision}",
        f"statefulsets/demo-decode-{revision}",
        f"services/demo-prefill-{revision}",
        f"services/demo-decode-{revision}",
        "services/demo",
        "serviceaccounts/demo-engine",
        "secrets/demo-peer-token",
        "networkpolicies/demo-prefill",
        "networkpolicies/demo-decode",
        "modelroles/demo-prefill",
        "modelroles/demo-decode",
    }
    for child in children.values():
        owner = child["metadata"]["ownerReferences"]
        assert [(one["uid"], one["controller"]) for one in owner] == [(model["metadata"]["uid"], True)]
        assert "finalizers" not in child["metadata"]
    assert "finalizers" not in world.api.get(f"{world.models}/demo")["metadata"]
    assert "annotations" not in world.api.get(f"{world.models}/demo")["metadata"]


def test_creation_takes_at_most_sixteen_requests(world: World) -> None:
    operator = world.operator()
    since = world.cp.audit.position()
    world.create(pinned())
    world.settle(operator, "demo")
    asked = [
        f"{one.verb} {one.resource} {one.name}"
        for one in world.cp.audit.requests(since=since, user=world.user)
        if one.resource != "leases" and one.verb != "watch"
    ]
    assert len(asked) <= 16, asked


def test_steady_state_and_restart_write_nothing(world: World) -> None:
    first = world.operator(resync=1.0)
    world.create(pinned("a", prefill=2, decode=2))
    world.create(pinned("b"))
    for name in "ab":
        world.settle(first, name)
    since = world.cp.audit.position()
    time.sleep(STEADY)
    assert world.writes(since) == []
    first.stop()
    second = world.operator(resync=1.0)
    for name in "ab":
        world.settle(second, name)
    time.sleep(STEADY)
    assert world.writes(since) == []
    count = second.running.metrics.registry.get_sample_value("prebook_reconciliations_total", {"result": "ok"})
    assert count is not None
    assert count >= 4, "it did look, and more than once"


def test_another_operator_image_touches_no_child(world: World) -> None:
    first = world.operator()
    world.create(pinned())
    world.settle(first, "demo")
    first.stop()
    since = world.cp.audit.position()
    before = {name: one["metadata"]["uid"] for name, one in world.children().items()}
    second = world.operator(image="localhost/prebook:next", resync=1.0)
    world.settle(second, "demo")
    time.sleep(STEADY)
    assert world.writes(since) == []
    world.change("demo", {"prefill": {"replicas": 2}})
    world.settle(second, "demo")
    after = world.children()
    assert {name: after[name]["metadata"]["uid"] for name in before} == before
    (prefill,) = [one for name, one in after.items() if name.startswith("statefulsets/demo-prefill")]
    assert prefill["spec"]["replicas"] == 2
    (init,) = prefill["spec"]["template"]["spec"]["initContainers"]
    assert init["image"] == "localhost/prebook:test", "scaling an old set must not bring it a new pod template"


def examples() -> Iterator[tuple[str, Json]]:
    """The models of examples/, by file name."""
    for path in EXAMPLES:
        for document in yaml.safe_load_all(path.read_text()):
            if document["kind"] == "DisaggregatedModel":
                yield path.stem, document


VARIANTS = {
    "gpus-and-efa": p5en("v"),
    "dra": changed(
        p5en("v"), {"spec/hardware/devices": "DRA", "spec/hardware/dra": {"gpuDeviceClass": "gpu.nvidia.com"}}
    ),
    "awkward-quantities": changed(
        minimal("v"),
        {
            "spec/engine/sharedMemory": "1024Mi",
            "spec/model/cache": {"emptyDir": {"sizeLimit": "0.5Gi"}},
            "spec/prefill/template": {"engine": {"resources": {"requests": {"cpu": "1000m", "memory": "2048Mi"}}}},
        },
    ),
    "stock-pull": changed(minimal("v"), {"spec/transfer/connector": "NixlPull"}),
    "monitoring": changed(
        minimal("v"), {"spec/networkPolicy/monitoringNamespaces": ["prometheus"], "spec/prefill/replicas": 3}
    ),
    **{name: document for name, document in examples() if not document["spec"]["model"]["uri"].startswith("pkg://")},
}
"""Examples for the local runner name a model that no cluster can load."""


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_what_is_applied_reads_back_as_intended(world: World, name: str) -> None:
    """The digest of the intent equals the digest of our fields in the live object, for everything that can be
    rendered. Otherwise a restart would write."""
    document = VARIANTS[name]
    operator = world.operator()
    world.create(document)
    world.settle(operator, document["metadata"]["name"])
    operator.stop()
    since = world.cp.audit.position()
    again = world.operator()
    world.settle(again, document["metadata"]["name"])
    time.sleep(1.0)
    assert world.writes(since) == []
    # A pod template that reads back differently is looked at, and only then left alone.
    looks = [one for one in world.cp.audit.requests(since=since, user=world.user) if one.verb == "get"]
    assert [one.resource for one in looks if one.resource == "statefulsets"] == []
