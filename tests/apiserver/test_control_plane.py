"""The control plane itself: that it is what the other tests take it for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hack.kube.binaries import asset, kubernetes_version
from tests.kube.controlplane import ControlPlane, Options, wait_for
from tests.kube.fakenodes import FakeKubelet, add_node
from tests.kube.fixtures import CONTROL_PLANE_PROGRAMS, new_namespace, require_binaries
from tests.kube.processes import ProcessFailed, Running
from tests.kube.rest import ApiError, Json

ROOT = Path(__file__).resolve().parents[2]


def stateful_set(name: str, *, replicas: int, gpus: int = 0, efa: int = 0) -> Json:
    """A StatefulSet whose pods ask for GPUs and EFA interfaces."""
    limits = {"nvidia.com/gpu": str(gpus), "vpc.amazonaws.com/efa": str(efa)} if gpus else {}
    container = {"name": "engine", "image": "nothing/runs:1", "resources": {"limits": limits}}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "serviceName": name,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": {"containers": [container]}},
        },
    }


def test_serves_the_pinned_version(control_plane: ControlPlane) -> None:
    if asset("kube-apiserver") is None:
        assert control_plane.api.get("/version")["gitVersion"] == kubernetes_version()


def test_service_account_has_only_its_own_rights(control_plane: ControlPlane, namespace: str) -> None:
    def made() -> bool:
        return control_plane.api.exists(f"/api/v1/namespaces/{namespace}/serviceaccounts/default")

    wait_for("the namespace's service account", made, seconds=30)
    config = control_plane.service_account_kubeconfig(namespace, "default")
    with pytest.raises(ProcessFailed, match="cannot list resource"):
        control_plane.kubectl("get", "pods", kubeconfig=config)


def test_stateful_set_is_scheduled_on_nodes_that_have_room(
    control_plane: ControlPlane, fake_nodes: ControlPlane, namespace: str, fake_kubelet: FakeKubelet
) -> None:
    add_node(fake_nodes.api, "p5en-1")
    control_plane.api.create(
        f"/apis/apps/v1/namespaces/{namespace}/statefulsets", stateful_set("engine", replicas=3, gpus=4, efa=8)
    )

    def bound() -> int:
        return sum("nodeName" in pod["spec"] for pod in fake_kubelet.pods("app=engine"))

    wait_for("two pods on the only node", lambda: len(fake_kubelet.pods()) == 3 and bound() == 2, seconds=60)
    add_node(fake_nodes.api, "p5en-2")
    wait_for("the third pod on the second node", lambda: bound() == 3, seconds=60)

    assert fake_kubelet.mark_all("app=engine") == 3

    def ready() -> bool:
        status = control_plane.api.get(f"/apis/apps/v1/namespaces/{namespace}/statefulsets/engine")["status"]
        return int(status.get("readyReplicas", 0)) == 3

    wait_for("the StatefulSet's own count", ready, seconds=30)


def test_deleting_a_namespace_deletes_what_is_in_it(control_plane: ControlPlane) -> None:
    name = new_namespace(control_plane, "deletion")
    control_plane.kubectl("create", "configmap", "something", "--namespace", name)
    control_plane.api.delete(f"/api/v1/namespaces/{name}")
    wait_for("the namespace's end", lambda: not control_plane.api.exists(f"/api/v1/namespaces/{name}"), seconds=60)


def test_audit_log_tells_reads_from_writes_and_who_made_them(control_plane: ControlPlane, namespace: str) -> None:
    before = control_plane.audit.position()
    control_plane.kubectl("create", "configmap", "counted", "--namespace", namespace)
    control_plane.kubectl("get", "configmap", "counted", "--namespace", namespace)
    mine = [request for request in control_plane.audit.requests(since=before) if request.name == "counted"]
    assert sorted(request.verb for request in mine if request.agent.startswith("kubectl")) == ["create", "get"]
    # By name: the controller manager publishes a ConfigMap of its own in every namespace, sooner or later.
    created = [request for request in control_plane.audit.writes(since=before) if request.name == "counted"]
    assert [(request.user, request.status) for request in created] == [("prebook-admin", 201)]


def test_a_watch_from_a_compacted_revision_ends_in_gone() -> None:
    """The case that every watching client has to survive: 410 after compaction and a restart of the API server."""
    require_binaries(*CONTROL_PLANE_PROGRAMS)
    with ControlPlane(Options(controller_manager=False, scheduler=False)) as cluster:
        old = cluster.api.get("/api/v1/configmaps")["metadata"]["resourceVersion"]
        for number in range(5):
            body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"made-{number}"}}
            cluster.api.create("/api/v1/namespaces/default/configmaps", body)
        assert cluster.compact() > int(old)
        cluster.restart_apiserver(kill=True)
        watch = {"watch": "true", "resourceVersion": old, "timeoutSeconds": "5"}
        try:
            answer = cluster.api.text("GET", "/api/v1/configmaps", query=watch)
        except ApiError as error:
            answer = error.body
        assert '"code":410' in answer.replace(" ", "")


def test_nothing_is_left_after_stop() -> None:
    require_binaries(*CONTROL_PLANE_PROGRAMS)
    with ControlPlane() as cluster:
        running, folder = cluster.processes.all(), cluster.folder
        assert len(running) == 4
        assert all(process.alive() for process in running)
    assert not any(process.alive() for process in running)
    assert not folder.exists()


KILLED_OWNER = """
import sys, time
from tests.kube.controlplane import ControlPlane, Options
cluster = ControlPlane(Options(controller_manager=False, scheduler=False))
cluster.start()
for process in cluster.processes.all():
    print(process.pid, process.start_ticks)
print(cluster.folder, flush=True)
time.sleep(600)
"""


def test_nothing_is_left_when_the_owner_is_killed() -> None:
    require_binaries(*CONTROL_PLANE_PROGRAMS)
    owner = subprocess.Popen([sys.executable, "-c", KILLED_OWNER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert owner.stdout is not None
        lines = [owner.stdout.readline().split() for _ in range(3)]
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    processes = [Running("any", int(pid), int(ticks), 0, "") for pid, ticks in lines[:2]]
    folder = Path(lines[2][0])
    deadline = time.monotonic() + 30
    while (folder.exists() or any(process.alive() for process in processes)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(process.alive() for process in processes)
    assert not folder.exists()
