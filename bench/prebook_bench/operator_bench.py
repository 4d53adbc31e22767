"""Measures the operator on a real API server: 1, 100, 1000 models and more.

Starts etcd, API server and controller manager in a folder, runs `prebook operator` as a process of its own, creates
models, and reads the API server's audit log: how long until all children exist and every status is current, what it
cost in requests, CPU and memory, what the steady state sends, how long a standby takes to work when the leader ends or
is killed, and what a restart does. Run it from a checkout: the control plane is that of the tests.

`--beside-lws` has the controller of kubernetes-sigs/lws create as many sets with two roles on a control plane of its
own, for each number of models: the creation's figures side by side.

Looking must not become the load: a namespace whose reports are all current is not read again."""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prebook_bench import arguments, machine
from prebook_bench.creation import NAMESPACES, Contender, Creation, Report, name, namespace
from prebook_bench.lws import LWS, LwsProcess, why_not
from prebook_bench.operator_process import OperatorProcess, until

AGENT = "prebook-operator"
POD_ADDRESS = "127.83.12.7"
"""A loopback address of its own, so that port 8000 of it is free."""
GROUP = "/apis/prebook.dev/v1alpha1"


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `operator` to the benchmarks' command line."""
    command = commands.add_parser(
        "operator",
        help="the operator on a real API server: time, requests, memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--models",
        type=arguments.whole_numbers,
        default="1,100,1000",
        metavar="N,…",
        help="numbers of models (default: %(default)s)",
    )
    command.add_argument(
        "--steady",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="how long the steady state is watched (default: %(default)s)",
    )
    command.add_argument(
        "--timeout", type=float, default=900.0, metavar="SECONDS", help="limit for one number of models"
    )
    command.add_argument(
        "--beside-lws",
        action="store_true",
        help="measure the creation by LWS too; build it with `python3 hack/kube/binaries.py lws`",
    )
    command.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the report there")
    command.set_defaults(run=run)


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Measures and prints. 0: measured; 3: not possible here."""
    try:
        module = importlib.import_module("tests.kube.controlplane")
    except ImportError as error:
        print(f"prebook_bench: run this from the root of a checkout: {error}", file=sys.stderr)
        return 3
    if args.beside_lws and (reason := why_not()) is not None:
        print(f"prebook_bench: LWS cannot be measured: {reason}", file=sys.stderr)
        return 3
    report: Report = {"kind": "operator", "machine": machine.describe(command), "runs": []}
    for number in args.models:
        with _control_plane(module) as plane:
            report["runs"].append(_Run(plane, number, steady=args.steady, timeout=args.timeout).measure())
        if args.beside_lws:
            with _control_plane(module) as plane:
                report["runs"][-1]["lws"] = _lws(plane, number, timeout=args.timeout)
        print(_table(report["runs"][-1]), flush=True)
    text = json.dumps(report, indent=2)
    if args.json is None:
        print(text)
    else:
        args.json.write_text(text + "\n", encoding="utf-8")
        print(f"JSON: {args.json}")
    return 0


@contextmanager
def _control_plane(module: Any) -> Iterator[Any]:
    from prebook_operator.api.crd import crds

    options = module.Options(
        audit=True,
        scheduler=False,
        controller_manager_args=("--kube-api-qps=500", "--kube-api-burst=1000"),
    )
    with module.ControlPlane(options) as plane:
        for crd in crds().values():
            plane.api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        until("the kinds to be served", lambda: plane.api.exists(f"/openapi/v3{GROUP}"), timeout=60)
        for index in range(NAMESPACES):
            plane.api.create("/api/v1/namespaces", {"metadata": {"name": f"bench-{index}"}})
        yield plane


def _lws(plane: Any, number: int, *, timeout: float) -> Report:
    controller = LwsProcess(plane)
    try:
        return Creation(plane, LWS, number, timeout=timeout).measure(controller)
    finally:
        controller.stop()


class _Run:
    """One number of models."""

    def __init__(self, plane: Any, number: int, *, steady: float, timeout: float) -> None:
        self._plane = plane
        self._api = plane.api
        self._number = number
        self._steady = steady
        self._timeout = timeout
        self._creation = Creation(plane, PREBOOK, number, timeout=timeout)
        self._current: set[int] = set()

    def measure(self) -> Report:
        operator = OperatorProcess(self._plane.kubeconfig)
        try:
            report: Report = {"models": self._number, "start_seconds": self._until_ready(operator)}
            report["creation"] = self._creation.measure(operator, reported=self._statuses_current)
            report["steady"] = self._watch_steady(operator)
            operator, report["hand_over_seconds"] = self._hand_over(operator, signal.SIGTERM, self._number + 1)
            operator, report["take_over_seconds"] = self._hand_over(operator, signal.SIGKILL, self._number + 2)
            self._until_quiet(operator)
            operator.stop()
            operator, report["restart"] = self._restart()
            report["pod_ready_to_model_ready_seconds"] = self._ready_latency()
            return report
        finally:
            operator.stop()

    def _until_ready(self, operator: OperatorProcess) -> float:
        return round(until("the operator to be ready", operator.ready, timeout=self._timeout, interval=0.1), 2)

    def _watch_steady(self, operator: OperatorProcess) -> Report:
        since = self._plane.audit.position()
        cpu = operator.cpu_seconds()
        time.sleep(self._steady)
        verbs, writes = self._requests(since)
        return {
            "seconds": self._steady,
            "requests_per_minute": round(sum(verbs.values()) * 60 / self._steady, 1),
            "requests_by_verb": dict(verbs),
            "writes": sum(writes.values()),
            "writes_by_anyone": len([one for one in self._plane.audit.writes(since=since) if one.resource != "leases"]),
            "cpu_percent": round(100 * (operator.cpu_seconds() - cpu) / self._steady, 2),
            "memory_bytes": operator.memory(),
        }

    def _hand_over(self, leader: OperatorProcess, how: signal.Signals, index: int) -> tuple[OperatorProcess, float]:
        """Ends the leader beside a standby; seconds from the signal until a model that is made then has its report."""
        standby = OperatorProcess(self._plane.kubeconfig)
        try:
            self._until_ready(standby)
            started = time.monotonic()
            leader.process.send_signal(how)
            self._creation.create(index)
            until("the standby's work", lambda: self._is_current(index), timeout=self._timeout, interval=0.05)
            took = time.monotonic() - started
            leader.stop()
        except BaseException:
            standby.stop()
            raise
        return standby, round(took, 2)

    def _restart(self) -> tuple[OperatorProcess, Report]:
        since = self._plane.audit.position()
        operator = OperatorProcess(self._plane.kubeconfig)
        ready = self._until_ready(operator)
        started = time.monotonic()
        self._creation.create(self._number)
        until(
            "the model made after the restart",
            lambda: self._is_current(self._number),
            timeout=self._timeout,
            interval=0.05,
        )
        working = time.monotonic() - started
        self._until_quiet(operator)
        time.sleep(5.0)
        own = self._creation.requests(since)
        stale = [one for one in own if one.mutating and not self._belongs(one.name, self._number)]
        return operator, {
            "ready_seconds": ready,
            "new_model_reported_seconds": round(working, 2),
            "writes_to_unchanged_objects": len(stale),
            "first_of_these": [f"{one.verb} {one.resource} {one.namespace}/{one.name}" for one in stale[:5]],
            "requests_by_verb": dict(Counter(one.verb for one in own)),
            "memory_bytes": operator.memory(),
        }

    def _ready_latency(self) -> float | None:
        """From the last pod's Ready to the model's Ready, for one model; None when port 8000 is taken."""
        try:
            server = _pair_server()
        except OSError:
            return None
        try:
            space, model = namespace(0), name(0)
            pods = self._api.items(f"/api/v1/namespaces/{space}/pods", labelSelector=f"prebook.dev/model={model}")
            for pod in pods:
                self._api.merge(
                    f"/api/v1/namespaces/{space}/pods/{pod['metadata']['name']}/status", {"status": _ready_status()}
                )
            return round(until("Ready", lambda: self._ready(0), timeout=self._timeout, interval=0.02), 2)
        finally:
            server.shutdown()
            server.server_close()

    def _until_quiet(self, operator: OperatorProcess) -> None:
        until("an empty queue", lambda: operator.queue_depth() == 0, timeout=self._timeout, interval=0.5)
        time.sleep(3.0)

    def _status(self, index: int) -> Report:
        return dict(self._api.get(f"{PREBOOK.path(index)}/{name(index)}").get("status") or {})

    def _ready(self, index: int) -> bool:
        conditions = self._status(index).get("conditions") or ()
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def _is_current(self, index: int) -> bool:
        return _current(self._api.get(f"{PREBOOK.path(index)}/{name(index)}"))

    def _statuses_current(self) -> bool:
        """Goes on from namespace to namespace as each becomes current."""
        for index in range(min(NAMESPACES, self._number)):
            if index not in self._current:
                models = self._api.items(PREBOOK.path(index))
                wanted = len(range(index, self._number, NAMESPACES))
                if len(models) < wanted or not all(map(_current, models)):
                    return False
                self._current.add(index)
        return True

    def _requests(self, since: int) -> tuple[Counter[str], Counter[str]]:
        """The operator's requests by verb and its writes by resource."""
        own = self._creation.requests(since)
        return Counter(one.verb for one in own), Counter(one.resource for one in own if one.mutating)

    def _belongs(self, child: str, index: int) -> bool:
        return child == name(index) or child.startswith((f"{name(index)}-", f"{name(index)}."))


