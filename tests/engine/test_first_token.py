"""``firstToken: Prefill`` on real engines: the same answers as one engine gives, begun by prefill's token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.engine.dispatch_pair import Front, front, stream

LONG = [20 + position % 400 for position in range(800)]
BODY: dict[str, Any] = {"model": "m", "prompt": LONG, "temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front("prebook", tmp_path_factory.mktemp("first-token"), first_token="prefill") as started:
        yield started


def plain(pod: Front, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    """The answer of one engine that does everything: the prefill pod's, without any transfer."""
    response = pod.prefills[0].client.post(path, json=body)
    response.raise_for_status()
    document: dict[str, Any] = response.json()
    return document


def streamed(pod: Front, path: str = "/v1/completions", **body: Any) -> tuple[str, list[dict[str, Any]], httpx.Headers]:
    """The text of a streamed answer, its events, and its headers."""
    with httpx.stream("POST", f"{pod.decode.url}{path}", json={**body, "stream": True}, timeout=120) as response:
        assert response.status_code == 200
        lines = [line for _, line in stream(response)]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    parts = [choice for event in events for choice in event["choices"]]
    said = "".join(part["text"] if "text" in part else part["delta"].get("content") or "" for part in parts)
    return said, events, response.headers


def shown(pod: Front) -> float:
    """Streams that prefill's token has begun."""
    pod.at_rest()
    assert pod.metric("prebook_dispatch_first_tokens_total", outcome="diverged") == 0
    return pod.metric("prebook_dispatch_first_tokens_total", outcome="shown")


def test_a_stream_begun_by_prefill_reads_like_one_engines(pod: Front) -> None:
    before = shown(pod)
    for shift in range(8):
        body = {**BODY, "prompt": LONG[37 * shift :]}
        said, events, headers = streamed(pod, stream_options={"include_usage": True}, **body)
        assert "x-prebook-transfer" in headers
        assert said == plain(pod, **body)["choices"][0]["text"]
        assert events[-1]["usage"]["completion_tokens"] == 12
        assert events[-1]["usage"]["prompt_tokens"] == len(body["prompt"])
        assert len({event["id"] for event in events}) == 1
        assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert shown(pod) > before, "no stream was begun by prefill"


@pytest.mark.parametrize("seed", range(4))
def test_a_seeded_sample_is_one_engines(pod: Front, seed: int) -> None:
    """The token that is forced is prefill's sample, and what follows is drawn as if decode had sampled it itself.

    The prompt fits into one chunk: vLLM 0.32's CPU engine dies of a seeded request that takes several ("CPU Generator
    does not use offset").
    """
    body = {**BODY, "temperature": 1.0, "seed": seed, "top_p": 0.9, "prompt": LONG[:400]}
    assert streamed(pod, **body)[0] == plain(pod, **body)["choices"][0]["text"]


def test_samples_without_a_seed_never_contradict_what_was_shown(pod: Front) -> None:
    """Of a model with random weights two samples hardly ever agree, so decode's own would be noticed."""
    before = shown(pod)
    said = {streamed(pod, **{**BODY, "temperature": 1.5, "max_tokens": 3})[0] for _ in range(12)}
    assert len(said) > 6
    assert shown(pod) > before


def test_chat(pod: Front) -> None:
    body = {
        "model": "m", "messages": [{"role": "user", "content": "tell me a story " * 40}], "temperature": 0,
        "max_tokens": 8, "ignore_eos": True,
    }  # fmt: skip
    said, events, _ = streamed(pod, "/v1/chat/completions", **body)
    assert said == plain(pod, "/v1/chat/completions", **body)["choices"][0]["message"]["content"]
    assert [bool(event["choices"][0]["delta"].get("role")) for event in events].count(True) == 1


def test_a_first_token_that_ends_the_answer(pod: Front) -> None:
    first = plain(pod, **BODY, return_token_ids=True)["choices"][0]["token_ids"][0]
    said, events, _ = streamed(pod, **BODY, stop_token_ids=[first])
    assert (said, events[-1]["choices"][0]["finish_reason"]) == ("", "stop")


def test_a_stop_string_in_the_first_token(pod: Front) -> None:
    """Some first tokens of the model with random weights have no text of their own, hence several prompts."""
    for start in range(0, 400, 37):
        body = {**BODY, "prompt": LONG[start:]}
        if text := plain(pod, **{**body, "max_tokens": 1})["choices"][0]["text"]:
            break
    said, events, _ = streamed(pod, **body, stop=[text])
    assert (said, events[-1]["choices"][0]["finish_reason"]) == ("", "stop")


def test_one_token_comes_from_prefill_alone(pod: Front) -> None:
    for body in ({**BODY, "max_tokens": 1}, {**BODY, "max_tokens": 1, "logprobs": 2}):
        before = pod.at_rest()["requests"]["relayed"]
        said, _, headers = streamed(pod, **body)
        expected = plain(pod, **body)["choices"][0]
        assert said == expected["text"]
        assert headers["x-prebook-prefill-only"] == "max_tokens"
        whole = httpx.post(f"{pod.decode.url}/v1/completions", json=body, timeout=60).json()["choices"][0]
        assert (whole["text"], whole["logprobs"]) == (expected["text"], expected["logprobs"])
        assert pod.at_rest()["requests"]["relayed"] == before + 2


def test_prefill_dies_as_soon_as_its_token_was_read(pod: Front) -> None:
    """Last in this file: it ends the pair."""
    body = {**BODY, "prompt": [token % 400 + 20 for token in range(3500)]}
    expected = plain(pod, **body)["choices"][0]["text"]
    said = ""
    with httpx.stream("POST", f"{pod.decode.url}/v1/completions", json={**body, "stream": True}, timeout=120) as answer:
        for _, line in stream(answer):
            if pod.prefills[0].process is not None:
                pod.prefills[0].stop()
            if line != "data: [DONE]":
                said += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert said == expected
    assert pod.metric("prebook_dispatch_first_tokens_total", outcome="diverged") == 0
