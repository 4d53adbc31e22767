"""Tiers: which tests this machine can run, in which order, and a summary that hides nothing.

A test belongs to the tier named like its folder under tests/ (or to the one its `tier` marker names). Each tier says
what it needs. Where a machine lacks that, the tier is skipped with the reason, loudly, at the end of the run; in CI
(`CI=true`, or `--require-tiers`) the same tests fail instead, so that a green run means that everything ran.

Only the standard library and pytest are imported here, and the checks are cheap: this runs for `make test-unit` too.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hack.kube.binaries import BinaryMissing, locate

TESTS = Path(__file__).resolve().parent
ENGINE_MEMORY_GIB = 8  # two CPU engines with the small chat model and 1 GiB of KV space each, and room for the tests
SBIN = "/usr/sbin:/sbin"


@dataclass(frozen=True)
class Tier:
    """One tier: what it needs (a reason when it is missing), and the time that one of its tests may take.

    The limit covers the fixtures that a test is the first to use, so it includes the start of engines or a cluster.
    Where tests are spread over processes (`make test`), the tiers of one lane share a process and run in order.
    """

    name: str
    seconds: float
    lacks: Callable[[], str | None]
    lane: str


@dataclass
class Tally:
    """What became of one tier's tests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def _nothing() -> str | None:
    return None


def _programs(*names: str) -> str | None:
    try:
        for name in names:
            locate(name)
    except BinaryMissing as error:
        return str(error)
    return None


def _commands(*names: str) -> str | None:
    path = f"{os.environ.get('PATH', '')}:{SBIN}"
    missing = [name for name in names if shutil.which(name, path=path) is None]
    return f"not installed: {', '.join(missing)} (hack/setup.sh --tests names the packages)" if missing else None


def _root() -> str | None:
    if sys.platform != "linux":
        return "needs Linux"
    return None if os.geteuid() == 0 else "needs root (network namespaces)"


def _engine() -> str | None:
    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("nixl") is None:
        return "vLLM or NIXL is not installed: run hack/setup.sh"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        None if total >= ENGINE_MEMORY_GIB else f"needs {ENGINE_MEMORY_GIB} GiB of memory, this machine has {total:.0f}"
    )


def _rig() -> str | None:
    return _root() or _commands("ip", "tc") or _engine()


def _apiserver() -> str | None:
    return _programs("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")


def _node() -> str | None:
    return (
        _root()
        or _commands("containerd", "runc", "iptables", "buildah")
        or _apiserver()
        or _programs("helm", "kubelet", "kube-proxy", "coredns", "pause")
        or _engine()
    )


# In the order in which they run: what fails fast comes first. Two lanes: the tiers of the first mostly wait (for
# watches, leases, timeouts), those of the second compute, so that side by side they take little more than the longer.
WAITING, COMPUTING = "waiting", "computing"
TIERS: dict[str, Tier] = {
    tier.name: tier
    for tier in (
        Tier("unit", 120, _nothing, WAITING),
        Tier("chart", 180, lambda: _programs("helm"), WAITING),
        Tier("apiserver", 420, _apiserver, WAITING),
        Tier("engine", 600, _engine, COMPUTING),
        Tier("rig", 600, _rig, COMPUTING),
        Tier("node", 900, _node, COMPUTING),
    )
}
ORDER = {name: position for position, name in enumerate(TIERS)}
TIER = pytest.StashKey[str]()
LOST = "crashed"


def tier_of(item: pytest.Item) -> str:
    """The tier of a test: its `tier` marker, else its folder under tests/. An unknown one is an error."""
    marker = item.get_closest_marker("tier")
    name = str(marker.args[0]) if marker is not None else _folder(item.path)
    if name not in TIERS:
        raise pytest.UsageError(f"{item.nodeid}: tier {name!r} is not one of {', '.join(TIERS)}")
    return name


def _folder(path: Path) -> str:
    """The folder under tests/ that a file is in, empty for any other place."""
    parts = path.relative_to(TESTS).parts if path.is_relative_to(TESTS) else ()
    return parts[0] if len(parts) > 1 else ""


