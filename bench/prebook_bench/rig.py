"""Where a pair runs: two network namespaces on a bridge with a shaped link between them, or plain loopback addresses.

::

    client (this host) ── bridge ──┬── veth ── namespace P
                                   └── veth ── namespace D   (shaped here: everything on its way to decode)

The bridge and the shaper stand for a switch and network cards. What they do is computed on cores of their own, or on
decode's where prefill and decode have all cores, and never on prefill's (docs/adr/0027).

Everything is named after this process's id. Clean-up is part of leaving the context, in reverse order of set-up; what
a killed run left behind (its process is gone) is removed by the next one. Needs root and iproute2; :func:`why_not` says
politely what is missing. Shaping is a token bucket with a deep queue (``tbf``): with a shallow one TCP, and UCX on top
of it, stalls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

_SPACE: Final = re.compile(r"^prebook-(\d+)-([pd])$")
_BRIDGE: Final = re.compile(r"^pbb(\d+)$")
_RATE: Final = re.compile(r"^(\d+(?:\.\d+)?)\s*(k|m|g)?bit$", re.IGNORECASE)
_CANDIDATE_NETWORKS: Final = [f"10.{second}.{third}.0/24" for second in (87, 141, 203) for third in (64, 133, 219)]


class RigError(RuntimeError):
    """The rig cannot be set up; the message says what is missing."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one engine runs: its address, the prefix of its command line, its cores."""

    address: str
    prefix: tuple[str, ...]
    cores: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Rig:
    """A set-up rig: a place for prefill and one for decode.

    `client` is an address of this host that both can reach. `crossed` is the kernel's counter of the bytes that the
    link has carried to decode's place, None where decode has no interface of its own. `link_cores` are those that
    process packets; none: the kernel cannot be told, and each packet is processed where it was sent.
    """

    prefill: Place
    decode: Place
    rate: str | None
    client: str = "127.0.0.1"
    crossed: Path | None = None
    link_cores: tuple[int, ...] = ()

    def describe(self) -> dict[str, object]:
        """JSON values for a report."""
        return {
            "link": "shaped with tbf on the way to decode" if self.rate else "loopback, not shaped",
            "rate": self.rate,
            "prefill_cores": list(self.prefill.cores),
            "decode_cores": list(self.decode.cores),
            "link_cores": list(self.link_cores),
        }


def parse_rate(text: str) -> float:
    """Bits per second of a tc-style rate such as ``1gbit`` or ``250mbit``. Raises ValueError for anything else."""
    match = _RATE.match(text.strip())
    if not match or float(match[1]) <= 0:
        raise ValueError(f"not a rate: {text!r} (write it as 1gbit, 250mbit, …)")
    return float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[(match[2] or "").lower()]


