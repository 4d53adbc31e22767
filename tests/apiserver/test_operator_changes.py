"""What a user changes: revisions, numbers, mistakes. A new revision takes over only when it can serve; a mistake
disturbs nothing."""

from __future__ import annotations

import pytest

from tests.apiserver.rig import OperatorThread, World
from tests.apiserver.test_operator_create import pinned
from tests.kube.controlplane import ControlPlane, wait_for
from tests.kube.fakenodes import P5EN, PLAIN, FakeKubelet, add_node
from tests.model_documents import changed, minimal, p5en


def serving(world: World, kubelet: FakeKubelet, operator: OperatorThread, name: str = "demo") -> str:
    """Brings a model with one pod per role to Ready; returns its revision."""
    revision = str(world.settle(operator, name)["revision"])
    ready(world, kubelet, revision)
    world.engines.paired(1, 1)
    world.wait_condition(name, "Ready", "True", "Serving")
    return revision


def ready(world: World, kubelet: FakeKubelet, revision: str, *, pods: int = 2) -> None:
    """Marks all pods of a revision ready, with the engines' address."""
    selector = f"prebook.dev/revision={revision}"
    wait_for("the pods", lambda: len(kubelet.pods(selector)) == pods, seconds=60)
    for pod in kubelet.pods(selector):
        kubelet.mark(pod["metadata"]["name"], ip="127.0.0.1")


@pytest.fixture
def node(fake_nodes: ControlPlane, namespace: str) -> str:
    """A node without devices."""
    name = f"plain-{namespace}"[:60].rstrip("-")
    add_node(fake_nodes.api, name, shape=PLAIN, zone="us-east-1a")
    return name


def test_ready_only_when_the_pods_say_that_they_are_paired(world: World, fake_kubelet: FakeKubelet, node: str) -> None:
    operator = world.operator()
    world.create(pinned())
    revision = str(world.settle(operator, "demo")["revision"])
    world.engines.paired(0, 1)
    ready(world, fake_kubelet, revision)
    world.wait_condition("demo", "Available", "True")
    assert world.wait_condition("demo", "PairsReady", "False", "Pairing")["message"].startswith("0 of 1 pairs")
    assert world.condition("demo", "Ready")["status"] == "False"
    world.engines.paired(1, 1)
    world.wait_condition("demo", "Ready", "True", "Serving")
    status = world.status("demo")
    assert status["pairs"] == {"ready": 1, "possible": 1, "summary": "1/1"}
    assert (status["prefillSummary"], status["decodeSummary"]) == ("1/1", "1/1")
    assert world.condition("demo", "Reconciling")["status"] == "False"


def test_a_new_revision_takes_over_only_when_it_can_serve(world: World, fake_kubelet: FakeKubelet, node: str) -> None:
    operator = world.operator()
    world.create(pinned())
    old = serving(world, fake_kubelet, operator)
    world.change("demo", {"engine": {"args": ["--max-model-len=1024"]}})
    wait_for("sets of both revisions", lambda: len(world.sets()) == 4, seconds=60)
    world.settle(operator, "demo")
    new = str(world.status("demo")["revision"])
    assert new != old
    assert world.front("demo") == old, "nothing is ready yet: clients stay where they are"
    condition = world.condition("demo", "Ready")
    assert condition["status"] == "False"
    assert condition["observedGeneration"] == 2
    assert world.condition("demo", "Available")["status"] == "True"
    assert world.status("demo")["previousRevision"] == old
    ready(world, fake_kubelet, new)
    wait_for("the front Service to follow", lambda: world.front("demo") == new, seconds=60)
    wait_for("the old sets to go", lambda: all(new in name for name in world.sets()), seconds=60)
    fake_kubelet.finish_deletions()
    world.wait_condition("demo", "Ready", "True", "Serving")
    assert "previousRevision" not in world.status("demo")
    assert all(old not in name for name in world.children())


def test_a_broken_revision_costs_nothing_and_the_way_back_is_open(
    world: World, fake_kubelet: FakeKubelet, node: str
) -> None:
    operator = world.operator()
    world.create(pinned())
    good = serving(world, fake_kubelet, operator)
    world.change("demo", {"engine": {"image": "vllm/vllm-openai:no-such-tag"}})
    wait_for("sets of both revisions", lambda: len(world.sets()) == 4, seconds=60)
    bad = str(world.settle(operator, "demo")["revision"])
    for pod in fake_kubelet.pods(f"prebook.dev/revision={bad}"):
        fake_kubelet.mark_waiting(pod["metadata"]["name"], reason="ImagePullBackOff", message="no such tag")
    condition = world.wait_condition("demo", "Ready", "False", "ImagePullFailed")
    assert "no such tag" in condition["message"]
    assert "spec.engine.image" in condition["message"]
    assert world.condition("demo", "Available")["status"] == "True"
    assert world.front("demo") == good
    world.change("demo", {"engine": {"image": "vllm/vllm-openai:v0.32.0"}})
    world.wait_condition("demo", "Ready", "True", "Serving")
    assert world.front("demo") == good
    wait_for("the broken sets to go", lambda: all(good in name for name in world.sets()), seconds=60)


def test_paused_keeps_the_running_revision(world: World, fake_kubelet: FakeKubelet, node: str) -> None:
    operator = world.operator()
    world.create(pinned())
    old = serving(world, fake_kubelet, operator)
    world.change("demo", {"rollout": {"paused": True}, "engine": {"args": ["--max-model-len=1024"]}})
    world.wait_condition("demo", "Ready", "False", "Paused")
    assert all(old in name for name in world.sets())
    assert world.condition("demo", "Available")["status"] == "True"
    world.change("demo", {"rollout": {"paused": False}})
    wait_for("the new sets", lambda: len(world.sets()) == 4, seconds=60)


