"""The operator killed, doubled, refused, cut off: the same end state, and never two writers."""

from __future__ import annotations

import json
import time
from itertools import pairwise

from prebook_operator.kube.transport import Request, Response
from tests.apiserver.rig import Faulty, World
from tests.apiserver.test_operator_create import pinned
from tests.kube.controlplane import ControlPlane, Options, wait_for
from tests.kube.fixtures import new_namespace
from tests.kube.rest import Json

CALLS = 15
"""Writes of a creation: the first report, eleven children, the report, and those of two roles."""


def shape(world: World, name: str) -> dict[str, Json]:
    """What a model's children say, without what differs from one creation to the next."""
    children = {
        place: {"labels": one["metadata"]["labels"], "spec": {**one.get("spec", {}), "clusterIP": "", "clusterIPs": []}}
        for place, one in world.children().items()
        if one["metadata"]["labels"]["prebook.dev/model"] == name
    }
    # The name is part of the revision, through the name that the model is served under.
    revision = str(world.status(name)["revision"])
    text = json.dumps(children, sort_keys=True).replace(revision, "REVISION").replace(name, "NAME")
    return dict(json.loads(text))


def test_killed_at_any_call_the_end_is_the_same(world: World) -> None:
    """Each operator finishes what its predecessor left behind, and is then killed at the next call of the next
    creation. To the cluster, death after a call is death before the next one, so only the first is tried both ways."""
    operator = world.operator(lease_name="lease-0")
    world.create(pinned("undisturbed"))
    world.settle(operator, "undisturbed")
    expected = shape(world, "undisturbed")
    assert len(expected) == 11
    for death, (call, sent) in enumerate([(1, False), *((call, True) for call in range(1, CALLS + 1))]):
        wait_for("nothing to do", operator.idle, seconds=30)
        operator.transport.die_after_sending = sent
        operator.transport.die_at = len(operator.transport.sent) + call
        name = f"victim-{death}"
        world.create(pinned(name))
        wait_for(f"death at call {call}", operator.transport.dead.is_set, seconds=60)
        operator.kill()
        operator = world.operator(lease_name=f"lease-{death + 1}")
        world.settle(operator, name)
        wait_for("nothing to do", operator.idle, seconds=30)
        assert shape(world, name) == expected, f"killed {'after' if sent else 'before'} call {call}"
    since = world.cp.audit.position()
    time.sleep(3.0)
    assert world.writes(since) == []


def test_of_two_operators_one_writes_and_the_other_takes_over_at_once(world: World) -> None:
    first, second = world.operator(), world.operator()
    wait_for("a leader", lambda: first.leading() or second.leading(), seconds=30)
    leader, standby = (first, second) if first.leading() else (second, first)
    for index in range(4):
        world.create(pinned(f"m{index}"))
    for index in range(4):
        world.settle(leader, f"m{index}")
    assert standby.transport.sent == []
    assert not standby.leading()
    assert standby.call(lambda operator: operator._not_ready()) == "", "a standby is Ready"
    sent = len(leader.transport.sent)
    leader.stop()
    started = time.monotonic()
    world.create(pinned("after"))
    wait_for("the new leader's work", lambda: bool(world.status("after")), seconds=30)
    took = time.monotonic() - started
    world.settle(standby, "after")
    assert len(leader.transport.sent) == sent
    assert took < 3.0 + 1.0, f"{took:.1f} s after a clean hand-over: one look at the lease is due every second"
    written = {request.path.split("/")[-1] for request in standby.transport.sent}
    assert not any(name.startswith("m") and name[1].isdigit() for name in written), "nothing that was right was written"


def test_a_leader_that_dies_is_replaced_when_its_lease_runs_out(world: World) -> None:
    quick = {"lease_duration": 4.0, "lease_margin": 1.5, "lease_period": 0.5}
    first = world.operator(**quick)
    wait_for("a leader", first.leading, seconds=30)
    second = world.operator(**quick)
    first.kill()
    world.create(pinned())
    world.settle(second, "demo")
    assert second.leading()
    assert first.transport.sent == []


