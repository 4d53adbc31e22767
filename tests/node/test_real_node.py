"""The node itself: pods run, find each other by name, and nothing of them is left."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.kube import nodenet
from tests.kube.cluster import RealCluster
from tests.kube.controlplane import ControlPlane, wait_for
from tests.kube.engine_image import ENGINE_IMAGE
from tests.kube.rest import Json

SERVER = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8000, bind='0.0.0.0')"


def pod(name: str, *command: str) -> Json:
    """A pod of the engine image that runs `command`."""
    container = {"name": "main", "image": ENGINE_IMAGE, "command": list(command), "imagePullPolicy": "Never"}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 1, "restartPolicy": "Never"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec}


def wait_phase(control_plane: ControlPlane, namespace: str, name: str, phase: str) -> Json:
    """Wait for a pod's phase and return the pod."""
    path = f"/api/v1/namespaces/{namespace}/pods/{name}"
    wait_for(f"{name} to be {phase}", lambda: control_plane.api.get(path)["status"]["phase"] == phase, seconds=90)
    return control_plane.api.get(path)


@pytest.fixture
def server(cluster: RealCluster, pods_namespace: str) -> str:
    """A web server in a pod with a Service and a headless Service; returns the pod's address."""
    api, folder = cluster.control_plane.api, f"/api/v1/namespaces/{pods_namespace}"
    api.create(f"{folder}/pods", pod("server", "python3", "-c", SERVER))
    for name, extra in (("server", {}), ("headless", {"clusterIP": "None", "publishNotReadyAddresses": True})):
        spec = {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8000}], **extra}
        service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}
        api.create(f"{folder}/services", service)
    return str(wait_phase(cluster.control_plane, pods_namespace, "server", "Running")["status"]["podIP"])


def test_pod_reaches_a_service_by_name(cluster: RealCluster, pods_namespace: str, server: str) -> None:
    script = (
        "curl -sSf --retry 20 --retry-all-errors --retry-delay 1 http://server/ > /dev/null"
        " && python3 -c 'import socket; print(socket.gethostbyname(\"headless\"))' && id -u"
    )
    client = pod("client", "sh", "-c", script)
    cluster.control_plane.api.create(f"/api/v1/namespaces/{pods_namespace}/pods", client)
    wait_phase(cluster.control_plane, pods_namespace, "client", "Succeeded")
    logs = cluster.control_plane.kubectl("logs", "client", "--namespace", pods_namespace)
    assert logs.split() == [server, "65532"]


def test_the_nodes_link_address_outlives_its_pods(cluster: RealCluster) -> None:
    """A port with a lower address than any other comes and goes, as a pod's may."""

    def address() -> str:
        (bridge,) = json.loads(cluster.node.enter(["ip", "-j", "link", "show", "cni0"]))
        return str(bridge["address"])

    before = address()
    pair = "ip link add lower address 02:00:00:00:00:01 type veth peer name other"
    cluster.node.enter(["sh", "-c", f"{pair} && ip link set lower master cni0 up"])
    try:
        assert address() == before
    finally:
        cluster.node.enter(["ip", "link", "delete", "lower"])
    assert address() == before


def test_exec_reaches_the_pod(cluster: RealCluster, pods_namespace: str, server: str) -> None:
    output = cluster.control_plane.kubectl("exec", "server", "--namespace", pods_namespace, "--", "hostname", "-I")
    assert output.strip() == server


def test_a_pod_cannot_change_the_image_it_runs(cluster: RealCluster, pods_namespace: str, server: str) -> None:
    """The engine image's files are hard links to this machine's: a write by root in a pod must stay in the pod."""
    intruder = pod("intruder", "sh", "-c", "echo changed > /usr/bin/env && echo changed > /etc/passwd")
    intruder["spec"]["containers"][0]["securityContext"] = {"runAsUser": 0}
    cluster.control_plane.api.create(f"/api/v1/namespaces/{pods_namespace}/pods", intruder)
    wait_phase(cluster.control_plane, pods_namespace, "intruder", "Succeeded")
    assert subprocess.run(["/usr/bin/env", "true"], check=False).returncode == 0
    exec_in_server = ("exec", "server", "--namespace", pods_namespace, "--", "/usr/bin/env", "true")
    cluster.control_plane.kubectl(*exec_in_server)


def test_nothing_is_left_of_a_node() -> None:
    with RealCluster() as second:
        network, folder = second.network, second.control_plane.folder
        assert network.interface in nodenet.interfaces()
        processes = second.control_plane.processes.all()
    assert network.interface not in nodenet.interfaces()
    assert not any(process.alive() for process in processes)
    assert not list(nodenet.CGROUPS.glob(f"*/{network.cgroup}")) + list(nodenet.CGROUPS.glob(network.cgroup))
    assert str(folder) not in Path("/proc/self/mounts").read_text()
    assert not folder.exists()