def _document(name: str) -> Report:
    return {
        "apiVersion": "prebook.dev/v1alpha1",
        "kind": "DisaggregatedModel",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": "hf://Qwen/Qwen3-32B", "revision": "9216db5"},
            "engine": {"image": "vllm/vllm-openai:v0.32.0"},
            "prefill": {"replicas": 1},
            "decode": {"replicas": 1},
        },
    }


PREBOOK = Contender(
    agent=AGENT,
    plural="disaggregatedmodels",
    group_path=GROUP,
    document=_document,
    kinds={
        "statefulsets": "/apis/apps/v1",
        "services": "/api/v1",
        "serviceaccounts": "/api/v1",
        "networkpolicies": "/apis/networking.k8s.io/v1",
        "modelroles": GROUP,
    },
    children=10,  # without the Secret, which nobody lists: 2 sets, 3 Services, 1 account, 2 policies, 2 roles
)


def _current(model: Report) -> bool:
    """Does the status speak of this generation, and of more than that it was noticed?"""
    status = model.get("status") or {}
    reasons = [one["reason"] for one in status.get("conditions") or () if one["type"] == "Ready"]
    told = bool(reasons) and reasons != ["NewGeneration"]
    return told and status.get("observedGeneration") == model["metadata"]["generation"]


def _ready_status() -> Report:
    conditions = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "ContainersReady", "Ready")]
    return {"phase": "Running", "podIP": POD_ADDRESS, "podIPs": [{"ip": POD_ADDRESS}], "conditions": conditions}


