"""How a controller creates the children of many objects: time, requests, CPU and memory, the same way for everyone.

Looking must not become the load: children are counted by asking for one object and the number of the others.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from prebook_bench.operator_process import ControllerProcess, until

NAMESPACES = 10
QUIET_SECONDS = 5.0

Report = dict[str, Any]


@dataclass(frozen=True)
class Contender:
    """A controller that is measured, and the objects that are made for it.

    `agent` is how its User-Agent begins. `kinds` are those of its children that are counted, plural to path of the API
    group; `children` is their number for one object.
    """

    agent: str
    plural: str
    group_path: str
    document: Callable[[str], Report]
    kinds: dict[str, str]
    children: int

    def path(self, index: int) -> str:
        """Where object number `index` lives."""
        return f"{self.group_path}/namespaces/{namespace(index)}/{self.plural}"


class Creation:
    """One number of objects on one control plane."""

    def __init__(self, plane: Any, contender: Contender, number: int, *, timeout: float) -> None:
        self._plane = plane
        self._api = plane.api
        self._contender = contender
        self._number = number
        self._timeout = timeout
        self._before = {plural: self._count(plural) for plural in contender.kinds}

    def create(self, index: int) -> None:
        """Creates object number `index`."""
        self._api.create(self._contender.path(index), self._contender.document(name(index)))

    def measure(self, controller: ControllerProcess, *, reported: Callable[[], bool] | None = None) -> Report:
        """Creates all objects at once. `reported`: whether every status is current, where that is measured."""
        since = self._plane.audit.position()
        cpu = controller.cpu_seconds()
        started, began = time.monotonic(), time.time()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self.create, range(self._number)))
        report: Report = {"all_created_seconds": round(time.monotonic() - started, 2)}
        until("all StatefulSets", lambda: self._made("statefulsets") >= 2 * self._number, timeout=self._timeout)
        report["all_statefulsets_seconds"] = round(time.monotonic() - started, 2)
        wanted = self._contender.children * self._number
        until("all children", lambda: self._children() >= wanted, timeout=self._timeout)
        report["all_children_seconds"] = round(time.monotonic() - started, 2)
        if reported is not None:
            until("every status to be current", reported, timeout=self._timeout)
            report["all_statuses_current_seconds"] = round(time.monotonic() - started, 2)
        own = self._until_quiet(since)
        verbs = Counter(one.verb for one in own)
        last = max(datetime.fromisoformat(one.received).timestamp() for one in own)
        return {
            **report,
            "last_request_seconds": round(last - began, 2),
            "requests_by_verb": dict(verbs),
            "writes_by_resource": dict(Counter(one.resource for one in own if one.mutating)),
            "requests_per_model": round(len(own) / self._number, 2),
            "cpu_seconds": round(controller.cpu_seconds() - cpu, 2),
            "memory_bytes": controller.memory(),
        }

    def requests(self, since: int) -> list[Any]:
        """The contender's requests after a position of the audit log, without the lease and without watches."""
        return [
            one
            for one in self._plane.audit.requests(since=since)
            if one.agent.startswith(self._contender.agent) and one.resource != "leases" and one.verb != "watch"
        ]

    def _until_quiet(self, since: int) -> list[Any]:
        """Waits until a while has passed without a request; returns all of them."""
        before = self.requests(since)
        while True:
            time.sleep(QUIET_SECONDS)
            now = self.requests(since)
            if len(now) == len(before):
                return now
            before = now

    def _count(self, plural: str) -> int:
        """All objects of a kind, for the price of one."""
        answer = self._api.get(f"{self._contender.kinds[plural]}/{plural}", limit="1")
        return len(answer["items"]) + int(answer["metadata"].get("remainingItemCount") or 0)

    def _made(self, plural: str) -> int:
        return self._count(plural) - self._before[plural]

    def _children(self) -> int:
        return sum(self._made(plural) for plural in self._contender.kinds)


def namespace(index: int) -> str:
    """The namespace of object number `index`."""
    return f"bench-{index % NAMESPACES}"


def name(index: int) -> str:
    """The name of object number `index`."""
    return f"m{index:05d}"
