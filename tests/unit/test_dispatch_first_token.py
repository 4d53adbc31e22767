"""``firstToken: Prefill`` on a decode pod: what the client sees, and what happens when something fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from prebook_connector.dispatch.bodies import CHAT
from tests.unit.dispatch_engine import Call, Json, Leg
from tests.unit.dispatch_peers import FakePeer
from tests.unit.dispatch_rig import LONG, Rig, request, rig, until
from tests.unit.stream_events import completion, texts

PARIS = 700


@pytest.fixture
def pod_rig(tmp_path: Path) -> Callable[..., Any]:
    return lambda **changes: rig(tmp_path, first_token="prefill", **changes)


def begins(text: str, *, finish: str = "length", kv_after: float = 0.3) -> Callable[..., Awaitable[web.Response]]:
    """A prefill pod that answers at once, while its KV arrives ``kv_after`` seconds later."""

    async def act(peer: FakePeer, _: web.Request, body: Json) -> web.Response:
        transfer = peer.engine.event(body["kv_transfer_params"]["transfer_id"])
        asyncio.get_running_loop().call_later(kv_after, transfer.set)
        name = peer.headers[-1]["x-request-id"]
        return web.json_response(
            {
                "id": f"cmpl-{name}", "created": 7, "model": "m",
                "choices": [{"index": 0, "text": text, "finish_reason": finish}],
                "kv_transfer_params": {"do_remote_prefill": True, "first_token_id": PARIS},
            }
        )  # fmt: skip

    return act


def says(*words: str) -> Callable[[Leg, Any], Awaitable[None]]:
    async def answer(_: Leg, send: Any) -> None:
        for word in words:
            await send({"type": "http.response.body", "body": completion(word), "more_body": True})
        await send({"type": "http.response.body", "body": completion("", "length"), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    return answer


async def seen(pod: Rig, text: str, **options: Any) -> Call:
    """A streaming request whose client has read ``text`` already."""
    call = pod.call(request(stream=True), **options)
    await until(lambda: texts(call.content) == text)
    return call


async def test_the_client_reads_prefills_token_while_the_kv_is_under_way(pod_rig: Any) -> None:
    async with pod_rig() as pod:
        pod.peers[0].act, pod.engine.answer = begins(" Paris"), says(" Paris", " is", " nice")
        call = await seen(pod, " Paris", headers={"x-request-id": "mine"})
        leg = pod.engine.legs[0]
        assert not pod.engine.event(pod.engine.key(leg)).is_set(), "only then is it early"
        assert call.headers["content-type"] == "text/event-stream"
        assert pod.connector.offered == [(call.headers["x-prebook-transfer"], PARIS)]
        await call.finish()
        assert texts(call.content) == " Paris is nice"
        assert call.content.endswith(b"data: [DONE]\n\n")
        assert leg.params is not None
        assert leg.params["first_token"] is True
        assert leg.headers["x-request-id"] == pod.peers[0].headers[0]["x-request-id"]
        assert (await pod.status())["requests"]["remote"] == 1


@pytest.mark.parametrize(("finish", "held"), [("stop", True), ("length", False)])
async def test_where_it_cannot_be_shown_decode_begins(pod_rig: Any, finish: str, held: bool) -> None:
    async with pod_rig() as pod:
        pod.connector.held = held
        pod.peers[0].act, pod.engine.answer = begins(" Paris", finish=finish, kv_after=0.1), says(" Rome", " is")
        call = await pod.call(request(stream=True)).finish()
        assert texts(call.content) == " Rome is"
        assert len(pod.connector.offered) == (finish == "length")


async def test_samplers_that_disagree_are_no_fault_of_prefills(pod_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pod_rig(peers=2) as pod:
        for peer in pod.peers:
            peer.act = begins(" Paris", kv_after=0.1)
        pod.engine.answer = says(" Paris", " is")
        control = pod.middleware._control
        disagree = [None, True]

        async def offer(transfer_id: str, token: int) -> bool | None:
            return disagree.pop(0)

        monkeypatch.setattr(control, "offer_first_token", offer)
        call = await pod.call(request(stream=True)).finish()
        assert texts(call.content) == " Paris is"
        assert [len(peer.legs) for peer in pod.peers] == [1, 1], "the second leg went to the other one"
        status = await pod.status()
        assert status["requests"]["retried"] == 1
        ready = pod.middleware._discovery.table.ready(now=time.monotonic())
        assert len(ready) == 2, "neither is avoided"


async def test_a_transfer_that_fails_later_is_continued_from_the_same_token(pod_rig: Any) -> None:
    async with pod_rig(peers=2) as pod:
        for peer in pod.peers:
            peer.act = begins(" Paris", kv_after=3600)
        pod.engine.answer = says(" Paris", " is", " nice")
        call = await seen(pod, " Paris")
        pod.connector.states[pod.engine.key(pod.engine.legs[0])] = "quarantined"
        await call.finish()
        assert texts(call.content) == " Paris is nice"
        first, fresh = pod.engine.legs
        assert first.aborted
        assert fresh.params == {"first_token_id": PARIS}
        assert fresh.headers["x-request-id"] == first.headers["x-request-id"]
        assert sum(len(peer.legs) for peer in pod.peers) == 1, "another prefill would sample another token"


async def test_an_engine_that_fails_in_place_is_continued_too(pod_rig: Any) -> None:
    async with pod_rig() as pod:
        pod.peers[0].act, pod.engine.answer = begins(" Paris", kv_after=0.3), says(" Paris", " is")
        call = await seen(pod, " Paris")
        pod.engine.broken.add(pod.engine.key(pod.engine.legs[0]))
        await call.finish()
        assert texts(call.content) == " Paris is"
        assert pod.engine.legs[1].params == {"first_token_id": PARIS}


async def test_a_stream_that_diverges_ends_with_an_error(pod_rig: Any) -> None:
    async with pod_rig() as pod:
        pod.peers[0].act, pod.engine.answer = begins(" Paris"), says(" London", " is")
        call = await pod.call(request(stream=True)).finish()
        assert texts(call.content) == " Paris"
        assert b"did not continue from the token" in call.content
        assert call.content.endswith(b"data: [DONE]\n\n")


async def test_a_client_that_leaves_after_the_first_token_frees_both(pod_rig: Any) -> None:
    async with pod_rig() as pod:
        pod.peers[0].act = begins(" Paris", kv_after=3600)
        call = await seen(pod, " Paris")
        call.left.set()
        await call.finish()
        await until(lambda: pod.engine.legs[0].aborted)
        assert (await pod.status())["in_flight"]["requests"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_one_token_needs_no_decode(pod_rig: Any, stream: bool) -> None:
    async def whole(peer: FakePeer, _: web.Request, body: Json) -> web.Response:
        assert "kv_transfer_params" not in body
        assert (body["max_tokens"], body["logprobs"]) == (1, 2)
        return web.Response(body=b"data: {}\n\n" if stream else b'{"choices": []}', content_type="text/x")

    async with pod_rig() as pod:
        pod.peers[0].act = whole
        call = await pod.call(
            request(max_tokens=1, stream=stream, logprobs=2), headers={"authorization": "Bearer k"}
        ).finish()
        assert call.status == 200
        assert call.headers["x-prebook-prefill-only"] == "max_tokens"
        assert call.headers["content-type"] == "text/x"
        assert call.content == (b"data: {}\n\n" if stream else b'{"choices": []}')
        assert pod.peers[0].headers[0]["authorization"] == "Bearer k"
        assert pod.engine.legs == []
        assert (await pod.status())["requests"]["relayed"] == 1


async def test_a_client_that_hangs_up_on_the_last_event_was_served(pod_rig: Any) -> None:
    """It has its answer; that the leg behind it has not yet seen its own end is no reason not to count it."""

    async def never_ends(peer: FakePeer, asked: web.Request, _: Json) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(asked)
        await response.write(b"data: [DONE]\n\n")
        await asyncio.sleep(3600)
        return response

    async with pod_rig() as pod:
        pod.peers[0].act = never_ends
        call = pod.call(request(max_tokens=1, stream=True))
        await until(lambda: b"[DONE]" in call.content)
        call.left.set()
        await call.finish()
        assert (await pod.status())["requests"]["relayed"] == 1


async def test_one_token_is_computed_here_when_prefill_fails(pod_rig: Any) -> None:
    async with pod_rig() as pod:
        pod.peers[0].answering(500)
        call = await pod.call(request(max_tokens=1)).finish()
        assert call.headers["x-prebook-local"] == "failed_over"
        pod.peers[0].act = FakePeer.reset
        call = await pod.call(request(max_tokens=1)).finish()
        assert call.headers["x-prebook-local"] == "failed_over"
        pod.peers[0].answering(400, b'{"error": {"message": "too long"}}')
        call = await pod.call(request(max_tokens=1)).finish()
        assert (call.status, call.json()["error"]["message"]) == (400, "too long")


async def test_one_token_ends_with_an_error_where_decode_may_not_compute(pod_rig: Any) -> None:
    async with pod_rig(on_failure="fail") as pod:
        pod.peers[0].answering(500)
        call = await pod.call(request(max_tokens=1)).finish()
        assert (call.status, pod.engine.legs) == (502, [])


async def test_a_chat_whose_answer_a_parser_shapes_is_begun_by_decode(pod_rig: Any) -> None:
    async with pod_rig() as pod:
        pod.engine.state.openai_serving_chat = SimpleNamespace(parser_cls=object)
        body = {"model": "m", "messages": [{"role": "user", "content": "word " * 300}], "stream": True}
        call = await pod.call(body, path=CHAT).finish()
        assert call.status == 200
        assert pod.connector.offered == []
        assert pod.engine.legs[0].params is not None
        assert "first_token" not in pod.engine.legs[0].params


async def test_without_the_setting_nothing_changes(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        assert pod.connector is not None
        pod.peers[0].act = begins(" Paris", kv_after=0.05)
        pod.engine.answer = says(" Rome")
        call = await pod.call(request(stream=True, prompt=LONG)).finish()
        assert texts(call.content) == " Rome"
        assert pod.connector.offered == []
