"""Nodes and pods that exist only as objects: the scheduler believes them, nothing runs.

Good for scheduling, rollout and status tests. What a pod really does is for the real node (`tests.kube.node`).
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.kube.rest import Json, Rest

P5EN_LABELS: Mapping[str, str] = {
    "node.kubernetes.io/instance-type": "p5en.48xlarge",
    "beta.kubernetes.io/instance-type": "p5en.48xlarge",
    "kubernetes.io/arch": "amd64",
    "kubernetes.io/os": "linux",
    "nvidia.com/gpu.product": "NVIDIA-H200",
    "vpc.amazonaws.com/efa.present": "true",
}


@dataclass(frozen=True)
class NodeShape:
    """What a node offers. The default is a p5en.48xlarge: 192 vCPU, 2 TiB, 8 H200 GPUs, 16 EFA interfaces."""

    gpus: int = 8
    efa: int = 16
    cpu: str = "192"
    memory: str = "2048Gi"
    labels: Mapping[str, str] = field(default_factory=lambda: dict(P5EN_LABELS))
    taints: tuple[Json, ...] = ()


P5EN = NodeShape()
PLAIN = NodeShape(
    gpus=0,
    efa=0,
    cpu="16",
    memory="64Gi",
    labels={
        "node.kubernetes.io/instance-type": "m7i.4xlarge",
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
    },
)


def add_node(
    api: Rest,
    name: str,
    *,
    shape: NodeShape = P5EN,
    zone: str = "us-east-1a",
    node_group: str = "p5en-a",
    network: tuple[str, str, str] = ("nn-1", "nn-11", "nn-111"),
) -> None:
    """Create a Ready node. `network` holds AWS's network node layers 1 to 3 (same layer 3 = closest)."""
    labels = {
        **shape.labels,
        "kubernetes.io/hostname": name,
        "topology.kubernetes.io/zone": zone,
        "topology.kubernetes.io/region": zone[:-1],
        "eks.amazonaws.com/nodegroup": node_group,
        **{f"topology.k8s.aws/network-node-layer-{layer}": value for layer, value in enumerate(network, 1)},
    }
    node: Json = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
    if shape.taints:
        node["spec"] = {"taints": list(shape.taints)}
    api.create("/api/v1/nodes", node)
    resources = {"cpu": shape.cpu, "memory": shape.memory, "pods": "110", "ephemeral-storage": "2000Gi"}
    if shape.gpus:
        resources["nvidia.com/gpu"] = str(shape.gpus)
    if shape.efa:
        resources["vpc.amazonaws.com/efa"] = str(shape.efa)
    status = {
        "capacity": resources,
        "allocatable": resources,
        "conditions": [_condition("Ready", "True", "FakeNode")],
        "addresses": [{"type": "InternalIP", "address": "192.0.2.1"}, {"type": "Hostname", "address": name}],
    }
    api.merge(f"/api/v1/nodes/{name}/status", {"status": status})
    # The NodeRestriction and taint-by-condition admission marks a new node not-ready; without the node-lifecycle
    # controller nobody takes the mark away again.
    api.merge(f"/api/v1/nodes/{name}", {"spec": {"taints": list(shape.taints) or None}})


def remove_nodes(api: Rest) -> None:
    """Delete every fake node, and at once the pods that were bound to them: no kubelet will ever confirm their end."""
    names = {node["metadata"]["name"] for node in api.items("/api/v1/nodes")}
    for pod in api.items("/api/v1/pods"):
        if pod["spec"].get("nodeName") in names:
            meta = pod["metadata"]
            api.delete(f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}", grace_seconds=0)
    for name in names:
        api.delete(f"/api/v1/nodes/{name}")


class FakeKubelet:
    """Stands in for the kubelet of fake nodes: writes pod status, and confirms deletions, when told to.

    It runs nothing and probes nothing; a test that uses it says something about the operator's reading of status, no
    more.
    """

    def __init__(self, api: Rest, namespace: str) -> None:
        self.api = api
        self.namespace = namespace
        self._next_address = 10

    def pods(self, selector: str = "") -> list[Json]:
        """Pods of the namespace, by name."""
        query = {"labelSelector": selector} if selector else {}
        pods = self.api.items(f"/api/v1/namespaces/{self.namespace}/pods", **query)
        return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))

    def mark(self, name: str, *, ready: bool = True, ip: str | None = None) -> str:
        """Report a scheduled pod as running, ready or not; returns its IP."""
        pod = self.api.get(self._path(name))
        address = ip or pod.get("status", {}).get("podIP") or self._address()
        state = "True" if ready else "False"
        containers = [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": "",
                "ready": ready,
                "started": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": _now()}},
            }
            for container in pod["spec"]["containers"]
        ]
        conditions = [
            _condition("PodScheduled", "True", "FakeKubelet"),
            _condition("Initialized", "True", "FakeKubelet"),
            _condition("ContainersReady", state, "FakeKubelet"),
            _condition("Ready", state, "FakeKubelet"),
        ]
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "hostIP": "192.0.2.1",
            "startTime": _now(),
            "conditions": conditions,
            "containerStatuses": containers,
        }
        self.api.merge(f"{self._path(name)}/status", {"status": status})
        return address

    def mark_waiting(self, name: str, *, reason: str, message: str) -> None:
        """Report that a pod's first container waits, for instance with `ImagePullBackOff`."""
        self._first_container(name, {"waiting": {"reason": reason, "message": message}}, phase="Pending")

    def mark_terminated(self, name: str, *, exit_code: int, message: str) -> None:
        """Report that a pod's first container has ended with a termination message."""
        ended = {
            "exitCode": exit_code,
            "reason": "Error",
            "message": message,
            "startedAt": _now(),
            "finishedAt": _now(),
        }
        self._first_container(name, {"terminated": ended}, phase="Running")

    def mark_all(self, selector: str = "", *, ready: bool = True) -> int:
        """Mark every pod that is not being deleted; returns how many."""
        pods = [pod for pod in self.pods(selector) if "deletionTimestamp" not in pod["metadata"]]
        for pod in pods:
            self.mark(pod["metadata"]["name"], ready=ready)
        return len(pods)

    def finish_deletions(self) -> int:
        """Confirm the end of pods that are being deleted; returns how many."""
        going = [pod["metadata"]["name"] for pod in self.pods() if "deletionTimestamp" in pod["metadata"]]
        for name in going:
            self.api.delete(self._path(name), grace_seconds=0)
        return len(going)

    def _first_container(self, name: str, state: Json, *, phase: str) -> None:
        container = self.api.get(self._path(name))["spec"]["containers"][0]
        entry = {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "ready": False,
            "restartCount": 1,
        }
        conditions = [_condition("Ready", "False", "ContainersNotReady")]
        status = {"phase": phase, "conditions": conditions, "containerStatuses": [entry | {"state": state}]}
        self.api.merge(f"{self._path(name)}/status", {"status": status})

    def _path(self, name: str) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods/{name}"

    def _address(self) -> str:
        self._next_address += 1
        return f"198.51.{100 + self._next_address // 250}.{self._next_address % 250}"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _condition(kind: str, status: str, reason: str) -> Json:
    return {"type": kind, "status": status, "reason": reason, "message": "", "lastTransitionTime": _now()}
