"""The client: what a status code means, what is sent, and that nothing is written without the lease."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prebook_operator.kube.client import KubeClient
from prebook_operator.kube.errors import (
    Call,
    Conflict,
    Forbidden,
    Invalid,
    KubeError,
    NamespaceGone,
    NotFound,
    NotLeader,
    Refused,
    RetryLater,
    from_response,
    shorten,
)
from prebook_operator.kube.resources import MODEL, NODE, SERVICE
from prebook_operator.kube.transport import Response
from tests.unit.fake_api import FakeServer, respond

CALL = Call(method="PATCH", path="/x")
INTENT = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a", "namespace": "ns"}, "spec": {}}


def judge(status: int, body: Any = None, **headers: str) -> KubeError:
    response = respond(status, body or {"message": "m"}, **headers)
    return from_response(call=CALL, status=status, headers=response.headers, body=response.body)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, Invalid),
        (401, Forbidden),
        (403, Forbidden),
        (404, NotFound),
        (405, Refused),
        (409, Conflict),
        (422, Invalid),
        (429, RetryLater),
        (500, RetryLater),
        (503, RetryLater),
        (599, RetryLater),
    ],
)
def test_what_a_status_means(status: int, kind: type[KubeError]) -> None:
    assert type(judge(status)) is kind


def test_a_namespace_that_ends_is_not_a_missing_right() -> None:
    body = {"message": "m", "details": {"causes": [{"reason": "NamespaceTerminating"}]}}
    assert type(judge(403, body)) is NamespaceGone


def test_retry_after_comes_from_the_header_or_the_body() -> None:
    for error in (judge(429, **{"Retry-After": "3"}), judge(429, {"details": {"retryAfterSeconds": 3}})):
        assert isinstance(error, RetryLater)
        assert error.after == 3.0
    dated = judge(503, **{"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"})
    assert isinstance(dated, RetryLater)
    assert dated.after is None


@given(st.integers(400, 599), st.binary(max_size=3000), st.dictionaries(st.just("Retry-After"), st.text(max_size=9)))
def test_any_answer_becomes_an_error_of_bounded_length(status: int, body: bytes, headers: dict[str, str]) -> None:
    error = from_response(call=CALL, status=status, headers=headers, body=body)
    assert len(str(error)) < 800
    assert "\n" not in error.message


def test_credentials_never_enter_a_message() -> None:
    assert "s3cret" not in shorten("401 for Authorization: Bearer s3cret.token and\nmore")


async def test_without_the_lease_nothing_is_sent() -> None:
    server = FakeServer()
    client = KubeClient(server, gate=lambda: 0.0)
    for write in (
        client.create(SERVICE, INTENT, namespace="ns"),
        client.create_by_apply(SERVICE, INTENT, namespace="ns"),
        client.update_by_apply(SERVICE, INTENT, namespace="ns", uid="u"),
        client.apply_status(MODEL, namespace="ns", name="a", uid="u", status={}),
        client.delete(SERVICE, namespace="ns", name="a", uid="u"),
    ):
        with pytest.raises(NotLeader):
            await write
    assert server.requests == []
    with pytest.raises(NotFound):
        await client.get(NODE, namespace=None, name="n")


async def test_a_write_does_not_outlive_the_lease() -> None:
    server = FakeServer()
    server.answer = lambda _request: respond(200, {})
    await KubeClient(server, timeout=15.0, gate=lambda: 2.5).create(SERVICE, INTENT, namespace="ns")
    assert server.requests[0].timeout == 2.5


async def test_preconditions_are_sent() -> None:
    server = FakeServer()
    server.answer = lambda _request: respond(200, {})
    client = KubeClient(server)
    await client.create_by_apply(SERVICE, INTENT, namespace="ns")
    await client.update_by_apply(SERVICE, INTENT, namespace="ns", uid="u1")
    await client.delete(SERVICE, namespace="ns", name="a", uid="u2")
    created, updated, deleted = (request.body for request in server.requests)
    assert created["metadata"]["resourceVersion"] == "1"  # type: ignore[index]
    assert updated["metadata"]["uid"] == "u1"  # type: ignore[index]
    assert deleted["preconditions"] == {"uid": "u2"}  # type: ignore[index]
    assert dict(server.requests[0].query) == {"fieldManager": "prebook", "force": "true"}
    assert "resourceVersion" not in INTENT["metadata"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (422, 'Service "a" is invalid: metadata.uid: Invalid value: "x": field is immutable', Conflict),
        (500, "failed to create typed patch object: .spec.nonsense: field not declared in schema", Invalid),
    ],
)
async def test_two_answers_that_mean_something_else(status: int, message: str, kind: type[KubeError]) -> None:
    server = FakeServer()
    server.answer = lambda _request: respond(status, {"message": message})
    with pytest.raises(kind):
        await KubeClient(server).update_by_apply(SERVICE, INTENT, namespace="ns", uid="x")


async def test_when_the_server_asks_for_a_pause_everybody_pauses() -> None:
    server = FakeServer()
    answers: list[Response] = [respond(429, {"message": "slow"}, **{"Retry-After": "0.2"})]
    server.answer = lambda _request: answers.pop() if answers else respond(200, {})
    client = KubeClient(server)
    with pytest.raises(RetryLater):
        await client.create(SERVICE, INTENT, namespace="ns")
    loop = asyncio.get_running_loop()
    started = loop.time()
    await client.create(SERVICE, INTENT, namespace="ns")
    assert loop.time() - started >= 0.19


def test_paths() -> None:
    assert SERVICE.path(namespace="a b", name="c/d") == "/api/v1/namespaces/a%20b/services/c%2Fd"
    assert MODEL.path(namespace="n", name="x", subresource="status").endswith("/disaggregatedmodels/x/status")
    assert NODE.path() == "/api/v1/nodes"
