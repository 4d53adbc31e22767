"""A real operator in a thread, under the rights that the chart ships, and stand-ins for the engines it asks.

The operator runs unchanged: it watches with kopf, elects itself, and writes over HTTPS as a service account that has
exactly the rules of `rbac.py`. Faults come in through its `Transport`, the seam between a finished request and the
network."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prebook_operator.app import Operator, user_agent
from prebook_operator.kube.auth import Credentials
from prebook_operator.kube.errors import RetryLater
from prebook_operator.kube.transport import ClusterTransport, Request, Response
from prebook_operator.rbac import Reach, operator_rules
from prebook_operator.records import Key
from prebook_operator.settings import Settings
from tests.kube.audit import Request as Audited
from tests.kube.controlplane import ControlPlane, wait_for
from tests.kube.rest import Json

MODELS = "/apis/prebook.dev/v1alpha1/namespaces/{}/disaggregatedmodels"
WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
PATIENCE = 60.0
"""Seconds that a test waits for what takes one on an idle machine."""


class Faulty:
    """A transport that a test can break. `fault(number, request)` is asked before each write, counted from 1."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self._inner: ClusterTransport | None = None
        self.dead = threading.Event()
        self.sent: list[Request] = []
        self.fault: Callable[[int, Request], Response | None] = lambda _number, _request: None
        self.die_at: int | None = None
        self.die_after_sending = False

    async def send(self, request: Request) -> Response:
        if self.dead.is_set():
            raise RetryLater("the operator is dead")
        if self._inner is None:
            self._inner = ClusterTransport(await Credentials.load(self._kubeconfig), user_agent=user_agent())
        if request.method not in WRITES or "/leases" in request.path:
            return await self._inner.send(request)
        self.sent.append(request)
        last = len(self.sent) == self.die_at
        if last:
            self.dead.set()
        if last and not self.die_after_sending:
            raise RetryLater("the operator died before this request")
        answer = self.fault(len(self.sent), request) or await self._inner.send(request)
        if last:
            raise RetryLater("the operator died after this request")
        return answer

    async def close(self) -> None:
        if self._inner is not None:
            await self._inner.close()


class OperatorThread:
    """One operator process, as far as a thread can be one."""

    def __init__(self, settings: Settings, transport: Faulty) -> None:
        self.settings = settings
        self.transport = transport
        self.operator: Operator | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._made = threading.Event()
        self.error: BaseException | None = None

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except BaseException as error:
            self.error = error
        finally:
            self._made.set()

    async def _main(self) -> None:
        self.operator = Operator(self.settings, transport=self.transport)
        self._made.set()
        await self.operator.run()

    @property
    def running(self) -> Operator:
        """The operator; fails when it did not start."""
        if self.operator is None:
            raise AssertionError(f"the operator did not start: {self.error}")
        return self.operator

    def start(self, *, synced: bool = True) -> OperatorThread:
        """Starts, and waits until its cache is complete."""
        self._thread.start()
        self._made.wait(PATIENCE)
        if synced:
            wait_for("the operator's cache to be complete", self.is_synced, seconds=PATIENCE)
        return self

    def is_synced(self) -> bool:
        """Whether all lists have been read; raises what ended the operator."""
        if not self._thread.is_alive():
            raise AssertionError(f"the operator has ended: {self.error!r}")
        return self.running.synced.is_set()

    def call(self, function: Callable[[Operator], Any]) -> Any:
        """Runs `function` in the operator's loop."""

        async def run() -> Any:
            return function(self.running)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(PATIENCE)

    def stop(self) -> None:
        """SIGTERM: drains, releases the lease, ends."""
        if self._thread.is_alive() and self.operator is not None:
            self._loop.call_soon_threadsafe(self.operator.stopping.set)
            self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the operator does not end"

    def kill(self) -> None:
        """SIGKILL, as the cluster sees it: from this moment nothing reaches the network, the release of the lease
        included."""
        self.transport.dead.set()
        if self.operator is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.operator.stopping.set)
            self._thread.join(PATIENCE)

    def leading(self) -> bool:
        """Does its metric say so?"""
        value = self.running.metrics.registry.get_sample_value("prebook_leader")
        return value == 1.0

    def idle(self) -> bool:
        """Is nothing due or in work?"""
        return bool(self.call(lambda operator: operator.queue.depth() == 0 and not operator.queue._active))


