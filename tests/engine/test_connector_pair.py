"""One real pair: the same tokens as one engine, the same bytes on both sides, booked first, and no input that hurts."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from prebook_operator.local.models import ensure_model
from tests.engine.pair import EngineSpec, Pair, engines, new_id, tokens_of, wait_for

BLOCK = 32
CHUNK = 256
ARGS = (
    "--block-size",
    str(BLOCK),
    "--max-num-batched-tokens",
    str(CHUNK),
    "--max-model-len",
    "4096",
    "--num-gpu-blocks-override",
    "512",
)
MAX_TOKENS = 6

pool = ThreadPoolExecutor(16)


@pytest.fixture(scope="module")
def timelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("timelines")


@pytest.fixture(scope="module")
def pair(timelines: Path) -> Iterator[Pair]:
    settings = {"verify": "all", "timeline_dir": str(timelines), "lease_seconds": 10}
    model = ensure_model("tiny")
    specs = [EngineSpec(role, model, settings, ARGS) for role in ("prefill", "decode")]
    with engines(*specs) as (prefill, decode):
        pair = Pair(prefill, decode)
        pair.warm()
        yield pair


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 500) for _ in range(length)]


def through(pair: Pair, ids: list[int], *, transfer_id: str | None = None, **body: Any) -> tuple[list[int], str]:
    """The tokens of a request through both engines, and its transfer id."""
    transfer_id = transfer_id or new_id()
    leg: Future[httpx.Response] = pool.submit(
        pair.prefill.complete, ids, max_tokens=1, params=pair.prefill_params(transfer_id)
    )
    answer = pair.decode.complete(ids, max_tokens=MAX_TOKENS, params=pair.decode_params(transfer_id), **body)
    leg.result().raise_for_status()
    return tokens_of(answer), transfer_id


def alone(pair: Pair, ids: list[int]) -> list[int]:
    """The tokens of one engine, without any transfer."""
    return tokens_of(pair.prefill.complete(ids, max_tokens=MAX_TOKENS))


def check(pair: Pair, ids: list[int]) -> dict[str, Any]:
    """Same tokens, and a committed transfer whose KV is byte for byte the same on both sides."""
    tokens, transfer_id = through(pair, ids)
    assert tokens == alone(pair, ids)
    account = pair.account(transfer_id)
    assert account["state"] == "committed", account
    assert account["verified"] is True, account
    return account


def prefill_events(timelines: Path, transfer_id: str) -> list[dict[str, Any]]:
    """What prefill's timeline tells of a transfer, in order."""
    return [
        event
        for path in timelines.glob("prefill-*.jsonl")
        for event in map(json.loads, path.read_text().splitlines())
        if event["transfer_id"] == transfer_id
    ]


def idle(pair: Pair) -> bool:
    return pair.prefill.kv_usage() == 0 == pair.decode.kv_usage()


