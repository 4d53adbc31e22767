"""The verbs that the operator uses, on plain JSON objects.

There is no `update` except for the leader lease: everything we own is written by server-side apply under one field
manager. Every write passes the *write gate*: the seconds for which the leader lease is certain to be ours. Without
them nothing is sent, and the request's own timeout never outlives them, so a write cannot arrive after somebody else
has become leader."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from prebook_operator.kube.errors import Call, Conflict, Invalid, KubeError, NotLeader, RetryLater, from_response
from prebook_operator.kube.fields import MANAGER
from prebook_operator.kube.resources import Resource
from prebook_operator.kube.transport import JsonObject, Request, Response, Transport

METADATA_ONLY: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
APPLY_TYPE: Final = "application/apply-patch+yaml"
NEVER_STORED: Final = "1"
"""A resourceVersion that no stored object can have: etcd's first write is revision 2. In an apply it means *create,
or fail*."""
MAX_COOL_DOWN: Final = 60.0

WriteGate = Callable[[], float]
"""Seconds for which this process may write; zero or less: not now."""
Observer = Callable[[str, str, str, float], None]
"""Called after every request with verb, plural, status code ("error" without an answer) and seconds."""


def _open_gate() -> float:
    return float("inf")


def _unobserved(verb: str, plural: str, code: str, seconds: float) -> None:
    del verb, plural, code, seconds


class KubeClient:
    """Typed by verb, not by kind. Errors: see `kube.errors`."""

    def __init__(
        self,
        transport: Transport,
        *,
        timeout: float = 15.0,
        gate: WriteGate = _open_gate,
        observer: Observer = _unobserved,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._timeout = timeout
        self._gate = gate
        self._observer = observer
        self._clock = clock
        self._cool_until = 0.0

    async def close(self) -> None:
        """Ends all connections."""
        await self._transport.close()

    async def get(self, resource: Resource, *, namespace: str | None, name: str) -> JsonObject:
        """The object. Raises NotFound."""
        path = resource.path(namespace=namespace, name=name)
        return (await self._call("get", resource, "GET", path)).json()

    async def get_metadata(self, resource: Resource, *, namespace: str, name: str) -> JsonObject:
        """Only the object's metadata: for Secrets, whose content is none of our business."""
        path = resource.path(namespace=namespace, name=name)
        response = await self._call("get", resource, "GET", path, headers={"Accept": METADATA_ONLY})
        metadata: JsonObject = response.json().get("metadata") or {}
        return metadata

    async def list_one(self, resource: Resource) -> JsonObject:
        """A list of at most one object, to learn whether listing is allowed. Raises Forbidden."""
        return (await self._call("list", resource, "GET", resource.path(), query={"limit": "1"})).json()

    async def list_some(
        self, resource: Resource, *, namespace: str, fields: Mapping[str, str], limit: int
    ) -> list[JsonObject]:
        """At most `limit` objects of a namespace whose fields have these values. Raises Forbidden."""
        query = {"fieldSelector": ",".join(f"{name}={value}" for name, value in fields.items()), "limit": str(limit)}
        response = await self._call("list", resource, "GET", resource.path(namespace=namespace), query=query)
        items: list[JsonObject] = response.json().get("items") or []
        return items

    async def get_path(self, path: str) -> JsonObject:
        """Any JSON document of the server, such as /version or /openapi/v3."""
        request = Request(method="GET", path=path, query={}, headers={}, body=None, timeout=self._timeout)
        return (await self._send(request, verb="get", plural=path.strip("/").split("/")[0])).json()

    async def create(self, resource: Resource, body: Mapping[str, Any], *, namespace: str) -> JsonObject:
        """Creates. Raises Conflict when the name is taken."""
        path = resource.path(namespace=namespace)
        query = {"fieldManager": MANAGER}
        response = await self._write("create", resource, "POST", path, query=query, body=dict(body))
        return response.json()

    async def create_by_apply(self, resource: Resource, intent: Mapping[str, Any], *, namespace: str) -> JsonObject:
        """Server-side apply that can only create: an existing object of that name, whoever owns it, is a Conflict and
        stays as it is."""
        return await self._apply(resource, intent, namespace=namespace, extra={"resourceVersion": NEVER_STORED})

    async def create_by_plain_apply(
        self, resource: Resource, intent: Mapping[str, Any], *, namespace: str
    ) -> JsonObject:
        """Server-side apply without a precondition, for a name that was just seen to be free."""
        return await self._apply(resource, intent, namespace=namespace, extra={})

    async def update_by_apply(
        self, resource: Resource, intent: Mapping[str, Any], *, namespace: str, uid: str
    ) -> JsonObject:
        """Server-side apply to exactly the object with this UID. Raises Conflict when it is gone or has been replaced
        by another of the same name."""
        return await self._apply(resource, intent, namespace=namespace, extra={"uid": uid})

    async def apply_status(
        self, resource: Resource, *, namespace: str, name: str, uid: str, status: Mapping[str, Any]
    ) -> JsonObject:
        """Server-side apply of the status subresource of exactly this object. Raises Conflict or NotFound when it is
        gone."""
        intent = {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": {"name": name, "namespace": namespace},
            "status": dict(status),
        }
        return await self._apply(resource, intent, namespace=namespace, extra={"uid": uid}, subresource="status")

    async def replace(self, resource: Resource, body: Mapping[str, Any], *, namespace: str, name: str) -> JsonObject:
        """PUT with the resourceVersion in `body`; not gated, for the lease itself is what opens the gate. Raises
        Conflict, NotFound."""
        path = resource.path(namespace=namespace, name=name)
        return (await self._call("update", resource, "PUT", path, body=dict(body))).json()

    async def create_ungated(self, resource: Resource, body: Mapping[str, Any], *, namespace: str) -> JsonObject:
        """POST for the lease. Raises Conflict when it exists."""
        return (
            await self._call("create", resource, "POST", resource.path(namespace=namespace), body=dict(body))
        ).json()

    async def delete(self, resource: Resource, *, namespace: str, name: str, uid: str) -> None:
        """Background deletion of exactly this object. Raises NotFound, and Conflict when the name now belongs to
        another object."""
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        await self._write("delete", resource, "DELETE", resource.path(namespace=namespace, name=name), body=body)

    async def _apply(
        self,
        resource: Resource,
        intent: Mapping[str, Any],
        *,
        namespace: str,
        extra: Mapping[str, str],
        subresource: str | None = None,
    ) -> JsonObject:
        metadata = {**intent["metadata"], **extra}
        path = resource.path(namespace=namespace, name=metadata["name"], subresource=subresource)
        response = await self._write(
            "apply",
            resource,
            "PATCH",
            path,
            query={"fieldManager": MANAGER, "force": "true"},
            headers={"Content-Type": APPLY_TYPE},
            body={**intent, "metadata": metadata},
        )
        return response.json()

    async def _write(self, verb: str, resource: Resource, method: str, path: str, **rest: Any) -> Response:
        await self._wait_until_cool()
        remaining = self._gate()
        if remaining <= 0:
            raise NotLeader("not the leader: the write was not sent", call=Call(method=method, path=path))
        return await self._call(verb, resource, method, path, seconds=min(self._timeout, remaining), **rest)

    async def _call(
        self,
        verb: str,
        resource: Resource,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Any | None = None,
        seconds: float | None = None,
    ) -> Response:
        request = Request(
            method=method,
            path=path,
            query=query or {},
            headers=headers or {},
            body=body,
            timeout=seconds or self._timeout,
        )
        return await self._send(request, verb=verb, plural=resource.plural)

    async def _send(self, request: Request, *, verb: str, plural: str) -> Response:
        started = self._clock()
        code = "error"
        try:
            response = await self._transport.send(request)
            code = str(response.status)
        finally:
            self._observer(verb, plural, code, self._clock() - started)
        if response.status < 400:
            return response
        call = Call(method=request.method, path=request.path)
        error = from_response(call=call, status=response.status, headers=response.headers, body=response.body)
        raise self._judged(error)

    def _judged(self, error: KubeError) -> KubeError:
        if isinstance(error, Invalid) and "metadata.uid: Invalid value" in error.message:
            # An apply that names the UID of an object which has been replaced meanwhile: a precondition, although the
            # server calls it validation.
            return Conflict(error.message, call=error.call, status=error.status)
        if isinstance(error, RetryLater):
            if error.status == 500 and "failed to create typed patch object" in error.message:
                # The server's word for an apply that names a field which the schema lacks. It will say so for ever.
                return Invalid(error.message, call=error.call, status=error.status)
            if error.status == 429 and error.after:
                # The server asks everyone to wait, not only the caller that happened to be refused.
                self._cool_until = max(self._cool_until, self._clock() + min(error.after, MAX_COOL_DOWN))
        return error

    async def _wait_until_cool(self) -> None:
        pause = self._cool_until - self._clock()
        if pause > 0:
            await asyncio.sleep(pause)
