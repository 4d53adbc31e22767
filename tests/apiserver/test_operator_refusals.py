"""Pods that the API server refuses: the condition says why and what to do, and follows when it is mended."""

from __future__ import annotations

from tests.apiserver.rig import World
from tests.apiserver.test_operator_create import pinned
from tests.kube.controlplane import wait_for
from tests.model_documents import changed, p5en


def events(world: World, name: str) -> set[str]:
    """Reasons of the Events about a model."""
    path = f"/apis/events.k8s.io/v1/namespaces/{world.namespace}/events"
    return {one["reason"] for one in world.api.items(path) if one["regarding"].get("name") == name}


def test_a_quota_is_named_until_it_is_raised(world: World) -> None:
    quotas = f"/api/v1/namespaces/{world.namespace}/resourcequotas"
    world.api.create(quotas, {"metadata": {"name": "tight"}, "spec": {"hard": {"pods": "1"}}})
    wait_for("the quota to hold", lambda: bool(world.api.get(f"{quotas}/tight").get("status")), seconds=30)
    world.operator()
    world.create(pinned())
    message = world.wait_condition("demo", "Ready", "False", "QuotaExceeded")["message"]
    assert "exceeded quota: tight" in message
    assert "raise that ResourceQuota" in message
    assert world.condition("demo", "Progressing")["reason"] == "QuotaExceeded"
    assert world.condition("demo", "Stalled")["status"] == "False", "Kubernetes goes on trying"
    wait_for("the Event", lambda: "QuotaExceeded" in events(world, "demo"), seconds=10)
    world.api.merge(f"{quotas}/tight", {"spec": {"hard": {"pods": "10"}}})
    # The StatefulSet controller backs off for longer and longer; a look at the set makes it try at once.
    for name in world.sets():
        path = f"/apis/apps/v1/namespaces/{world.namespace}/statefulsets/{name}"
        world.api.merge(path, {"metadata": {"annotations": {"example.org/nudge": "1"}}})
    wait_for(
        "the quota to be out of the report",
        lambda: world.condition("demo", "Ready").get("reason") != "QuotaExceeded",
        seconds=60,
    )


def test_pod_security_says_which_label_helps(world: World) -> None:
    world.api.merge(
        f"/api/v1/namespaces/{world.namespace}",
        {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}},
    )
    world.operator()
    world.create(p5en("demo"))
    message = world.wait_condition("demo", "Ready", "False", "PodSecurityViolation")["message"]
    assert "IPC_LOCK" in message
    assert "pod-security.kubernetes.io/enforce=privileged" in message


def test_a_refused_set_says_so_too(world: World) -> None:
    quotas = f"/api/v1/namespaces/{world.namespace}/resourcequotas"
    world.api.create(quotas, {"metadata": {"name": "sets"}, "spec": {"hard": {"count/statefulsets.apps": "1"}}})
    wait_for("the quota to hold", lambda: bool(world.api.get(f"{quotas}/sets").get("status")), seconds=30)
    world.operator()
    world.create(changed(pinned(), {"spec/networkPolicy": {"enabled": False}}))
    message = world.wait_condition("demo", "Ready", "False", "QuotaExceeded")["message"]
    assert "refuses StatefulSet demo-" in message
    assert "raise that ResourceQuota" in message
