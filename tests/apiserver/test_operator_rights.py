"""Every right that the table grants is used: what no scenario needs has no place in it."""

from __future__ import annotations

from typing import Any

from prebook_operator.api import load
from prebook_operator.api.crd import crds
from prebook_operator.kube.resources import resource_of
from prebook_operator.rbac import Reach, operator_rules
from prebook_operator.render import cluster_context, render
from tests.apiserver.podmonitors import pod_monitors
from tests.apiserver.rig import Engines, World
from tests.apiserver.test_operator_changes import ready
from tests.apiserver.test_operator_create import pinned
from tests.kube.audit import Request
from tests.kube.controlplane import ControlPlane, Options, wait_for
from tests.kube.fakenodes import FakeKubelet
from tests.kube.fixtures import new_namespace
from tests.kube.rest import Json
from tests.model_documents import changed, p5en

Right = tuple[str, str, str]
ADMISSION_ONLY: set[Right] = {("prebook.dev", "disaggregatedmodels/finalizers", "update")}
"""Checked by an admission plugin, never requested: see the last test."""


def granted() -> set[Right]:
    """The table, for what a namespaced operator gets."""
    return {
        (group, resource, verb)
        for rule in operator_rules(Reach.WATCHED, Reach.HOME)
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def rights(request: Request) -> set[Right]:
    """What a request needed. An apply that creates is authorized as a patch and as a creation."""
    verbs = {request.verb} | ({"create"} if request.verb == "patch" and request.status == 201 else set())
    return {(request.group, request.resource, verb) for verb in verbs}


def everything(name: str) -> Json:
    """A model that makes every kind."""
    return changed(
        p5en(name),
        {
            "spec/prefill/replicas": 2,
            "spec/decode/replicas": 2,
            "spec/hardware/devices": "DRA",
            "spec/monitoring": {"podMonitor": True},
        },
    )


def occupy(world: World, document: Json) -> None:
    """Objects of somebody else, under all the names that a model needs."""
    context = cluster_context(world.namespace, operator_image="x", has_pod_monitor=True, peer_token="t" * 32)
    for manifest in render(load(document), context):
        metadata = {"name": manifest["metadata"]["name"], "namespace": world.namespace}
        world.api.create(resource_of(manifest).path(namespace=world.namespace), {**manifest, "metadata": metadata})


def test_every_right_is_used(world: World, fake_kubelet: FakeKubelet) -> None:
    since = world.cp.audit.position()
    with pod_monitors(world.api):
        occupy(world, everything("taken"))
        operator = world.operator()
        world.create(everything("taken"))
        world.wait_condition("taken", "Ready", "False", "ForeignObject")
        world.create(everything("demo"))
        revision = str(world.settle(operator, "demo")["revision"])
        world.engines.paired(2, 2)
        ready(world, fake_kubelet, revision, pods=4)
        world.wait_condition("demo", "Ready", "True", "Serving")
        plain: dict[str, Any] = {
            "hardware": {"devices": "Plugin"},
            "prefill": {"replicas": 1},
            "decode": {"replicas": 1},
            "monitoring": {"podMonitor": False},
            "networkPolicy": {"enabled": False},
        }
        world.change("demo", plain)
        world.settle(operator, "demo")
        world.engines.paired(1, 1)
        ready(world, fake_kubelet, str(world.status("demo")["revision"]), pods=2)
        wait_for("the old revision to go", lambda: not any(revision in name for name in world.sets()), seconds=60)
        quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
        world.api.create(f"/api/v1/namespaces/{world.namespace}/resourcequotas", quota)
        world.create(pinned("refused"))
        world.wait_condition("refused", "Ready", "False", "QuotaExceeded")
        operator.stop()
    asked = world.cp.audit.requests(since=since, user=world.user)
    used = {right for request in asked if request.resource for right in rights(request)}
    assert granted() - used - ADMISSION_ONLY == set(), "granted, and not needed"
    refused = {(one.verb, one.resource, one.name) for one in asked if one.status == 403 and one.resource != "nodes"}
    assert refused == set(), "needed, and not granted"


def test_owner_references_that_block_deletion_pass_where_the_admission_plugin_checks_them(engines: Engines) -> None:
    enforced = ("--enable-admission-plugins=OwnerReferencesPermissionEnforcement",)
    with ControlPlane(Options(audit=True, scheduler=False, apiserver_args=enforced)) as own:
        for crd in crds().values():
            own.api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        wait_for("the kinds", lambda: own.api.exists("/openapi/v3/apis/prebook.dev/v1alpha1"), seconds=30)
        world = World(own, new_namespace(own, "owners"), engines)
        try:
            operator = world.operator()
            world.create(pinned())
            world.settle(operator, "demo")
            assert len(world.children()) == 11
            path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{world.namespace}/roles/operator"
            rules = [
                rule
                for rule in operator_rules(Reach.WATCHED, Reach.HOME)
                if "disaggregatedmodels/finalizers" not in rule["resources"]
            ]
            own.api.merge(path, {"rules": rules})
            world.create(pinned("without"))
            message = world.wait_condition("without", "Ready", "False", "APIError")["message"]
            assert "blockOwnerDeletion" in message, "without the right it does not work: the right is needed"
        finally:
            world.close()