def _pair_server() -> ThreadingHTTPServer:
    """Stands in for a decode pod that has paired. Raises OSError when the port is taken."""
    body = json.dumps({"pairs": {"ready": 1, "possible": 1, "peers": []}}).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer((POD_ADDRESS, 8000), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _table(run: Report) -> str:
    creation, steady, restart = run["creation"], run["steady"], run["restart"]
    rows = {
        "all StatefulSets": f"{creation['all_statefulsets_seconds']} s",
        "all children": f"{creation['all_children_seconds']} s",
        "all statuses current": f"{creation['all_statuses_current_seconds']} s",
        "requests a model": creation["requests_per_model"],
        "operator CPU": f"{creation['cpu_seconds']} s",
        "memory now / peak": _mebibytes(steady["memory_bytes"]),
        "steady writes": f"{steady['writes']} in {steady['seconds']:.0f} s",
        "steady requests": f"{steady['requests_per_minute']} a minute",
        "hand-over: leader ends": f"{run['hand_over_seconds']} s",
        "take-over: leader is killed": f"{run['take_over_seconds']} s",
        "pod Ready to model Ready": f"{run['pod_ready_to_model_ready_seconds']} s",
        "restart: ready": f"{restart['ready_seconds']} s",
        "restart: new model reported": f"{restart['new_model_reported_seconds']} s",
        "restart: writes to unchanged objects": restart["writes_to_unchanged_objects"],
    }
    if (beside := run.get("lws")) is not None:
        rows |= {
            "LWS: all StatefulSets": f"{beside['all_statefulsets_seconds']} s "
            f"(our children: {creation['all_children_seconds'] / beside['all_statefulsets_seconds']:.2f} of that)",
            "LWS: last request": f"{beside['last_request_seconds']} s (ours: {creation['last_request_seconds']} s)",
            "LWS: requests a set": beside["requests_per_model"],
            "LWS: CPU": f"{beside['cpu_seconds']} s",
            "LWS: memory now / peak": _mebibytes(beside["memory_bytes"]),
        }
    width = max(map(len, rows))
    return "\n".join([f"{run['models']} models", *(f"  {name:<{width}}  {value}" for name, value in rows.items())])


def _mebibytes(memory: dict[str, int]) -> str:
    return " / ".join(f"{value / 2**20:.0f} MiB" for value in memory.values())