def test_too_many_requests_are_waited_out(world: World) -> None:
    refused: list[float] = []

    def busy(number: int, request: Request) -> Response | None:
        if number > 6 or "/events" in request.path:
            return None
        refused.append(time.monotonic())
        body = {"kind": "Status", "status": "Failure", "reason": "TooManyRequests", "code": 429, "message": "slow down"}
        return Response(status=429, headers={"Retry-After": "1"}, body=json.dumps(body).encode())

    def prepare(transport: Faulty) -> None:
        transport.fault = busy

    operator = world.operator(prepare=prepare)
    world.create(pinned())
    world.settle(operator, "demo")
    assert len(refused) == 6
    pauses = [later - earlier for earlier, later in pairwise(refused)]
    assert min(pauses) >= 0.95, f"Retry-After was not obeyed: {pauses}"
    assert len(world.sets()) == 2


def test_foreign_objects_of_the_same_name_are_left_alone(world: World) -> None:
    services = f"/api/v1/namespaces/{world.namespace}/services"
    secrets = f"/api/v1/namespaces/{world.namespace}/secrets"
    mine = world.api.create(
        services, {"metadata": {"name": "demo"}, "spec": {"ports": [{"port": 80}], "selector": {"app": "mine"}}}
    )
    token = world.api.create(secrets, {"metadata": {"name": "demo-peer-token"}, "stringData": {"token": "mine"}})
    operator = world.operator(resync=2.0)
    world.create(pinned())
    condition = world.wait_condition("demo", "Stalled", "True", "ForeignObject")
    assert "Service demo" in condition["message"]
    assert "Secret demo-peer-token" in condition["message"]
    wait_for("the rest to exist", lambda: len(world.sets()) == 2, seconds=30)
    wait_for("nothing to do", operator.idle, seconds=30)
    for path, before in ((f"{services}/demo", mine), (f"{secrets}/demo-peer-token", token)):
        assert world.api.get(path)["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    world.api.delete(f"{services}/demo")
    world.api.delete(f"{secrets}/demo-peer-token")
    world.wait_condition("demo", "Stalled", "False")
    wait_for("the Service", lambda: "services/demo" in world.children(), seconds=30)
    assert world.front("demo") == world.status("demo")["revision"]
    owners = world.api.get(f"{secrets}/demo-peer-token")["metadata"]["ownerReferences"]
    assert owners[0]["kind"] == "DisaggregatedModel"
    world.api.delete(f"{world.models}/demo")


def test_children_deleted_or_edited_by_hand_come_back(world: World) -> None:
    operator = world.operator()
    world.create(pinned())
    revision = world.settle(operator, "demo")["revision"]
    before = world.children()
    decode = f"/apis/apps/v1/namespaces/{world.namespace}/statefulsets/demo-decode-{revision}"
    for path in (
        decode,
        f"/api/v1/namespaces/{world.namespace}/services/demo",
        f"/api/v1/namespaces/{world.namespace}/serviceaccounts/demo-engine",
        f"/apis/networking.k8s.io/v1/namespaces/{world.namespace}/networkpolicies/demo-prefill",
        f"/apis/prebook.dev/v1alpha1/namespaces/{world.namespace}/modelroles/demo-prefill",
    ):
        world.api.delete(path)
    wait_for("everything to be back", lambda: set(world.children()) == set(before), seconds=60)
    world.settle(operator, "demo")
    # Edited, replaced, and forced by another manager: our fields come back, theirs stay.
    world.api.merge(f"{decode}", {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 1}}}})
    front = f"/api/v1/namespaces/{world.namespace}/services/demo"
    world.api.merge(front, {"spec": {"selector": {"prebook.dev/revision": "hijacked"}}})
    world.api.merge(front, {"metadata": {"labels": {"team": "mine"}}})
    policy = f"/apis/networking.k8s.io/v1/namespaces/{world.namespace}/networkpolicies/demo-decode"
    theirs = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "demo-decode"},
        "spec": {"policyTypes": ["Ingress", "Egress"]},
    }
    world.api.apply(policy, theirs, manager="somebody", force=True)

    def restored() -> bool:
        grace = world.api.get(decode)["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        return (
            grace > 1
            and world.front("demo") == revision
            and world.api.get(policy)["spec"]["policyTypes"] == ["Ingress"]
        )

    wait_for("our fields to be back", restored, seconds=60)
    assert world.api.get(front)["metadata"]["labels"]["team"] == "mine"
    time.sleep(3.0)  # the last echoes are reported
    since = world.cp.audit.position()
    time.sleep(3.0)
    assert world.writes(since) == [], "no fight goes on"