@pytest.mark.parametrize(
    "length", sorted({1, *(n + d for n in (BLOCK, 2 * BLOCK, CHUNK, 3 * CHUNK) for d in (-1, 0, 1))})
)
def test_every_length_around_blocks_and_chunks(pair: Pair, length: int) -> None:
    account = check(pair, prompt(length, length))
    assert account["blocks"] == -(-length // BLOCK)
    assert account["bytes"] == account["blocks"] * pair.prefill.status()["block_bytes"]


@pytest.mark.parametrize("shared", [BLOCK - 1, BLOCK, 3 * BLOCK + 5, CHUNK, 600])
def test_prefix_hits_on_both_sides(pair: Pair, shared: int) -> None:
    stem = prompt(1000 + shared, shared)
    check(pair, stem + prompt(1, 70))
    account = check(pair, stem + prompt(2, 70))
    assert account["blocks"] == -(-(shared + 70) // BLOCK) - shared // BLOCK


def test_a_prefix_hit_on_prefill_only(pair: Pair) -> None:
    ids = prompt(2000, 700)
    alone(pair, ids)
    check(pair, ids)


def test_a_prefix_hit_on_decode_only(pair: Pair) -> None:
    stem = prompt(2100, 300)
    tokens_of(pair.decode.complete(stem, max_tokens=1))
    account = check(pair, stem + prompt(3, 300))
    assert account["blocks"] == -(-600 // BLOCK) - 300 // BLOCK


def test_a_full_hit_moves_only_the_last_block(pair: Pair) -> None:
    ids = prompt(2200, 200)
    check(pair, ids)
    assert check(pair, ids)["blocks"] == 1


def test_concurrent_requests_with_shared_prefixes(pair: Pair) -> None:
    stem = prompt(3000, 400)
    prompts = [stem[: 100 * (i % 5)] + prompt(3001 + i, 50 + 90 * i) for i in range(8)]
    results = list(ThreadPoolExecutor(4).map(lambda ids: through(pair, ids), prompts))
    for ids, (tokens, transfer_id) in zip(prompts, results, strict=True):
        assert tokens == alone(pair, ids)
        assert pair.account(transfer_id)["verified"] is True


def test_streaming_gives_the_same_tokens(pair: Pair) -> None:
    ids, transfer_id = prompt(4000, 500), new_id()
    leg = pool.submit(pair.prefill.complete, ids, max_tokens=1, params=pair.prefill_params(transfer_id))
    body = {
        "model": "m", "prompt": ids, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True, "kv_transfer_params": pair.decode_params(transfer_id),
    }  # fmt: skip
    tokens: list[int] = []
    with pair.decode.client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                tokens += json.loads(line[6:])["choices"][0].get("token_ids") or []
    leg.result().raise_for_status()
    assert tokens == alone(pair, ids)


def test_booked_and_writing_before_prefill_finishes(pair: Pair, timelines: Path) -> None:
    ids = prompt(5000, 5 * CHUNK)
    _, transfer_id = through(pair, ids)
    account = pair.account(transfer_id)
    assert account["lead_s"] > 0
    assert account["overlap"] > 0.5
    events = prefill_events(timelines, transfer_id)
    at = {event["event"]: event["mono"] for event in reversed(events)}  # the first of each kind
    assert at["reg_received"] < at["prefill_finished"]
    assert at["write_done"] < at["prefill_finished"]
    assert at["prefill_finished"] <= at["commit_sent"]


def test_the_last_chunk_leaves_while_it_is_computed(pair: Pair, timelines: Path) -> None:
    """On a link this fast a part waits for the last report of its step, a layer before the end: it may miss that."""
    early = 0
    for seed in range(5050, 5062):
        ids = prompt(seed, 2 * CHUNK)
        tokens, transfer_id = through(pair, ids)
        assert tokens == alone(pair, ids)
        assert pair.account(transfer_id)["verified"] is True
        events = prefill_events(timelines, transfer_id)
        finished = next(event["mono"] for event in events if event["event"] == "prefill_finished")
        parts = [event for event in events if event["event"] == "write_posted" and "layers" in event["data"]]
        edges = [event["data"]["layers"] for event in parts]
        assert [start for start, _ in edges] == [0, *(stop for _, stop in edges)][: len(edges)], "once each, in order"
        early += any(event["mono"] < finished for event in parts)
    assert early, "no part of any last chunk was posted before its prefill had finished"


def test_a_late_registration_gets_everything(pair: Pair) -> None:
    ids, transfer_id = prompt(5100, 500), new_id()
    pair.prefill.complete(ids, max_tokens=1, params=pair.prefill_params(transfer_id)).raise_for_status()
    tokens = tokens_of(pair.decode.complete(ids, max_tokens=MAX_TOKENS, params=pair.decode_params(transfer_id)))
    assert tokens == alone(pair, ids)
    assert pair.account(transfer_id)["state"] == "committed"


def test_prompts_that_differ_never_exchange_kv(pair: Pair) -> None:
    transfer_id = new_id()
    leg = pool.submit(pair.prefill.complete, prompt(5200, 300), max_tokens=1, params=pair.prefill_params(transfer_id))
    ids = prompt(5201, 300)
    tokens = tokens_of(pair.decode.complete(ids, max_tokens=MAX_TOKENS, params=pair.decode_params(transfer_id)))
    leg.result().raise_for_status()
    assert tokens == alone(pair, ids)
    assert pair.account(transfer_id)["reason"] == "prompt_mismatch"


def test_a_reused_transfer_id_does_not_write_into_the_first_ones_blocks(pair: Pair) -> None:
    first, second, transfer_id = prompt(5300, 800), prompt(5301, 800), new_id()
    answers = [
        pool.submit(pair.decode.complete, ids, max_tokens=MAX_TOKENS, params=pair.decode_params(transfer_id))
        for ids in (first, second)
    ]
    pair.prefill.complete(first, max_tokens=1, params=pair.prefill_params(transfer_id)).raise_for_status()
    assert [tokens_of(answer.result()) for answer in answers] == [alone(pair, first), alone(pair, second)]


BAD_PARAMS: list[Any] = [
    {"do_remote_prefill": True},
    {"do_remote_prefill": True, "remote_engine_id": "x", "remote_host": "", "remote_port": 5600},
    {"do_remote_prefill": True, "remote_engine_id": "x", "remote_host": "h", "remote_port": "nonsense"},
    {"do_remote_prefill": True, "do_remote_decode": True},
    {"do_remote_prefill": 1, "remote_block_ids": [[-1]]},
    {"do_remote_decode": True, "transfer_id": "wrong-side"},
    {"unknown": {"deep": [1, 2, 3]}},
]


@pytest.mark.parametrize("params", BAD_PARAMS)
def test_bad_parameters_are_computed_locally(pair: Pair, params: dict[str, Any]) -> None:
    ids = prompt(6000, 90)
    assert tokens_of(pair.decode.complete(ids, max_tokens=MAX_TOKENS, params=params)) == alone(pair, ids)
    assert tokens_of(pair.prefill.complete(ids, max_tokens=1, params=params)) == alone(pair, ids)[:1]


def test_too_long_a_prompt_is_the_clients_error_and_nothing_else(pair: Pair) -> None:
    ids, transfer_id = prompt(6100, 5000), new_id()
    answer = pair.decode.complete(ids, max_tokens=1, params=pair.decode_params(transfer_id))
    assert answer.status_code == 400
    assert "error" in answer.json()
    check(pair, prompt(6101, 100))


def test_garbage_on_the_side_channel_and_the_control_socket(pair: Pair) -> None:
    context = zmq.Context()
    try:
        for engine in (pair.prefill, pair.decode):
            for payload in (b"", b"\x00" * 100, b"\xc1", b"x" * 10_000):
                client = context.socket(zmq.DEALER)
                client.setsockopt(zmq.LINGER, 100)
                client.connect(f"tcp://{engine.spec.host}:{engine.port}")
                client.send_multipart([b"", payload])
            with socket.create_connection((engine.spec.host, engine.port)) as raw:
                raw.sendall(b"\x16\x03\x01garbage")
            for line in (b"\n", b"{}\n", b'{"op":"peers","peers":[{"engine_id":1}]}\n', b"\xff\n"):
                with socket.socket(socket.AF_UNIX) as client_socket:
                    client_socket.connect(str(engine.folder / "run" / "worker-0-0-0.sock"))
                    client_socket.sendall(line)
                    assert json.loads(client_socket.makefile("rb").readline())["ok"] is False
    finally:
        context.destroy(linger=100)
    check(pair, prompt(6200, 100))
    assert pair.decode.status()["pairs"][pair.prefill.engine_id]["state"] == "ready"


@pytest.mark.parametrize("delay", [0.0, 0.15, 0.6, 3.0])
def test_a_client_that_leaves_frees_everything(pair: Pair, delay: float) -> None:
    """Leaves while the prefill is queued or running, while KV is in flight, and while decode generates."""
    ids, transfer_id = prompt(7000 + int(delay * 100), 1500), new_id()
    leg = pool.submit(pair.prefill.complete, ids, max_tokens=1, params=pair.prefill_params(transfer_id))
    body = {
        "model": "m", "prompt": ids, "max_tokens": 400, "ignore_eos": True,
        "kv_transfer_params": pair.decode_params(transfer_id),
    }  # fmt: skip
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{pair.decode.url}/v1/completions", json=body, timeout=httpx.Timeout(10, read=0.1 + delay))
    leg.result().raise_for_status()
    wait_for("all KV is free", lambda: idle(pair))
    assert pair.decode.status()["transfers"]["booked"] == 0


@pytest.mark.parametrize("ahead", [0, 6], ids=["computing", "queued"])
def test_a_prefill_leg_that_is_aborted_lets_decode_compute(pair: Pair, ahead: int) -> None:
    """How fast this machine prefills decides how long the leg may live, so that it cannot have ended by itself."""
    ids, transfer_id = prompt(7500 + ahead, 3500), new_id()
    began = time.monotonic()
    expected = alone(pair, ids)
    patience = (time.monotonic() - began) / 4
    busy = [pool.submit(pair.prefill.complete, prompt(7510 + n, 3500), max_tokens=1) for n in range(ahead)]
    answer = pool.submit(pair.decode.complete, ids, max_tokens=MAX_TOKENS, params=pair.decode_params(transfer_id))
    # Another first block: the pages that the reference run left in prefill's cache must not shorten the leg.
    body = {
        "model": "m", "prompt": ids, "max_tokens": 1, "cache_salt": transfer_id,
        "kv_transfer_params": pair.prefill_params(transfer_id),
    }  # fmt: skip
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{pair.prefill.url}/v1/completions", json=body, timeout=httpx.Timeout(10, read=patience))
    assert tokens_of(answer.result()) == expected
    account = pair.account(transfer_id)
    assert account["reason"] in {"prefill_aborted", "unknown_transfer"}, account
    for request in busy:
        request.result().raise_for_status()
    wait_for("all KV is free", lambda: idle(pair))


def test_the_dispatchers_word_fails_a_booking_at_once(pair: Pair) -> None:
    ids, transfer_id = prompt(7600, 200), new_id()
    threading.Timer(
        0.7, pair.decode.control, [{"op": "fail", "transfer_id": transfer_id, "reason": "leg_refused"}]
    ).start()
    assert tokens_of(pair.decode.complete(ids, max_tokens=MAX_TOKENS, params=pair.decode_params(transfer_id))) == alone(
        pair, ids
    )
    assert pair.account(transfer_id)["reason"] == "leg_refused"


def test_metrics_are_in_vllms_registry(pair: Pair) -> None:
    check(pair, prompt(7700, 300))
    wait_for("metrics", lambda: "prebook_pushed_bytes_total" in pair.prefill.client.get("/metrics").text, seconds=10)
    decode = pair.decode.client.get("/metrics").text
    committed = [
        line for line in decode.splitlines() if line.startswith("prebook_transfers_total") and "committed" in line
    ]
    assert committed
    assert float(committed[0].rsplit(" ", 1)[1]) > 0
    assert "prebook_exposed_transfer_seconds_bucket" in decode
    assert "prebook_quarantined_blocks" in decode


def test_last_of_all_nothing_is_left(pair: Pair) -> None:
    """Runs last in this module: after everything above, both sides are empty and no thread met an error."""
    wait_for("all KV is free", lambda: idle(pair))
    for engine in (pair.prefill, pair.decode):
        status = engine.status()
        assert status["transfers"] == {"booked": 0, "pushing": 0, "quarantined_blocks": 0}
        assert not [name for name in status["counters"] if name.startswith(("thread_errors", "checksum_mismatches"))]
