"""The node's place in the network and in the machine's namespaces.

The node lives in namespaces of its own (processes, mounts, network, host name). Ending their first process ends
everything in them, and with the last process go its mounts, bridges, routes and firewall rules: nothing has to be
undone one by one.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
CLUSTERS = 32  # clusters that fit beside each other on one machine
STATE_FILE = "node.json"


class NodeSetupFailed(RuntimeError):
    """A command that prepares or inspects the node failed."""


@dataclass(frozen=True)
class NodeNetwork:
    """Addresses of cluster number `index`: a link between machine and node, and the node's pods behind it."""

    index: int

    @property
    def host(self) -> str:
        """The machine's end of the link: here pods reach the API server."""
        return f"10.99.{self.index}.1"

    @property
    def node(self) -> str:
        """The node's end of the link: its InternalIP."""
        return f"10.99.{self.index}.2"

    @property
    def pods(self) -> str:
        """The pods' network."""
        return f"10.98.{self.index}.0/24"

    @property
    def gateway(self) -> str:
        """The node's address on the pods' bridge; cluster DNS listens here."""
        return f"10.98.{self.index}.1"

    @property
    def bridge_mac(self) -> str:
        """The bridge's link address. Without one of its own it takes its ports' lowest, another when that pod ends,
        and pods that remember the old one reach neither node nor DNS for up to a minute."""
        return f"0a:58:0a:62:{self.index:02x}:01"

    @property
    def interface(self) -> str:
        """The machine's network interface of the link."""
        return f"prebook{self.index}"

    @property
    def cgroup(self) -> str:
        """The control group below which all pods are."""
        return f"prebook-node-{self.index}"


def run(argv: Sequence[str | Path], *, stdin: str | None = None, seconds: float = 120) -> str:
    """Run a program and return its output. Raises NodeSetupFailed with what it said."""
    words = [str(word) for word in argv]
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode != 0:
        raise NodeSetupFailed(f"{' '.join(words)}: exit status {done.returncode}\n{done.stderr}{done.stdout}")
    return done.stdout


def free_network() -> NodeNetwork:
    """The first cluster number that nobody on this machine uses. Raises NodeSetupFailed when all are taken."""
    taken = interfaces()
    for index in range(CLUSTERS):
        network = NodeNetwork(index)
        if network.interface not in taken:
            return network
    raise NodeSetupFailed(f"{CLUSTERS} clusters run on this machine already")


def interfaces() -> set[str]:
    """Names of the machine's network interfaces."""
    return {str(link["ifname"]) for link in json.loads(run(["ip", "-j", "link", "show"]))}


def connect(network: NodeNetwork, namespace_pid: int) -> None:
    """Make the link between the machine and the node's network namespace, and the machine's route to pods."""
    run(["ip", "link", "add", network.interface, "type", "veth", "peer", "name", "eth0", "netns", str(namespace_pid)])
    run(["ip", "addr", "add", f"{network.host}/30", "dev", network.interface])
    run(["ip", "link", "set", network.interface, "up"])
    run(["ip", "route", "add", network.pods, "via", network.node])


def setup_script(network: NodeNetwork, folder: Path) -> str:
    """Shell script that prepares the namespaces from inside.

    /run, /var/lib and /var/log are covered, because kubelet, containerd and CNI plugins have paths there that no
    setting changes.
    """
    return f"""
set -eu
mount --make-rshared /
mkdir -p {folder}/var-lib {folder}/var-log
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/lock
mount --bind {folder}/var-lib /var/lib
mount --bind {folder}/var-log /var/log
ip link set lo up
ip addr add {network.node}/30 dev eth0
ip link set eth0 up
ip route add default via {network.host}
ip link add cni0 address {network.bridge_mac} type bridge
ip addr add {network.gateway}/24 dev cni0
ip link set cni0 up
echo 1 > /proc/sys/net/ipv4/ip_forward
# Without this a reply between two pods of the node skips the rules that turned a Service's address into a pod's.
echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables
"""


def make_cgroups(network: NodeNetwork) -> None:
    """Make the pods' control group in every hierarchy; kubelet wants it to exist."""
    for hierarchy in _hierarchies():
        (hierarchy / network.cgroup).mkdir(exist_ok=True)
    cpuset = CGROUPS / "cpuset"
    if (cpuset / "cpuset.cpus").exists():
        for name in (
            "cpuset.cpus",
            "cpuset.mems",
        ):  # cgroup v1 starts a new cpuset empty, and then nothing may enter it
            (cpuset / network.cgroup / name).write_text((cpuset / name).read_text())


def remove_cgroups(network: NodeNetwork, *, seconds: float = 15) -> None:
    """Remove the pods' control groups, deepest first. Raises NodeSetupFailed when processes stay in them."""
    deadline = time.monotonic() + seconds
    for hierarchy in _hierarchies():
        top = hierarchy / network.cgroup
        while top.exists():
            try:
                for folder, _, _ in os.walk(top, topdown=False):
                    os.rmdir(folder)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise NodeSetupFailed(f"cannot remove {top}: {error}") from error
                time.sleep(0.1)


def _hierarchies() -> list[Path]:
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    # cgroup v1: links such as cpu -> cpu,cpuacct would be visited twice
    return sorted(path for path in CGROUPS.iterdir() if path.is_dir() and not path.is_symlink())


def remember(folder: Path, network: NodeNetwork) -> None:
    """Write down what has to be removed although its processes are gone."""
    (folder / STATE_FILE).write_text(json.dumps(asdict(network)))


def clean_up(folder: Path) -> None:
    """Remove what `remember` wrote down; the node's processes must have ended."""
    state = folder / STATE_FILE
    if state.exists():
        network = NodeNetwork(**json.loads(state.read_text()))
        remove_cgroups(network)
        if network.interface in interfaces():  # the kernel takes a moment to end the namespace, and the link with it
            subprocess.run(["ip", "link", "delete", network.interface], check=False, capture_output=True)
        state.unlink()
