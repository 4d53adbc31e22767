"""What the operator asks a cluster before it starts: an old schema is refused with the command that helps."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from prebook_operator.api.crd import crds
from prebook_operator.cluster import UPGRADE, check_schema, examine, optional_kinds
from prebook_operator.kinds import OptionalKinds
from prebook_operator.kube.client import KubeClient
from prebook_operator.kube.errors import SchemaTooOld
from prebook_operator.kube.resources import CLAIM_TEMPLATE, MODEL, NODE, POD_MONITOR, Resource
from prebook_operator.kube.transport import Request, Response
from tests.unit.fake_api import FakeServer, respond


def openapi() -> dict[str, Any]:
    """The document that a server with our CRDs serves."""
    schemas = {
        f"dev.prebook.v1alpha1.{crd['spec']['names']['kind']}": crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        for crd in crds().values()
    }
    return {"components": {"schemas": copy.deepcopy(schemas)}}


def serving(document: dict[str, Any], *, groups: dict[str, list[str]], nodes: int = 200) -> KubeClient:
    def answer(request: Request) -> Response:
        if request.path == f"/openapi/v3{MODEL.prefix}":
            return respond(200, document) if document else respond(404, {"message": "no"})
        if request.path == NODE.path():
            return respond(nodes, {"items": []} if nodes == 200 else {"message": "forbidden"})
        names = groups.get(request.path)
        return (
            respond(404, {"message": "no"})
            if names is None
            else respond(200, {"resources": [{"name": n} for n in names]})
        )

    server = FakeServer()
    server.answer = answer
    return KubeClient(server)


async def test_our_own_schema_is_new_enough() -> None:
    await check_schema(serving(openapi(), groups={}))


async def test_a_missing_field_is_named_with_the_remedy() -> None:
    document = openapi()
    spec = document["components"]["schemas"]["dev.prebook.v1alpha1.DisaggregatedModel"]["properties"]["spec"]
    del spec["properties"]["transfer"]["properties"]["leaseSeconds"]
    with pytest.raises(SchemaTooOld, match=r"spec\.transfer\.leaseSeconds") as caught:
        await check_schema(serving(document, groups={}))
    assert UPGRADE in caught.value.message


async def test_a_cluster_without_the_kinds_is_told_how_to_get_them() -> None:
    with pytest.raises(SchemaTooOld, match="does not serve"):
        await check_schema(serving({}, groups={}))


async def test_optional_kinds_and_nodes() -> None:
    groups = {CLAIM_TEMPLATE.prefix: ["resourceclaimtemplates"], POD_MONITOR.prefix: ["servicemonitors"]}
    found = await examine(serving(openapi(), groups=groups))
    assert CLAIM_TEMPLATE in found.watched
    assert POD_MONITOR not in found.watched
    assert (found.nodes, found.pod_monitors) == (True, False)
    narrow = await examine(serving(openapi(), groups={}, nodes=403))
    assert narrow.nodes is False
    assert NODE not in narrow.watched
    assert CLAIM_TEMPLATE not in narrow.watched


async def test_a_kind_that_comes_or_goes_is_told_once_and_a_silent_server_changes_nothing() -> None:
    groups: dict[str, list[str]] = {CLAIM_TEMPLATE.prefix: ["resourceclaimtemplates"]}
    client = serving(openapi(), groups=groups)
    told: list[frozenset[Resource]] = []
    kinds = OptionalKinds(client, await optional_kinds(client), on_change=told.append, period=60.0)
    await kinds.look()
    assert told == []
    groups[POD_MONITOR.prefix] = ["podmonitors"]
    await kinds.look()
    await kinds.look()
    assert told == [frozenset({CLAIM_TEMPLATE, POD_MONITOR})]
    del groups[POD_MONITOR.prefix]
    await kinds.look()
    assert told[1:] == [frozenset({CLAIM_TEMPLATE})]
    silent = FakeServer()
    silent.answer = lambda _request: respond(503, {"message": "busy"})
    unanswered = OptionalKinds(KubeClient(silent), frozenset({POD_MONITOR}), on_change=told.append, period=60.0)
    await unanswered.look()
    assert len(told) == 2