class Engines:
    """Answers for every decode pod on 127.0.0.1: `pairs` is what they all say."""

    def __init__(self) -> None:
        self.pairs: Json = {"ready": 0, "possible": 0, "peers": []}
        self.asked = 0
        engines = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                engines.asked += 1
                body = json.dumps({"role": "decode", "ready": True, "pairs": engines.pairs}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def paired(self, ready: int, possible: int) -> None:
        """Every decode pod now says this."""
        self.pairs = {"ready": ready, "possible": possible, "peers": []}

    def close(self) -> None:
        """Ends."""
        self._server.shutdown()
        self._server.server_close()


class World:
    """One namespace with a service account for operators, and shorthands for what tests look at."""

    def __init__(self, control_plane: ControlPlane, namespace: str, engines: Engines) -> None:
        self.cp = control_plane
        self.api = control_plane.api
        self.namespace = namespace
        self.engines = engines
        self.operators: list[OperatorThread] = []
        self.models = MODELS.format(namespace)
        self.user = f"system:serviceaccount:{namespace}:operator"
        self._grant()
        self.kubeconfig = control_plane.service_account_kubeconfig(namespace, "operator")

    def _grant(self) -> None:
        base = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{self.namespace}"
        self.api.create(f"/api/v1/namespaces/{self.namespace}/serviceaccounts", {"metadata": {"name": "operator"}})
        self.api.create(
            f"{base}/roles", {"metadata": {"name": "operator"}, "rules": operator_rules(Reach.WATCHED, Reach.HOME)}
        )
        subject = {"kind": "ServiceAccount", "name": "operator", "namespace": self.namespace}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "operator"}
        self.api.create(
            f"{base}/rolebindings", {"metadata": {"name": "operator"}, "subjects": [subject], "roleRef": reference}
        )

    def settings(self, **changes: Any) -> Settings:
        """Settings of a quick operator for this namespace."""
        base = Settings(
            image="localhost/prebook:test",
            namespaces=(self.namespace,),
            lease_namespace=self.namespace,
            own_namespace=self.namespace,
            kubeconfig=self.kubeconfig,
            health_port=0,
            metrics_port=0,
            bind="127.0.0.1",
            pod_port=self.engines.port,
            pairing=0.5,
            drain=5.0,
        )
        return replace(base, **changes)

    def operator(
        self, *, prepare: Callable[[Faulty], None] | None = None, synced: bool = True, **changes: Any
    ) -> OperatorThread:
        """Starts an operator; it is stopped at the end of the test. `prepare` may break its transport beforehand."""
        settings = self.settings(**changes)
        transport = Faulty(settings.kubeconfig or self.kubeconfig)
        if prepare is not None:
            prepare(transport)
        thread = OperatorThread(settings, transport)
        self.operators.append(thread)
        return thread.start(synced=synced)

    def close(self) -> None:
        """Stops what still runs."""
        for operator in self.operators:
            operator.kill()

    def create(self, document: Json) -> Json:
        """Creates a model."""
        return self.api.create(
            self.models, {**document, "metadata": {**document["metadata"], "namespace": self.namespace}}
        )

    def change(self, name: str, spec: Json) -> Json:
        """Merges into a model's spec."""
        return self.api.merge(f"{self.models}/{name}", {"spec": spec})

    def status(self, name: str) -> Json:
        """A model's status."""
        return dict(self.api.get(f"{self.models}/{name}").get("status") or {})

    def condition(self, name: str, kind: str) -> Json:
        """One condition; empty when it is not there."""
        found = (one for one in self.status(name).get("conditions") or () if one["type"] == kind)
        return next(found, {})

    def wait_condition(self, name: str, kind: str, status: str, reason: str | None = None) -> Json:
        """Waits for a condition of the model's present generation; returns it."""

        def holds() -> bool:
            generation = self.api.get(f"{self.models}/{name}")["metadata"]["generation"]
            found = self.condition(name, kind)
            return (
                found.get("status") == status
                and found.get("observedGeneration") == generation
                and reason in (None, found.get("reason"))
            )

        try:
            wait_for(f"{kind}={status} {reason or ''}", holds, seconds=PATIENCE)
        except TimeoutError as error:
            raise AssertionError(f"{error}; status: {json.dumps(self.status(name), indent=1)}") from None
        return self.condition(name, kind)

    def list(self, plural: str, *, group: str = "") -> list[Json]:
        """Objects of one kind in the namespace that belong to any model."""
        prefix = f"/apis/{group}" if group else "/api/v1"
        return self.api.items(
            f"{prefix}/namespaces/{self.namespace}/{plural}", labelSelector="app.kubernetes.io/managed-by=prebook"
        )

    def sets(self) -> list[str]:
        """Names of the StatefulSets."""
        return sorted(one["metadata"]["name"] for one in self.list("statefulsets", group="apps/v1"))

    def children(self) -> dict[str, Json]:
        """Everything that models own, except pods, by kind and name."""
        kinds = {
            "statefulsets": "apps/v1",
            "services": "",
            "serviceaccounts": "",
            "secrets": "",
            "networkpolicies": "networking.k8s.io/v1",
            "poddisruptionbudgets": "policy/v1",
            "modelroles": "prebook.dev/v1alpha1",
            "resourceclaimtemplates": "resource.k8s.io/v1",
        }
        return {
            f"{plural}/{one['metadata']['name']}": one
            for plural, group in kinds.items()
            for one in self.list(plural, group=group)
        }

    def front(self, name: str) -> str:
        """Revision that the front Service selects."""
        service = self.api.get(f"/api/v1/namespaces/{self.namespace}/services/{name}")
        return str(service["spec"]["selector"].get("prebook.dev/revision", ""))

    def writes(self, since: int, *, user: str | None = None) -> list[Audited]:
        """What operators of this namespace wrote since a position, without the leader lease."""
        return [one for one in self.cp.audit.writes(since=since, user=user or self.user) if one.resource != "leases"]

    def settle(self, operator: OperatorThread, name: str) -> Json:
        """Waits until the model's sets exist, its report speaks of its generation, and nothing is due; returns its
        status."""

        def settled() -> bool:
            model = self.api.get(f"{self.models}/{name}")
            status = model.get("status") or {}
            reason = next((one["reason"] for one in status.get("conditions") or () if one["type"] == "Ready"), "")
            current = status.get("observedGeneration") == model["metadata"]["generation"]
            return current and reason not in ("", "NewGeneration") and operator.idle()

        wait_for(f"{name} to settle", settled, seconds=PATIENCE)
        return self.status(name)

    def key(self, name: str) -> Key:
        """The model's key."""
        return Key(self.namespace, name)
