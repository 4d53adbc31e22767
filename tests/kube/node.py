"""One real node: kubelet, containerd, runc, CNI bridge, kube-proxy and cluster DNS, for root on Linux.

Everything is below the control plane's folder and in namespaces of the node's own (see `nodenet`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hack.kube.binaries import locate
from tests.kube import images, nodenet
from tests.kube.controlplane import CLUSTER_DOMAIN, ControlPlane, wait_for
from tests.kube.nodenet import NodeNetwork, NodeSetupFailed, run
from tests.kube.processes import ProcessFailed

NODE_NAME = "prebook-node"
PAUSE_IMAGE = "prebook.test/pause:1"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
DEBIAN_PACKAGES = ("containerd", "runc", "containernetworking-plugins", "iptables", "iproute2", "util-linux")
SYSTEM_PROGRAMS = ("containerd", "ctr", "runc", "iptables", "ip", "unshare", "nsenter", "mount")
CNI_FOLDERS = ("/usr/lib/cni", "/opt/cni/bin")  # Debian's, everybody else's
NODE_PROGRAMS = ("kubelet", "kube-proxy", "coredns", "pause")

CONTAINERD_CONFIG = """
version = 2
root = "{folder}/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.internal.v1.opt",
]
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  # Root may lack CAP_SYS_RESOURCE, and may then only raise its score.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni_programs}"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""

COREFILE = """
.:53 {{
    errors
    ready {address}:8181
    kubernetes {domain} in-addr.arpa {{
        kubeconfig {kubeconfig}
        ttl 1
    }}
}}
"""


def missing_requirements() -> list[str]:
    """Why this machine cannot run a node, in words with a remedy; empty when it can."""
    reasons = []
    if sys.platform != "linux" or os.geteuid() != 0:
        reasons.append("a real node needs root on Linux")
    absent = [name for name in SYSTEM_PROGRAMS if shutil.which(name) is None]
    if cni_programs() is None:
        absent.append("the CNI plugins bridge, host-local, loopback and portmap")
    if absent:
        reasons.append(f"missing: {', '.join(absent)} (on Debian: apt-get install {' '.join(DEBIAN_PACKAGES)})")
    return reasons


def cni_programs() -> str | None:
    """The folder with CNI plugins, if there is one."""
    wanted = ("bridge", "host-local", "loopback", "portmap")
    return next((folder for folder in CNI_FOLDERS if all(os.path.exists(f"{folder}/{name}") for name in wanted)), None)


