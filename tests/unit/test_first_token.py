"""``firstToken: Prefill``: what the client sees, what decode is made to sample, and what happens when that fails."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate

from prebook_connector.dispatch import bodies
from prebook_connector.dispatch.bodies import CHAT, COMPLETIONS
from prebook_connector.dispatch.opening import Continuation, Diverged, opening
from prebook_connector.first_token import FirstTokenProcessor
from prebook_connector.token_store import TOKENS, TokenStore
from tests.unit.dispatch_engine import Call, Json, Leg
from tests.unit.dispatch_peers import FakePeer
from tests.unit.dispatch_rig import LONG, Rig, request, rig, until

PARIS = 700
HEAD = {"id": "cmpl-1", "created": 1, "model": "m"}


# -- the store


def test_a_token_that_was_offered_in_time_is_taken_every_time() -> None:
    store = TokenStore()
    assert store.offer("t", 5)
    assert [store.take("t"), store.take("t")] == [5, 5]
    assert store.offer("t", 5)


def test_an_offer_after_the_sampler_has_looked_is_refused() -> None:
    store = TokenStore()
    assert store.take("t") is None
    assert not store.offer("t", 5)
    assert store.take("t") is None


def test_the_store_forgets_the_oldest() -> None:
    store = TokenStore(kept=2)
    assert all(store.offer(str(index), index) for index in range(3))
    assert [store.take("0"), store.take("2")] == [None, 2]


# -- the sampler


def params(transfer_id: str | None = None, **asked: Any) -> SamplingParams:
    if transfer_id is not None:
        asked |= {"first_token": True, "transfer_id": transfer_id}
    return SamplingParams(extra_args={"kv_transfer_params": asked})


def first_runner(*requests: tuple[SamplingParams, list[int]]) -> FirstTokenProcessor:
    processor = FirstTokenProcessor(None, torch.device("cpu"), False)
    added = [(index, sampling, [1, 2], output) for index, (sampling, output) in enumerate(requests)]
    processor.update_state(BatchUpdate(batch_size=len(added), removed=[], added=added, moved=[]))
    return processor


def test_the_first_token_and_only_that_is_forced() -> None:
    assert TOKENS.offer("forced", 3)
    outputs: list[list[int]] = [[], [], [], []]
    samplings = [params("forced"), params("nobody-offered"), SamplingParams(), params(first_token_id=4)]
    processor = first_runner(*zip(samplings, outputs, strict=True))
    logits = torch.arange(32, dtype=torch.float32).reshape(4, 8)
    kept = logits[1:3].clone()
    changed = processor.apply(logits)
    assert changed.argmax(dim=1).tolist() == [3, 7, 7, 4]
    assert torch.isneginf(changed[0]).sum() == 7
    assert torch.equal(changed[1:3], kept)
    outputs[0].append(3)
    outputs[3].append(4)
    again = processor.apply(torch.arange(32, dtype=torch.float32).reshape(4, 8))
    assert again.argmax(dim=1).tolist() == [7, 7, 7, 7]
    assert not TOKENS.offer("nobody-offered", 1), "decode has begun with a token of its own"


@pytest.mark.parametrize("asked", [{}, {"first_token_id": True}, {"first_token_id": -1}, {"first_token": True}])
def test_other_requests_cost_nothing(asked: dict[str, Any]) -> None:
    assert first_runner((params(**asked), [])).req_info == {}


def test_a_token_outside_of_the_vocabulary_is_left_alone() -> None:
    logits = first_runner((params(first_token_id=8), [])).apply(torch.zeros(1, 8))
    assert not torch.isneginf(logits).any()


def test_the_second_model_runner_forces_the_same() -> None:
    """Its interface as in vllm/v1/worker/gpu/sample/logits_processor/interface.py; it needs a GPU to run whole."""
    assert TOKENS.offer("slot-2", 5)
    states = SimpleNamespace(prompt_len=SimpleNamespace(np=np.array([9, 9, 4, 9])))
    processor = FirstTokenProcessor(None, states)
    assert processor.add_request(2, params("slot-2"))
    assert not processor.add_request(0, SamplingParams())

    def apply(seen: int) -> list[int]:
        slots = np.array([0, 2], dtype=np.int32)
        context = SimpleNamespace(
            idx_mapping_np=slots,
            expanded_idx_mapping=torch.from_numpy(slots),
            seq_lens_upper_bound_np=np.array([30, seen]),
        )
        logits = torch.arange(16, dtype=torch.float32).reshape(2, 8)
        return list(processor.apply(logits, context).argmax(dim=1).tolist())

    assert apply(4) == [7, 5]
    assert apply(5) == [7, 7], "the second token is the model's own"
    assert not processor.add_request(2, SamplingParams()), "the slot has another request now"
    assert apply(4) == [7, 7]


# -- the beginning of a stream


def completion(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    return b"data: " + json.dumps({**HEAD, "object": "text_completion", "choices": [choice]}).encode() + b"\n\n"


def chat(delta: Json, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({**HEAD, "object": "chat.completion.chunk", "choices": [choice]}).encode() + b"\n\n"


def texts(stream: bytes) -> str:
    """What a client reads."""
    said = ""
    for event in stream.split(b"\n\n"):
        if event.startswith(b"data: {"):
            for choice in json.loads(event[6:]).get("choices", ()):
                said += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return said


@pytest.mark.parametrize(
    "choice",
    [
        {"text": "x", "finish_reason": "stop"}, {"text": None, "finish_reason": "length"}, "odd",
    ],
)  # fmt: skip
def test_what_cannot_begin_a_stream(choice: object) -> None:
    assert opening(COMPLETIONS, {**HEAD, "choices": [choice]}, PARIS) is None
    good = {"text": "x", "finish_reason": "length"}
    assert opening(COMPLETIONS, {**HEAD, "choices": [good]}, None) is None
    assert opening(COMPLETIONS, {**HEAD, "choices": [good, good]}, PARIS) is None
    assert opening(COMPLETIONS, {**HEAD, "choices": [good]}, PARIS) is not None


def test_half_a_character_begins_the_stream_without_text() -> None:
    """Decode holds it back until it is whole, however its events come."""
    found = opening(COMPLETIONS, {**HEAD, "choices": [{"text": "\ufffd", "finish_reason": "length"}]}, PARIS)
    assert found is not None
    assert found.text == texts(found.events) == ""
    for stream in (completion("") + completion("é"), completion("é"), completion("\ufffd")):
        assert texts(Continuation(found.text).feed(stream)) == texts(stream)


@pytest.mark.parametrize("extra", [{"reasoning": "hm"}, {"tool_calls": [{}]}, {"content": None}])
def test_what_a_parser_shapes_cannot_begin_a_stream(extra: Json) -> None:
    message = {"role": "assistant", "content": "x"}
    assert opening(CHAT, {**HEAD, "choices": [{"message": message, "finish_reason": "length"}]}, PARIS) is not None
    answer = {**HEAD, "choices": [{"message": {**message, **extra}, "finish_reason": "length"}]}
    assert opening(CHAT, answer, PARIS) is None


WORDS = st.lists(st.text('aé\n {}"', max_size=4), min_size=1, max_size=6)


@given(words=WORDS, merged=st.integers(1, 3), cut=st.integers(1, 400), over_chat=st.booleans(), data=st.data())
def test_a_continued_stream_reads_like_one(
    *, words: list[str], merged: int, cut: int, over_chat: bool, data: st.DataObject
) -> None:
    """However decode's frontend merges tokens into events and the server cuts events into pieces."""
    whole = "".join(words)
    events = ["".join(words[at : at + merged]) for at in range(0, len(words), merged)]
    if over_chat:
        stream = chat({"role": "assistant", "content": ""}) + b"".join(chat({"content": text}) for text in events)
        stream += chat({"content": ""}, "length")
    else:
        stream = b": ping\n\n" + b"".join(map(completion, events)) + completion("", "length")
    stream += b"data: [DONE]\n\n"
    continuation = Continuation(words[0])
    pieces = [stream[at : at + cut] for at in range(0, len(stream), cut)]
    rest = b"".join(map(continuation.feed, pieces))
    assert continuation.settled
    assert words[0] + texts(rest) == whole
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b'"length"' in rest
    assert b'"role"' not in rest
    if merged == 1:
        events_left = [event for event in rest.split(b"\n\n") if event.startswith(b"data: {")]
        assert len(events_left) == len(words), "one event a token, and the one that ends the answer"


@pytest.mark.parametrize(
    "stream", [completion(" London"), completion("", "stop"), b"data: [DONE]\n\n", completion(" Pa", "length")]
)
def test_another_beginning_is_noticed(stream: bytes) -> None:
    with pytest.raises(Diverged):
        Continuation(" Paris").feed(stream)


def test_an_error_of_the_engine_passes_through() -> None:
    continuation = Continuation(" Paris")
    error = b'data: {"error": {"message": "no", "code": 500}}\n\n'
    assert continuation.feed(error) == error
    assert continuation.feed(b"data: [DONE]\n\n") == b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "changes",
    [
        {"stream": False}, {"stop": ["\n"]}, {"logprobs": 1}, {"return_token_ids": True}, {"tools": [{}]},
        {"response_format": {"type": "json_object"}}, {"structured_outputs": {"json": {}}}, {"stop": "x"},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
)  # fmt: skip
def test_where_decode_has_to_begin(changes: Json) -> None:
    plain = request(stream=True, temperature=1, seed=3, stream_options={"include_usage": True})
    assert bodies.inspect(COMPLETIONS, plain).opens
    assert not bodies.inspect(COMPLETIONS, {**plain, **changes}).opens


# -- a decode pod


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