def split_cores(available: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cores for prefill and decode: the lower and the upper half; both get the only core of a one-core machine."""
    cores = sorted(available)
    if not cores:
        raise ValueError("no cores")
    half = len(cores) // 2
    if half == 0:
        return tuple(cores), tuple(cores)
    return tuple(cores[:half]), tuple(cores[half:])


def why_not() -> str | None:
    """Why namespaces and a shaped link cannot be had here, or None when they can."""
    if os.geteuid() != 0:
        return "it needs root (network namespaces and traffic shaping): run it with sudo, or use --rate none"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"`{tool}` was not found: install iproute2, or use --rate none"
    return None


@contextlib.contextmanager
def loopback(*, cores: tuple[tuple[int, ...], tuple[int, ...]]) -> Iterator[Rig]:
    """Two loopback addresses and no shaping; works without root."""
    places = [
        Place(address=f"127.0.0.{number}", prefix=(), cores=group)
        for number, group in zip((21, 22), cores, strict=True)
    ]
    yield Rig(prefill=places[0], decode=places[1], rate=None)


@contextlib.contextmanager
def shaped(
    *, rate: str, cores: tuple[tuple[int, ...], tuple[int, ...]], burst: str = "1m", latency: str = "400ms"
) -> Iterator[Rig]:
    """Sets up the namespaces and the link, and takes everything down again whatever happens inside.

    Raises RigError when the machine cannot do it (see :func:`why_not`) and ValueError for a rate tc would not take.
    """
    parse_rate(rate)
    if reason := why_not():
        raise RigError(f"the shaped link cannot be set up: {reason}")
    remove_leftovers()
    network = _free_network()
    hosts = [str(host) for host in network.hosts()][:3]
    pid = os.getpid()
    bridge = f"pbb{pid}"
    with contextlib.ExitStack() as stack:
        stack.callback(_run, "ip", "link", "delete", bridge, check=False)
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "address", "add", f"{hosts[0]}/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        spaces = []
        for letter, address in zip("pd", hosts[1:], strict=True):
            space = f"prebook-{pid}-{letter}"
            outer = f"pb{letter}{pid}"
            stack.callback(_remove_namespace, space, outer=outer)
            _add_namespace(space, bridge=bridge, outer=outer, address=address)
            spaces.append(space)
        outer_p, outer_d = f"pbp{pid}", f"pbd{pid}"
        link_cores = _link_cores(cores) if Path(f"/sys/class/net/{outer_p}/queues/rx-0/rps_cpus").exists() else ()
        if link_cores:
            for interface, inside in ((outer_p, None), (outer_d, None), ("eth0", spaces[0]), ("eth0", spaces[1])):
                _receive_on(link_cores, interface, inside=inside)
        # Behind the bridge, so that packets wait for their turn, and are woken by a timer, on the link's cores.
        _run("tc", "qdisc", "add", "dev", outer_d, "root", "tbf", "rate", rate, "burst", burst, "latency", latency)
        places = [
            Place(address=address, prefix=("ip", "netns", "exec", space), cores=group)
            for address, space, group in zip(hosts[1:], spaces, cores, strict=True)
        ]
        crossed = Path(f"/sys/class/net/{outer_d}/statistics/tx_bytes")
        yield Rig(
            prefill=places[0], decode=places[1], rate=rate, client=hosts[0], crossed=crossed, link_cores=link_cores
        )


def remove_leftovers() -> list[str]:
    """Removes namespaces and bridges of runs whose process no longer exists; returns their names."""
    removed = []
    for space in _namespaces():
        match = _SPACE.match(space)
        if match and not _alive(int(match[1])):
            _remove_namespace(space, outer=f"pb{match[2]}{match[1]}")
            removed.append(space)
    for name in (entry["ifname"] for entry in json.loads(_run("ip", "-j", "link", "show", "type", "bridge") or "[]")):
        match = _BRIDGE.match(name)
        if match and not _alive(int(match[1])):
            _run("ip", "link", "delete", name, check=False)
            removed.append(name)
    return removed


def _add_namespace(space: str, *, bridge: str, outer: str, address: str) -> None:
    _run("ip", "netns", "add", space)
    _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
    _run("ip", "link", "set", outer, "master", bridge, "up")
    _run("ip", "-n", space, "address", "add", f"{address}/24", "dev", "eth0")
    _run("ip", "-n", space, "link", "set", "lo", "up")
    _run("ip", "-n", space, "link", "set", "eth0", "up")


def _link_cores(cores: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[int, ...]:
    """Cores for what switches and network cards do between hosts: those that no engine has, else decode's."""
    spare = os.sched_getaffinity(0).difference(*cores)
    return tuple(sorted(spare)) or cores[1]


def _receive_on(cores: Sequence[int], interface: str, *, inside: str | None = None) -> None:
    """Has packets that arrive on an interface processed on these cores (receive packet steering).

    Without it a veth has them processed on the core of whoever sent, both halves of the stack, the acknowledgements and
    the shaper's timer included: prefill would pay for the whole network, in all modes.
    """
    bits, words = sum(1 << core for core in cores), list[str]()
    while bits or not words:  # the kernel reads words of 32 bits, the highest first
        words.insert(0, f"{bits & 0xFFFFFFFF:x}")
        bits >>= 32
    prefix = ("ip", "netns", "exec", inside) if inside is not None else ()
    _run(*prefix, "sh", "-c", f"echo {','.join(words)} > /sys/class/net/{interface}/queues/rx-0/rps_cpus")


def _remove_namespace(space: str, *, outer: str) -> None:
    """Ends what still runs inside, then removes the namespace and its veth (which would go later by itself)."""
    if space not in _namespaces():
        return
    deadline = time.monotonic() + 5
    while pids := [int(pid) for pid in _run("ip", "netns", "pids", space, check=False).split()]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it ended on its own
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    _run("ip", "link", "delete", outer, check=False)
    _run("ip", "netns", "delete", space)


def _namespaces() -> list[str]:
    return [entry["name"] for entry in json.loads(_run("ip", "-j", "netns", "list") or "[]")]


def _free_network() -> ipaddress.IPv4Network:
    """A /24 that overlaps no address or route of this host."""
    taken = []
    for entry in json.loads(_run("ip", "-j", "-4", "route", "show", "table", "all") or "[]"):
        with contextlib.suppress(ValueError):  # "default"
            taken.append(ipaddress.IPv4Network(entry["dst"], strict=False))
    for text in _CANDIDATE_NETWORKS:
        network = ipaddress.IPv4Network(text)
        if not any(network.overlaps(other) for other in taken):
            return network
    raise RigError(f"all of {', '.join(_CANDIDATE_NETWORKS)} are in use on this host")


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _run(*command: str, check: bool = True) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and result.returncode != 0:
        raise RigError(f"`{' '.join(command)}` failed: {result.stderr.strip() or result.returncode}")
    return result.stdout
