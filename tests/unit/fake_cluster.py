"""A cluster of dictionaries: server-side apply as far as one field manager needs it, a StatefulSet controller that
always succeeds, and a watch that is never late. For fuzzing the reconciler; the API-server tier says what Kubernetes
really does."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from prebook_operator.api import NOTHING
from prebook_operator.cache import Cache, Seen
from prebook_operator.decide import RenderSettings
from prebook_operator.execute import Executor
from prebook_operator.kube.client import KubeClient
from prebook_operator.kube.errors import RetryLater
from prebook_operator.kube.resources import CHILDREN, MODEL, POD, STATEFUL_SET
from prebook_operator.kube.transport import Request, Response
from prebook_operator.observe import Observer
from prebook_operator.pairs import PodPairs
from prebook_operator.publish import Publisher
from prebook_operator.reconcile import Pace, Reconciler
from prebook_operator.records import Key, PodRecord, child_record, key_of_child, model_record
from tests.unit.fake_api import FakeServer, respond

KEY = Key("ns", "demo")
MODEL_PATH = MODEL.path(namespace="ns", name="demo")
WRITES = ("POST", "PATCH", "DELETE")


def fields_of(value: Any) -> dict[str, Any]:
    """FieldsV1 of what was applied; lists count as atomic."""
    if not isinstance(value, dict):
        return {}
    return {f"f:{name}": fields_of(member) for name, member in value.items()}


class FakeCluster(FakeServer):
    """Objects by path. `fail_at` makes the n-th write from now the last that the operator lives to see."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []
        self.fail_at: int | None = None
        self._uids = 0

    async def send(self, request: Request) -> Response:
        if request.method in WRITES:
            self.writes.append(f"{request.method} {request.path}")
            if self.fail_at is not None:
                self.fail_at -= 1
                if self.fail_at < 0:
                    raise RetryLater("dead")
        return await super().send(request)

    def _serve(self, request: Request) -> Response:
        if request.method == "PATCH":
            return self._apply(request)
        if request.method == "DELETE":
            known = self.objects.get(request.path)
            if known is None:
                return respond(404, {"message": "not found"})
            if request.body["preconditions"]["uid"] != known["metadata"]["uid"]:  # type: ignore[index]
                return respond(409, {"message": "uid"})
            del self.objects[request.path]
            return respond(200, {})
        if request.method == "GET" and request.path.endswith("/events"):
            return respond(200, {"items": self._events(request.query["fieldSelector"])})
        return super()._serve(request)

    def _events(self, selector: str) -> list[dict[str, Any]]:
        uid, reason = (part.partition("=")[2] for part in selector.split(","))
        return [
            one
            for path, one in self.objects.items()
            if "/events/" in path and one["regarding"]["uid"] == uid and one["reason"] == reason
        ]

    def _apply(self, request: Request) -> Response:
        body: dict[str, Any] = json.loads(json.dumps(request.body))
        path, _, subresource = (
            request.path.partition("/status") if request.path.endswith("/status") else (request.path, "", "")
        )
        known = self.objects.get(path)
        uid, version = body["metadata"].pop("uid", None), body["metadata"].pop("resourceVersion", None)
        if known is None:
            return respond(409, {"message": "uid mismatch"}) if uid else self._keep(path, body, None)
        if version not in (None, known["metadata"]["resourceVersion"]):
            return respond(409, {"message": "modified"})
        if uid not in (None, known["metadata"]["uid"]):
            return respond(422, {"message": "metadata.uid: Invalid value: field is immutable"})
        del subresource
        if request.path.endswith("/status"):
            return self._keep(path, {**known, "status": body["status"]}, known)
        return self._keep(path, {**body, "status": known.get("status", {})}, known)

    def _keep(self, path: str, body: dict[str, Any], known: dict[str, Any] | None) -> Response:
        self._version += 1
        metadata = body["metadata"]
        if known is None:
            self._uids += 1
        spec_changed = known is None or known.get("spec") != body.get("spec")
        generation = 0 if known is None else known["metadata"]["generation"]
        metadata["uid"] = f"uid-{self._uids}" if known is None else known["metadata"]["uid"]
        metadata["generation"] = generation + 1 if spec_changed else generation
        metadata["resourceVersion"] = str(self._version)
        ours = {name: member for name, member in body.items() if name not in ("apiVersion", "kind", "status")}
        owned = {
            **ours,
            "metadata": {name: metadata[name] for name in ("labels", "ownerReferences") if name in metadata},
        }
        metadata["managedFields"] = [{"manager": "prebook", "operation": "Apply", "fieldsV1": fields_of(owned)}]
        self.objects[path] = json.loads(json.dumps(body))
        return respond(200, body)

    # -- what users and controllers do -------------------------------------------------------------------------------

    def put_model(self, spec: dict[str, Any]) -> None:
        """A user creates or changes the model."""
        known = self.objects.get(MODEL_PATH)
        body = {
            "apiVersion": MODEL.api_version,
            "kind": MODEL.kind,
            "metadata": {"name": "demo", "namespace": "ns"},
            "spec": spec,
            "status": (known or {}).get("status", {}),
        }
        self._keep(MODEL_PATH, body, known)

    def children(self) -> dict[str, dict[str, Any]]:
        """Everything of the model, by path, without the model, Events and the Secret."""
        skipped = ("/events/", "/secrets/", "/disaggregatedmodels/")
        return {path: one for path, one in self.objects.items() if not any(part in path for part in skipped)}

    def run_controllers(self) -> None:
        """Every StatefulSet gets all its pods, ready at once."""
        for one in self.children().values():
            if one["kind"] == STATEFUL_SET.kind:
                count = one["spec"]["replicas"]
                wanted = {
                    "observedGeneration": one["metadata"]["generation"],
                    "replicas": count,
                    "readyReplicas": count,
                    "updatedReplicas": count,
                }
                if one.get("status") != wanted:
                    self._version += 1
                    one["status"] = wanted
                    one["metadata"]["resourceVersion"] = str(self._version)

    def pods(self) -> list[PodRecord]:
        """The pods that those sets have."""
        return [
            PodRecord(
                name=f"{one['metadata']['name']}-{index}",
                uid=f"{one['metadata']['uid']}-{index}",
                version=1,
                owner=one["metadata"]["uid"],
                role=one["metadata"]["labels"]["prebook.dev/role"],
                revision=one["metadata"]["labels"]["prebook.dev/revision"],
                ip="192.0.2.1",
                scheduled=True,
                running=True,
                ready=True,
                deleting=False,
                trouble="",
                detail="",
                restarts=0,
            )
            for one in self.children().values()
            if one["kind"] == STATEFUL_SET.kind
            for index in range(one.get("status", {}).get("replicas", 0))
        ]


