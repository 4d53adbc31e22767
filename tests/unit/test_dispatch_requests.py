"""One request on a decode pod: which legs start, what reaches the engine, what reaches the client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.unit.dispatch_peers import FakePeer
from tests.unit.dispatch_rig import LONG, TOKEN, Rig, request, rig, until


async def test_both_legs_start_at_once_and_share_the_transfer_id(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        pod.peers[0].seconds = 0.3
        call = await pod.call(request()).finish()
        assert call.status == 200
        assert call.json()["choices"][0]["text"] == "hello"
        leg, prefill = pod.engine.legs[0], pod.peers[0].legs[0]
        assert leg.params == {
            "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": call.headers["x-prebook-transfer"],
            "remote_engine_id": "engine-0", "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1, "pp_size": 1,
            "dp_rank": 0,
        }  # fmt: skip
        assert prefill["kv_transfer_params"] == {
            "do_remote_decode": True, "do_remote_prefill": False, "transfer_id": call.headers["x-prebook-transfer"],
        }  # fmt: skip
        assert prefill["prompt"] == LONG
        assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
        assert leg.body is not None
        assert leg.body["max_tokens"] == 5
        assert pod.peers[0].headers[0]["x-prebook-token"] == TOKEN
        first, second = (at for at, _ in pod.engine.events[:2])
        assert abs(second - first) < 0.15, "one leg waited for the other"


async def test_every_attempt_has_a_fresh_id(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        headers = {"x-request-id": "same"}
        calls = [await pod.call(request(), headers=headers).finish() for _ in range(3)]
        assert len({call.headers["x-prebook-transfer"] for call in calls}) == 3
        assert len({seen["x-request-id"] for seen in pod.peers[0].headers}) == 3
        assert {leg.headers["x-request-id"] for leg in pod.engine.legs} == {"same"}


async def test_streaming_is_not_collected(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        pod.engine.tokens, pod.engine.pace = 5, 0.05
        call = await pod.call(request(stream=True, stream_options={"include_usage": True})).finish()
        assert call.content.count(b"data: ") == 6
        assert call.times[-1] - call.times[1] > 0.15
        assert pod.peers[0].legs[0].get("stream_options") is None
        assert pod.engine.legs[0].body is not None
        assert pod.engine.legs[0].body["stream_options"] == {"include_usage": True}


async def test_client_params_are_stripped_everywhere(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        hostile = {"do_remote_prefill": True, "remote_host": "10.0.0.1"}
        short = request(prompt=[1], kv_transfer_params=hostile)
        await pod.call(short).finish()
        await pod.call(request(vllm_xargs={"kv_transfer_params": "x", "other": 1})).finish()
        await pod.call({"model": "m", "input": "x", "kv_transfer_params": hostile}, path="/v1/responses").finish()
        generate = {"sampling_params": {"extra_args": {"kv_transfer_params": hostile}}}
        await pod.call(generate, path="/inference/v1/generate").finish()
        escaped = b'{"model":"m","kv\\u005ftransfer\\u005fparams":{"do_remote_prefill":true}}'
        await pod.call(escaped, path="/v1/messages").finish()
        await pod.call(json.dumps(short).encode("utf-16"), path="/invocations").finish()
        local, remote, *others = pod.engine.legs
        assert local.params is None
        assert remote.body is not None
        assert remote.body["vllm_xargs"] == {"other": 1}
        assert remote.params is not None
        assert remote.params["remote_engine_id"] == "engine-0"
        assert all(b"do_remote" not in leg.raw for leg in others)
        assert others[1].body == {"sampling_params": {"extra_args": {}}}


async def test_bodies_without_anything_for_us_arrive_byte_for_byte(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        odd = b'{ "model" : "m", "prompt": [1,2], "x": 1e400, "y": "\\ud800" }'
        await pod.call(odd, parts=4).finish()
        await pod.call(b'{"model":"m", "input":  "hi"}', path="/v1/responses").finish()
        assert [leg.raw for leg in pod.engine.legs] == [odd, b'{"model":"m", "input":  "hi"}']


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("short_prompt", {"prompt": LONG[:10]}), ("several_choices", {"n": 2}), ("several_choices", {"best_of": 3}),
        ("beam_search", {"use_beam_search": True}), ("prompt_logprobs", {"prompt_logprobs": 0}),
        ("echo", {"echo": True}), ("several_prompts", {"prompt": [LONG, LONG]}),
        ("several_prompts", {"prompt": ["a" * 999, "b" * 999]}), ("prompt_embeds", {"prompt_embeds": "AAAA"}),
        ("truncation", {"truncate_prompt_tokens": -1}), ("no_generation", {"max_tokens": 0}),
        ("unreadable", {"prompt": None}), ("unreadable", {"prompt": {"a": 1}}),
    ],
)  # fmt: skip
async def test_what_push_cannot_serve_is_local_with_its_reason(
    tmp_path: Path, reason: str, changes: dict[str, object]
) -> None:
    async with rig(tmp_path) as pod:
        call = await pod.call(request(**changes)).finish()
        assert call.headers["x-prebook-local"] == reason
        assert pod.engine.legs[0].params is None
        assert pod.peers[0].legs == []
        assert (await pod.status())["requests"]["local"] == {reason: 1}


async def test_multimodal_chat_is_local_and_text_parts_are_not(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        text = {"type": "text", "text": "word " * 300}
        image = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
        for parts, header in (([text], "x-prebook-transfer"), ([text, image], "x-prebook-local")):
            body = {"model": "m", "messages": [{"role": "user", "content": parts}], "min_tokens": 4, "logprobs": True}
            call = await pod.call(body, path="/v1/chat/completions").finish()
            assert header in call.headers
        leg = pod.peers[0].legs[0]
        assert (leg["max_tokens"], leg["max_completion_tokens"], leg["min_tokens"]) == (1, 1, 1)
        assert "logprobs" not in leg


@pytest.mark.parametrize("body", [b"{nope", b"", b"[1,2]", b'"text"', b"\xff\xfe\x00", b'{"model":'])
async def test_what_is_no_request_gets_the_engines_own_error(tmp_path: Path, body: bytes) -> None:
    async with rig(tmp_path) as pod:
        call = await pod.call(body).finish()
        assert call.status == 400
        assert call.json()["error"]["message"] == "engine says no"
        assert pod.engine.legs[0].raw == body


async def test_the_engines_error_is_not_hidden_by_the_prefill_legs(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        pod.peers[0].answering(404)
        pod.peers[0].seconds = 0.0
        call = await pod.call(request(model="unknown")).finish()
        assert (call.status, call.json()["error"]["message"]) == (400, "engine says no")
        assert pod.connector is not None
        assert (await pod.status())["requests"]["failed_over"] == 0


async def test_odd_bodies_are_served_by_the_engine_without_params(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        odd = b'{"model":"m","prompt":"' + b"a" * 999 + b'\\ud800","kv_transfer_params":{"do_remote_prefill":true}}'
        call = await pod.call(odd).finish()
        assert call.headers["x-prebook-local"] == "unreadable"
        assert pod.engine.legs[0].body == {"model": "m", "prompt": "a" * 999 + "\ud800"}


async def test_too_deep_and_too_large_bodies_are_refused(tmp_path: Path) -> None:
    async with rig(tmp_path, max_body_bytes=4096 * 50) as pod:
        deep = await pod.call(b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}").finish()
        assert (deep.status, deep.json()["error"]["code"]) == (400, 400)
        large = await pod.call(b"x" * (4096 * 50 + 1), parts=9).finish()
        assert (large.status, large.json()["error"]["type"]) == (413, "RequestEntityTooLargeError")
        assert pod.engine.legs == []


async def test_a_body_that_never_ends_is_given_up(tmp_path: Path) -> None:
    async with rig(tmp_path, timing={"body": 0.1}) as pod:
        call = await pod.call(b'{"model":', complete=False).finish(2)
        assert call.status == 408
        gone = pod.call(b'{"model":', complete=False)
        await asyncio.sleep(0.02)
        gone.left.set()
        await gone.finish(2)
        assert gone.messages == []


async def test_client_that_leaves_stops_both_legs(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        pod.peers[0].act = FakePeer.hang
        call = pod.call(request(stream=True))
        await until(lambda: bool(pod.peers[0].legs) and bool(pod.engine.legs))
        call.left.set()
        await call.finish(2)
        await until(lambda: pod.peers[0].aborted == 1)
        assert pod.engine.legs[0].aborted
        assert call.messages == []
        status = await pod.status()
        assert status["in_flight"]["requests"] == 0
        assert status["requests"]["remote"] == 0


async def test_client_that_leaves_while_decoding_stops_the_engine(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        pod.engine.tokens, pod.engine.pace = 10_000, 0.01
        call = pod.call(request(stream=True))
        await until(lambda: len(call.messages) > 4)
        call.left.set()
        await call.finish(2)
        assert pod.engine.legs[0].aborted


async def test_an_error_answer_of_decode_cancels_the_prefill_leg(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        pod.peers[0].act = FakePeer.hang
        call = await pod.call(request(model="unknown")).finish(2)
        assert call.status == 400
        # It may be cancelled before it left at all; what counts is that none is left hanging.
        await until(lambda: pod.peers[0].aborted == len(pod.peers[0].legs))


async def test_wanted_peer_and_least_load(tmp_path: Path) -> None:
    async with rig(tmp_path, peers=2) as pod:
        wanted = pod.peers[1].address
        for _ in range(3):
            await pod.call(request(), headers={"x-prefiller-host-port": wanted}).finish()
        assert (len(pod.peers[0].legs), len(pod.peers[1].legs)) == (0, 3)
        await pod.call(request(), headers={"x-prefiller-host-port": "10.9.9.9:1"}).finish()
        assert len(pod.peers[0].legs) == 1, "an unknown peer is ignored; the one picked longest ago is next"
        for peer in pod.peers:
            peer.seconds = 0.2
        await asyncio.gather(*(pod.call(request()).finish() for _ in range(6)))
        assert len(pod.peers[0].legs) == 4
        assert len(pod.peers[1].legs) == 6


async def test_load_of_a_peer_ends_with_its_leg(tmp_path: Path) -> None:
    """Not with the answer, which may be decoded for minutes."""
    async with rig(tmp_path) as pod:
        pod.engine.tokens, pod.engine.pace = 1000, 0.01
        call = pod.call(request(stream=True))
        await until(lambda: len(call.messages) > 5)
        peer = pod.middleware._discovery.table.peers()[0]
        assert (peer.in_flight_tokens, peer.in_flight) == (0, 1)
        call.left.set()
        await call.finish()
        peer = pod.middleware._discovery.table.peers()[0]
        assert (peer.in_flight_tokens, peer.in_flight) == (0, 0)


async def test_reported_load_of_others_counts(tmp_path: Path) -> None:
    async with rig(tmp_path, peers=2) as pod:
        pod.peers[0].changes["load"] = {"legs": 9, "tokens": 90_000}
        await asyncio.sleep(0.2)
        await asyncio.gather(*(pod.call(request()).finish() for _ in range(4)))
        assert (len(pod.peers[0].legs), len(pod.peers[1].legs)) == (0, 4)


async def test_trusted_router_drives_transfers_itself(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        given = {"do_remote_prefill": True, "transfer_id": "t"}
        pod.engine.event("t").set()
        call = await pod.call(request(kv_transfer_params=given), headers={"x-prebook-token": TOKEN}).finish()
        assert call.headers["x-prebook-local"] == "external"
        assert pod.engine.legs[0].params == given
        assert "x-prebook-token" not in pod.engine.legs[0].headers
        await pod.call(request(prompt=[1], kv_transfer_params=given), headers={"x-prebook-token": "no"}).finish()
        assert pod.engine.legs[1].params is None


async def test_only_some_headers_travel_to_prefill(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        headers = {"authorization": "Bearer k", "cookie": "c=1", "traceparent": "00-1", "x-data-parallel-rank": "3"}
        await pod.call(request(), headers=headers).finish()
        seen = pod.peers[0].headers[0]
        assert (seen["authorization"], seen["traceparent"]) == ("Bearer k", "00-1")
        assert "cookie" not in seen
        assert "x-data-parallel-rank" not in seen


async def test_data_parallel_ranks_take_turns(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        pod.peers[0].changes["dp_size"] = 2
        await until(lambda: _dp(pod) == 2)
        for _ in range(2):
            await pod.call(request()).finish()
        ranks = [(leg.params or {})["dp_rank"] for leg in pod.engine.legs]
        assert sorted(ranks) == [0, 1]
        for leg, seen in zip(pod.engine.legs, pod.peers[0].headers, strict=True):
            params = leg.params or {}
            assert params["remote_engine_id"] == f"engine-0_dp{params['dp_rank']}"
            assert params["remote_port"] == 5600 + params["dp_rank"]
            assert seen["x-data-parallel-rank"] == str(params["dp_rank"])


def _dp(pod: Rig) -> int:
    peer = pod.middleware._discovery.table.peers()[0]
    ready = pod._ready() == 1
    return peer.identity.dp_size if ready and peer.identity is not None else 0


async def test_stock_push_legs_share_a_request_id(tmp_path: Path) -> None:
    async with rig(tmp_path, mode="nixl-push") as pod:
        call = await pod.call(request(), headers={"x-request-id": "mine"}).finish()
        leg, seen = pod.engine.legs[0], pod.peers[0].headers[0]
        assert leg.headers["x-request-id"] == seen["x-request-id"] != "mine"
        assert seen["x-request-id"].startswith("mine-")
        assert leg.params is not None
        assert leg.params["remote_request_id"] == f"cmpl-{seen['x-request-id']}-0"
        assert "transfer_id" not in leg.params
        assert call.status == 200


async def test_stock_pull_is_sequential_and_hands_over_the_answer(tmp_path: Path) -> None:
    async with rig(tmp_path, mode="nixl-pull") as pod:
        pod.peers[0].seconds = 0.2
        call = await pod.call(request()).finish()
        assert call.status == 200
        leg = pod.engine.legs[0]
        assert leg.params is not None
        assert leg.params["remote_block_ids"] == [[1, 2, 3]]
        (prefilled, first), (decoded, second) = pod.engine.events[:2]
        assert (first, second) == ("prefill leg", "decode leg")
        assert decoded - prefilled >= 0.2


async def test_client_that_leaves_before_pull_mode_decodes(tmp_path: Path) -> None:
    async with rig(tmp_path, mode="nixl-pull") as pod:
        pod.peers[0].act = FakePeer.hang
        call = pod.call(request())
        await until(lambda: bool(pod.peers[0].legs))
        call.left.set()
        await call.finish(2)
        await until(lambda: pod.peers[0].aborted == 1)
        assert pod.engine.legs == []


async def test_scopes_that_are_not_http_pass_through(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:

        async def nothing(*_: object) -> None:
            return None

        await pod.middleware({"type": "websocket", "path": "/v1/realtime"}, nothing, nothing)  # type: ignore[arg-type]
        assert pod.engine.lifespan == ["websocket"]
        assert (await pod.get("/health")).status == 200
        form = await pod.call(b"--x", path="/v1/audio/transcriptions", headers={"content-type": "multipart/form-data"})\
            .finish()  # fmt: skip
        assert form.status == 400
        assert pod.engine.legs[-1].raw == b"--x"