def lane_of(nodeid: str, *, root: Path) -> str:
    """The lane of a test; one outside the tiers' folders is a lane of its own."""
    folder = _folder(root / nodeid.partition("::")[0])
    return TIERS[folder].lane if folder in TIERS else nodeid


class TierPlugin:
    """Orders the tests by tier, gates them, and reports tier by tier.

    With pytest-xdist, tests are collected and run in workers and only their reports reach the process that sums up;
    so what a worker knows about a test travels in its report.
    """

    def __init__(self, required: frozenset[str]) -> None:
        self._required = required
        self._lacks: dict[str, str | None] = {}
        self.tallies: dict[str, Tally] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            tier = TIERS[tier_of(item)]
            item.stash[TIER] = tier.name
            folder = _folder(item.path)
            if folder in TIERS and TIERS[folder].lane != tier.lane:
                raise pytest.UsageError(f"{item.nodeid}: tier {tier.name} runs beside tests/{folder}, not in its lane")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(tier.seconds))
        items.sort(key=lambda item: ORDER[item.stash[TIER]])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Has each lane run in one process. All that is known here of a test is its id."""
        from xdist.scheduler import LoadScopeScheduling

        class Lanes(LoadScopeScheduling):
            def _split_scope(self, nodeid: str) -> str:
                return lane_of(nodeid, root=config.rootpath)

        return Lanes(config, log)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        name = item.stash[TIER]
        if name not in self._lacks:
            self._lacks[name] = TIERS[name].lacks()
        reason = self._lacks[name]
        if reason is None:
            return
        if name in self._required:
            pytest.fail(f"the {name} tier is required here but cannot run: {reason}", pytrace=False)
        pytest.skip(f"{name} tier: {reason}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        report.tier = item.stash[TIER]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A report without a tier is xdist's own: the worker died in this test.
        tally = self.tallies.setdefault(getattr(report, "tier", LOST), Tally())
        tally.seconds += report.duration
        if report.skipped:
            tally.outcomes["skipped"] += 1
            reason = report.longrepr[2] if isinstance(report.longrepr, (tuple, list)) else str(report.longrepr)
            tally.reasons[reason.removeprefix("Skipped: ")] += 1
        elif report.failed:
            tally.outcomes["failed"] += 1
        elif report.when == "call":
            tally.outcomes["passed"] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.tallies:
            return
        terminalreporter.section("tiers")
        for name in (*TIERS, *self.tallies.keys() - TIERS.keys()):
            tally = self.tallies.get(name)
            if tally is None:
                terminalreporter.write_line(f"{name:<10} not selected")
                continue
            counts = ", ".join(
                f"{tally.outcomes[key]} {key}" for key in ("passed", "failed", "skipped") if tally.outcomes[key]
            )
            ran = tally.outcomes["passed"] + tally.outcomes["failed"] > 0
            terminalreporter.write_line(
                f"{name:<10} {counts} in {tally.seconds:.0f} s" if ran else f"{name:<10} NOT RUN: {counts}",
                red=tally.outcomes["failed"] > 0,
                yellow=not ran,
            )
            for reason, count in tally.reasons.most_common():
                terminalreporter.write_line(f"{'':<10}   {count} skipped: {reason}", yellow=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--require-tiers unit,engine`: fail instead of skip where such a tier cannot run. In CI: all of them."""
    default = ",".join(TIERS) if os.environ.get("CI", "").lower() in {"1", "true"} else ""
    parser.addoption(
        "--require-tiers",
        default=default,
        metavar="NAMES",
        help="comma-separated tiers that must run; where one cannot, its tests fail (default in CI: all)",
    )


def pytest_configure(config: pytest.Config) -> None:
    required = frozenset(filter(None, config.getoption("--require-tiers").split(",")))
    unknown = required - TIERS.keys()
    if unknown:
        raise pytest.UsageError(f"--require-tiers: unknown {', '.join(sorted(unknown))}; known: {', '.join(TIERS)}")
    config.pluginmanager.register(TierPlugin(required), "prebook-tiers")