class RealNode:
    """A node that joins `control_plane`, which must advertise `network.host` and run every controller.

    `node_token` is the bearer token of user `system:node:prebook-node`, `proxy_token` that of `system:kube-proxy`.
    """

    def __init__(self, control_plane: ControlPlane, network: NodeNetwork, *, node_token: str, proxy_token: str) -> None:
        self.control_plane = control_plane
        self.network = network
        self.folder = control_plane.folder
        self.processes = control_plane.processes
        self._tokens = {"kubelet": node_token, "kube-proxy": proxy_token, "coredns": control_plane.admin_token}
        self._first_process = 0

    def prepare(self) -> None:
        """Make namespaces and network; the API server's advertised address exists afterwards."""
        if reasons := missing_requirements():
            raise NodeSetupFailed("; ".join(reasons))
        nodenet.remember(self.folder, self.network)
        nodenet.make_cgroups(self.network)
        flags = ["--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--net", "--uts", "--ipc"]
        outer = self.processes.start("node", ["unshare", *flags, "--", locate("pause")])
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        wait_for("the node's namespaces", lambda: self._unshared(children), seconds=10, interval=0.02)
        self._first_process = int(children.read_text().split()[0])
        nodenet.connect(self.network, self._first_process)
        self.enter(["sh", "-c", nodenet.setup_script(self.network, self.folder)])
        self.enter(["hostname", NODE_NAME])

    def start(self, *, ready_seconds: float = 120) -> None:
        """Start containerd, kubelet, kube-proxy and DNS, and wait until the node is Ready."""
        self._write_settings()
        self._start("containerd", ["containerd", f"--config={self.folder / 'containerd.toml'}"])
        wait_for("containerd", self._containerd_ready, seconds=30)
        pause = images.pause_image(self.folder / "pause.tar", locate("pause"), tag=PAUSE_IMAGE)
        self.import_image(pause)
        kubelet = [f"--config={self.folder / 'kubelet.json'}", f"--kubeconfig={self.folder / 'kubelet.kubeconfig'}"]
        addresses = [f"--hostname-override={NODE_NAME}", f"--node-ip={self.network.node}"]
        self._start("kubelet", [locate("kubelet"), *kubelet, *addresses])
        self._start("kube-proxy", [locate("kube-proxy"), f"--config={self.folder / 'kube-proxy.json'}"])
        self._start("coredns", [locate("coredns"), "-conf", self.folder / "Corefile"])
        wait_for("the node to be Ready", self._ready, seconds=ready_seconds)

    def stop(self) -> None:
        """End every process of the node at once; the caller stops the control plane, which removes the rest."""
        try:
            self.processes.stop("node")
        except ProcessFailed:
            return  # it was never started

    # -- use -------------------------------------------------------------------------------------------------------

    def enter(self, argv: Sequence[str | Path], *, seconds: float = 120) -> str:
        """Run a program inside the node and return its output."""
        return run([*self._entrance(), *argv], seconds=seconds)

    def ctr(self, *args: str | Path, seconds: float = 300) -> str:
        """Run containerd's client in Kubernetes' namespace."""
        return self.enter(["ctr", f"--address={CONTAINERD_SOCKET}", "--namespace=k8s.io", *args], seconds=seconds)

    def import_image(self, archive: Path) -> None:
        """Import a docker-archive or OCI archive."""
        self.ctr("images", "import", archive)

    def leftovers(self) -> list[str]:
        """What containerd still runs: ids of containers and sandboxes."""
        return self.ctr("containers", "list", "--quiet").split()

    # -- parts -----------------------------------------------------------------------------------------------------

    def _entrance(self) -> list[str]:
        return ["nsenter", f"--target={self._first_process}", "--mount", "--net", "--pid", "--uts", "--ipc", "--"]

    def _start(self, name: str, argv: Sequence[str | Path]) -> None:
        self.processes.start(name, [*self._entrance(), *argv])

    def _unshared(self, children: Path) -> bool:
        self.processes.require("node")
        return bool(children.read_text().split())

    def _containerd_ready(self) -> bool:
        self.processes.require("containerd")
        try:
            self.ctr("version")
        except NodeSetupFailed:
            return False
        return True

    def _ready(self) -> bool:
        for name in ("containerd", "kubelet", "kube-proxy", "coredns"):
            self.processes.require(name)
        path = f"/api/v1/nodes/{NODE_NAME}"
        if not self.control_plane.api.exists(path):
            return False
        conditions = self.control_plane.api.get(path)["status"].get("conditions", [])
        return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)

    def _write_settings(self) -> None:
        folder, network = self.folder, self.network
        server = f"https://{network.host}:{self.control_plane.port}"
        for name, token in self._tokens.items():
            self.control_plane.write_kubeconfig(name, token, server=server)
        settings = {"folder": folder, "socket": CONTAINERD_SOCKET, "pause": PAUSE_IMAGE, "cni_programs": cni_programs()}
        (folder / "containerd.toml").write_text(CONTAINERD_CONFIG.format(**settings))
        (folder / "cni").mkdir(exist_ok=True)
        (folder / "cni" / "10-prebook.conflist").write_text(json.dumps(_cni_network(network)))
        (folder / "resolv.conf").write_text(f"nameserver {network.gateway}\n")
        (folder / "kubelet.json").write_text(json.dumps(_kubelet_config(network, folder, self.control_plane.ca)))
        (folder / "kube-proxy.json").write_text(json.dumps(_proxy_config(network, folder / "kube-proxy.kubeconfig")))
        corefile = COREFILE.format(
            address=network.gateway, domain=CLUSTER_DOMAIN, kubeconfig=folder / "coredns.kubeconfig"
        )
        (folder / "Corefile").write_text(corefile)


def _cni_network(network: NodeNetwork) -> dict[str, object]:
    addresses = {"type": "host-local", "ranges": [[{"subnet": network.pods, "gateway": network.gateway}]]}
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,  # a pod must reach itself through its own Service
        "ipam": addresses | {"routes": [{"dst": "0.0.0.0/0"}]},
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": "prebook", "plugins": [bridge, ports]}


def _kubelet_config(network: NodeNetwork, folder: Path, ca: Path) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": network.node,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": str(ca)},
        },
        "authorization": {"mode": "AlwaysAllow"},
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "clusterDNS": [network.gateway],
        "clusterDomain": CLUSTER_DOMAIN,
        "resolvConf": str(folder / "resolv.conf"),
        "cgroupRoot": f"/{network.cgroup}",
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "enforceNodeAllocatable": [],
        "localStorageCapacityIsolation": False,
        # The machine's disk belongs to its user; a test cluster has no say in how full it may be.
        "evictionHard": {"memory.available": "100Mi"},
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "5s",
        "healthzPort": 0,
        "serializeImagePulls": False,
    }


def _proxy_config(network: NodeNetwork, kubeconfig: Path) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "clusterCIDR": network.pods,
        "hostnameOverride": NODE_NAME,
        # The machine's connection tracking limits are not for a test to change.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "iptables": {"minSyncPeriod": "0s", "syncPeriod": "30s"},
    }
