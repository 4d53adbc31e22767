"""What the operator asks a cluster before it starts: is our API served and new enough, which optional kinds exist, may
nodes be read. Which optional kinds exist is asked again now and then (see `kinds`).

Nothing of it needs rights that a namespaced operator lacks: discovery and OpenAPI documents are open to every
authenticated client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prebook_operator.api.crd import crds
from prebook_operator.kube.client import KubeClient
from prebook_operator.kube.errors import Forbidden, NotFound, SchemaTooOld
from prebook_operator.kube.resources import CHILDREN, MODEL, NODE, OPTIONAL, POD, POD_MONITOR, Resource

UPGRADE = "prebook crds | kubectl apply --server-side --force-conflicts -f -"


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What this cluster offers: which of the kinds that a cluster may lack, and whether nodes may be read."""

    optional: frozenset[Resource]
    nodes: bool

    @property
    def watched(self) -> tuple[Resource, ...]:
        """All kinds that exist and may be watched."""
        children = (resource for resource in CHILDREN if resource not in OPTIONAL or resource in self.optional)
        return (MODEL, *children, POD, *((NODE,) if self.nodes else ()))

    @property
    def pod_monitors(self) -> bool:
        """Is there a kind PodMonitor?"""
        return POD_MONITOR in self.optional


async def examine(client: KubeClient) -> Capabilities:
    """Looks at the cluster. Raises SchemaTooOld with the command that helps, and RetryLater."""
    await check_schema(client)
    return Capabilities(optional=await optional_kinds(client), nodes=await _nodes_readable(client))


async def optional_kinds(client: KubeClient) -> frozenset[Resource]:
    """The optional kinds that are served. Raises KubeError."""
    return frozenset([resource for resource in OPTIONAL if await _served(client, resource)])


async def check_schema(client: KubeClient) -> None:
    """Raises SchemaTooOld unless the served schemas of our kinds have every field that this operator knows."""
    try:
        document = await client.get_path(f"/openapi/v3{MODEL.prefix}")
    except NotFound:
        raise SchemaTooOld(f"the cluster does not serve {MODEL.api_version}; install it: {UPGRADE}") from None
    served = (document.get("components") or {}).get("schemas") or {}
    for manifest in crds().values():
        kind = manifest["spec"]["names"]["kind"]
        theirs = next((schema for name, schema in served.items() if name.endswith(f".{kind}")), None)
        if theirs is None:
            raise SchemaTooOld(f"the cluster does not serve {kind}; install it: {UPGRADE}")
        ours = manifest["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        missing = sorted(set(_fields(ours)) - set(_fields(theirs)))
        if missing:
            more = f" and {len(missing) - 3} more fields" if len(missing) > 3 else ""
            raise SchemaTooOld(
                f"the cluster serves an older schema of {kind} than this operator needs: it lacks "
                f"{', '.join(missing[:3])}{more}; upgrade it: {UPGRADE}"
            )


def _fields(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Paths of all fields below `spec` and `status`."""
    for name, sub in (schema.get("properties") or {}).items():
        if not path and name not in ("spec", "status"):
            continue
        here = f"{path}.{name}" if path else name
        yield here
        yield from _fields(_resolved(sub), here)
    items = schema.get("items")
    if isinstance(items, Mapping):
        yield from _fields(_resolved(items), f"{path}[]")


def _resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    # The server wraps a schema that has a default into allOf.
    every = schema.get("allOf")
    return every[0] if isinstance(every, list) and len(every) == 1 and isinstance(every[0], Mapping) else schema


async def _served(client: KubeClient, resource: Resource) -> bool:
    try:
        document = await client.get_path(resource.prefix)
    except NotFound:
        return False
    return any(entry.get("name") == resource.plural for entry in document.get("resources") or ())


async def _nodes_readable(client: KubeClient) -> bool:
    try:
        await client.list_one(NODE)
    except Forbidden:
        return False
    return True