def test_scaling_changes_numbers_and_nothing_else(world: World, fake_kubelet: FakeKubelet, node: str) -> None:
    operator = world.operator()
    world.create(minimal("demo"))
    revision = serving(world, fake_kubelet, operator)
    role = f"/apis/prebook.dev/v1alpha1/namespaces/{world.namespace}/modelroles/demo-decode"
    assert world.api.get(f"{role}/scale")["status"]["replicas"] == 1
    assert world.api.get(f"{role}/scale")["status"]["selector"] == "prebook.dev/model=demo,prebook.dev/role=decode"
    world.api.merge(f"{role}/scale", {"spec": {"replicas": 3}})
    decode = f"/apis/apps/v1/namespaces/{world.namespace}/statefulsets/demo-decode-{revision}"
    wait_for("three decode engines", lambda: world.api.get(decode)["spec"]["replicas"] == 3, seconds=60)
    wait_for("a budget for three", lambda: "poddisruptionbudgets/demo-decode" in world.children(), seconds=60)
    assert world.api.get(role)["spec"]["replicas"] == 3, "the number is the scaler's"
    world.api.merge(f"{role}/scale", {"spec": {"replicas": 1}})
    wait_for("the budget to go", lambda: "poddisruptionbudgets/demo-decode" not in world.children(), seconds=60)


def test_a_mistake_is_a_condition_and_disturbs_nothing(world: World, fake_kubelet: FakeKubelet, node: str) -> None:
    operator = world.operator()
    world.create(pinned())
    serving(world, fake_kubelet, operator)
    before = {name: one["metadata"]["resourceVersion"] for name, one in world.children().items()}
    world.change("demo", {"model": {"cache": {"hostPath": "/mnt/models"}}})
    condition = world.wait_condition("demo", "Stalled", "True", "InvalidSpec")
    assert "spec.model.cache.hostPath" in condition["message"]
    assert "--allow-host-path" in condition["message"]
    assert world.condition("demo", "Available")["status"] == "True"
    after = {name: one["metadata"]["resourceVersion"] for name, one in world.children().items()}
    sets_and_services = [name for name in before if name.startswith(("statefulsets", "services/"))]
    assert {name: after[name] for name in sets_and_services} == {name: before[name] for name in sets_and_services}
    since = world.cp.audit.position()
    operator.call(lambda running: running.queue.add(world.key("demo")))
    wait_for("another look", operator.idle, seconds=30)
    assert world.writes(since) == [], "a mistake is not retried"
    world.change("demo", {"model": {"cache": None}})
    world.wait_condition("demo", "Ready", "True", "Serving")
    assert world.condition("demo", "Stalled")["status"] == "False"


def test_fabric_says_what_is_missing_and_what_to_do(world: World, fake_nodes: ControlPlane) -> None:
    since_no_nodes = world.operator()
    world.create(p5en())
    world.settle(since_no_nodes, "qwen3-32b")
    condition = world.condition("qwen3-32b", "FabricReady")
    # The rules of a namespaced operator do not reach nodes, and it says so.
    assert (condition["status"], condition["reason"]) == ("Unknown", "NodesUnknown")
    assert "rbac.nodeReader=Always" in condition["message"]


def test_fabric_is_read_from_the_nodes(world: World, fake_nodes: ControlPlane) -> None:
    operator = world.operator(kubeconfig=world.cp.kubeconfig)
    world.create(p5en())
    world.settle(operator, "qwen3-32b")
    assert world.wait_condition("qwen3-32b", "FabricReady", "False", "NoMatchingNodes")
    assert world.wait_condition("qwen3-32b", "Ready", "False", "NoMatchingNodes")
    add_node(fake_nodes.api, "p5en-1", shape=P5EN, zone="us-east-1a")
    add_node(fake_nodes.api, "p5en-2", shape=P5EN, zone="us-east-1a")
    condition = world.wait_condition("qwen3-32b", "FabricReady", "True", "FabricAvailable")
    assert "us-east-1a" in condition["message"]


def test_engine_incompatibility_comes_from_the_termination_message(
    world: World, fake_kubelet: FakeKubelet, node: str
) -> None:
    operator = world.operator()
    world.create(pinned())
    world.settle(operator, "demo")
    (pod,) = fake_kubelet.pods("prebook.dev/role=decode")
    fake_kubelet.mark_terminated(
        pod["metadata"]["name"],
        exit_code=1,
        message="RuntimeError: vLLM 0.31.0 is installed, this Prebook connector supports 0.32.0",
    )
    condition = world.wait_condition("demo", "Stalled", "True", "EngineIncompatible")
    assert "vLLM 0.31.0" in condition["message"]


def test_events_tell_once(world: World, fake_kubelet: FakeKubelet, node: str) -> None:
    operator = world.operator()
    world.create(changed(pinned(), {"spec/model/cache": {"hostPath": "/mnt"}}))
    world.wait_condition("demo", "Stalled", "True", "InvalidSpec")
    operator.stop()
    world.operator(lease_name="second")
    world.change("demo", {"model": {"cache": None}})
    world.wait_condition("demo", "Stalled", "False")
    world.change("demo", {"model": {"cache": {"hostPath": "/mnt"}}})
    world.wait_condition("demo", "Stalled", "True", "InvalidSpec")
    events = world.api.items(f"/apis/events.k8s.io/v1/namespaces/{world.namespace}/events")
    told = [one for one in events if one["reason"] == "InvalidSpec"]
    assert len(told) == 1, told
    assert told[0]["regarding"]["name"] == "demo"
    assert told[0]["type"] == "Warning"