def test_replacing_the_model_with_itself_changes_nothing(world: World) -> None:
    operator = world.operator()
    world.create(pinned())
    world.settle(operator, "demo")
    model = world.api.get(f"{world.models}/demo")
    model["metadata"].pop("managedFields")
    since = world.cp.audit.position()
    world.api.text("PUT", f"{world.models}/demo", model)
    time.sleep(2.0)
    assert world.writes(since) == []


def test_a_gitops_tool_that_applies_again_and_again_finds_no_opponent(world: World) -> None:
    operator = world.operator()
    document = pinned()
    document["metadata"]["namespace"] = world.namespace
    path = f"{world.models}/demo"
    world.api.apply(path, document, manager="kustomize-controller", force=True)
    world.settle(operator, "demo")
    time.sleep(2.0)
    since = world.cp.audit.position()
    versions = set()
    for manager in ("kustomize-controller", "argocd-controller", "helm", "kustomize-controller"):
        world.api.apply(path, document, manager=manager, force=True)
        time.sleep(0.5)
        versions.add(world.api.get(path)["metadata"]["resourceVersion"])
    again = world.api.apply(path, document, manager="kustomize-controller", force=True)
    assert again["metadata"]["resourceVersion"] in versions, "a repeated apply changes nothing"
    assert again["metadata"]["generation"] == 1
    assert world.writes(since) == []


def test_a_model_deleted_during_its_creation_leaves_nothing(world: World) -> None:
    def slow(number: int, request: Request) -> Response | None:
        del request
        if number == 5:
            world.api.delete(f"{world.models}/demo")
        return None

    def prepare(transport: Faulty) -> None:
        transport.fault = slow

    operator = world.operator(prepare=prepare)
    world.create(pinned())
    wait_for("the creation to be half done", lambda: len(operator.transport.sent) >= 5, seconds=60)
    wait_for("the model to go", lambda: not world.api.exists(f"{world.models}/demo"), seconds=30)
    wait_for("the garbage collector", lambda: operator.idle() and not world.children(), seconds=90)


def test_with_the_operator_gone_a_model_and_its_namespace_can_be_deleted(
    prebook_api: ControlPlane, world: World
) -> None:
    operator = world.operator()
    world.create(pinned("one"))
    world.create(pinned("two"))
    world.settle(operator, "one")
    world.settle(operator, "two")
    operator.stop()
    world.api.delete(f"{world.models}/one", propagation="Foreground")
    wait_for("the model to go", lambda: not world.api.exists(f"{world.models}/one"), seconds=60)
    prebook_api.api.delete(f"/api/v1/namespaces/{world.namespace}")
    wait_for(
        "the namespace to go",
        lambda: not prebook_api.api.exists(f"/api/v1/namespaces/{world.namespace}"),
        seconds=120,
    )
    world.operators.clear()


def test_an_api_server_that_restarts_and_forgets_is_survived(engines: object) -> None:
    """Its watches break, and what they would resume from is compacted away (410): deletions in the gap must be
    noticed all the same."""
    from prebook_operator.api.crd import crds

    with ControlPlane(Options(audit=True)) as own:
        for crd in crds().values():
            own.api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        wait_for("the kinds", lambda: own.api.exists("/openapi/v3/apis/prebook.dev/v1alpha1"), seconds=30)
        world = World(own, new_namespace(own, "restart"), engines)  # type: ignore[arg-type]
        try:
            operator = world.operator()
            world.create(pinned())
            world.create(pinned("gone"))
            world.settle(operator, "demo")
            world.settle(operator, "gone")
            before = set(world.children())
            own.stop_apiserver()
            time.sleep(1.0)
            own.start_apiserver()
            world.api.delete(f"/api/v1/namespaces/{world.namespace}/services/demo")
            world.api.delete(f"{world.models}/gone")
            own.compact()
            expected = {name for name in before if "/gone" not in name}
            wait_for("the deleted Service to be back", lambda: set(world.children()) == expected, seconds=120)
            wait_for(
                "the deleted model to be forgotten",
                lambda: operator.call(lambda o: len(o.cache.models)) == 1,
                seconds=60,
            )
            world.create(pinned("new"))
            world.settle(operator, "new")
        finally:
            world.close()