class Paired:
    """Every decode pod says that it is paired with every prefill pod."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    async def read(self, pods: Iterable[PodRecord]) -> dict[str, PodPairs]:
        """See PairsReader."""
        everyone = self._cluster.pods()

        def partners(pod: PodRecord) -> int:
            return sum(1 for one in everyone if one.role == "prefill" and one.revision == pod.revision)

        return {pod.name: PodPairs(ready=partners(pod), possible=partners(pod)) for pod in pods}


class FakeOperator:
    """A reconciler with an empty memory, as after a start."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.cache = Cache()
        client = KubeClient(cluster)
        observer = Observer(self.cache, client, Paired(cluster))
        self.executor = Executor(client, self.cache, observer)
        self._reconciler = Reconciler(
            self.cache,
            observer,
            self.executor,
            Publisher(client, self.cache, reporter="test"),
            settings=RenderSettings(
                operator_image="image", operator_namespace=None, allow=NOTHING, has_pod_monitor=False
            ),
            pace=Pace(patience=0.0),
            now=lambda: "2030-01-01T00:00:00Z",
        )

    def watch(self) -> None:
        """The cache learns everything."""
        by_kind = {resource.kind: resource for resource in CHILDREN}
        present = set()
        for one in self.cluster.children().values():
            resource, key = by_kind[one["kind"]], key_of_child({**one, "metadata": {"labels": {}, **one["metadata"]}})
            if key is None:
                continue  # without our label it is not watched
            present.add((resource.plural, one["metadata"]["name"]))
            self.cache.see(Seen(resource.plural, key, child_record(one, resource), False, False))
        for place, record in dict(self.cache.children(KEY)).items():
            if place not in present:
                self.cache.forget_child(KEY, record)
        self.cache.see(Seen(MODEL.plural, KEY, model_record(self.cluster.objects[MODEL_PATH]), False, False))
        pods = {pod.name: pod for pod in self.cluster.pods()}
        for name, known in dict(self.cache.pods(KEY)).items():
            if pods.get(name) != known:
                self.cache.see(Seen(POD.plural, KEY, known, True, False))
        for pod in pods.values():
            self.cache.see(Seen(POD.plural, KEY, pod, False, False))

    async def look(self) -> None:
        """One reconciliation of what is."""
        self.watch()
        await self._reconciler.reconcile(KEY)
        self.cluster.run_controllers()

    async def settle(self, *, limit: int = 12) -> None:
        """Looks until a look writes nothing. Raises AssertionError when that never happens."""
        for _ in range(limit):
            before = len(self.cluster.writes)
            await self.look()
            if len(self.cluster.writes) == before:
                return
        raise AssertionError(f"it goes on writing: {self.cluster.writes[-8:]}")
