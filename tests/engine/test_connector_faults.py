"""A real pair loses an engine, or time: nothing hangs, the survivor's KV is free again, the next request is right."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from prebook_operator.local.models import ensure_model
from tests.engine.pair import Engine, EngineSpec, Pair, engines, new_id, tokens_of, wait_for

ARGS = ("--block-size", "32", "--max-num-batched-tokens", "128", "--max-model-len", "1700")
LEASE = 2.0
BLOCKS = 56
TOKENS = 5

pool = ThreadPoolExecutor(16)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    model = ensure_model("tiny")
    settings = {"lease_seconds": LEASE, "verify": "all"}
    # Little KV and small chunks on prefill: room for preemptions, and time for them while a prompt is computed.
    small = (*ARGS, "--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
    with engines(EngineSpec("prefill", model, settings, small), EngineSpec("decode", model, settings, ARGS)) as (
        prefill,
        decode,
    ):
        pair = Pair(prefill, decode)
        pair.warm()
        yield pair


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 500) for _ in range(length)]


def expected(engine: Engine, ids: list[int]) -> list[int]:
    return tokens_of(engine.complete(ids, max_tokens=TOKENS))


def check_next(pair: Pair, seed: int) -> None:
    """The next request goes through the pair and is right."""
    ids, transfer_id = prompt(seed, 300), new_id()
    leg = pool.submit(pair.prefill.complete, ids, max_tokens=1, params=pair.prefill_params(transfer_id))
    answer = pair.decode.complete(ids, max_tokens=TOKENS, params=pair.decode_params(transfer_id))
    leg.result().raise_for_status()
    assert tokens_of(answer) == expected(pair.decode, ids)
    account = pair.account(transfer_id)
    assert (account["state"], account["verified"]) == ("committed", True), account


def test_a_queued_prefill_outlives_many_leases(pair: Pair) -> None:
    """Prefill is busy for longer than the lease: the booking is kept alive by heartbeats."""
    busy = [pool.submit(pair.prefill.complete, prompt(i, 40), max_tokens=350) for i in range(4)]
    time.sleep(0.5)
    ids, transfer_id = prompt(50, 200), new_id()
    began = time.monotonic()
    leg = pool.submit(pair.prefill.complete, ids, max_tokens=1, params=pair.prefill_params(transfer_id))
    answer = pair.decode.complete(ids, max_tokens=TOKENS, params=pair.decode_params(transfer_id))
    waited = time.monotonic() - began
    leg.result().raise_for_status()
    for other in busy:
        other.result().raise_for_status()
    assert waited > LEASE, "the prefill engine was not busy long enough for this test"
    assert pair.account(transfer_id)["state"] == "committed"
    assert tokens_of(answer) == expected(pair.decode, ids)


def test_preemption_on_prefill_after_blocks_were_pushed(pair: Pair) -> None:
    """Growing decodes on the prefill engine take blocks from prefills that are being pushed."""

    def preemptions() -> float:
        return float(pair.prefill.status()["counters"].get("preemptions", 0))

    def grow(seed: int) -> None:
        while not enough.is_set():
            pair.prefill.complete(prompt(seed, 64), max_tokens=400).raise_for_status()

    enough = threading.Event()
    growing = [pool.submit(grow, 100 + i) for i in range(3)]
    seed, deadline = 200, time.monotonic() + 240
    try:
        while preemptions() == 0 and time.monotonic() < deadline:
            # As long as fits: each block that a decode needs from now on must come from this prefill.
            free = int(BLOCKS * (1 - pair.prefill.kv_usage())) - 1
            ids, transfer_id = prompt(seed, min(1500, max(100, free * 32 - 1))), new_id()
            leg = pool.submit(pair.prefill.complete, ids, max_tokens=1, params=pair.prefill_params(transfer_id))
            answer = pair.decode.complete(ids, max_tokens=TOKENS, params=pair.decode_params(transfer_id))
            leg.result().raise_for_status()
            account = pair.account(transfer_id)
            assert (account["state"], account["verified"]) == ("committed", True), account
            assert tokens_of(answer) == expected(pair.decode, ids)
            seed += 1
    finally:
        enough.set()
    for future in growing:
        future.result()
    assert preemptions() > 0, "nothing was preempted: the KV cache of the prefill engine is too large for this test"


def test_a_stopped_prefill_keeps_the_blocks_until_it_answers(pair: Pair) -> None:
    ids, transfer_id = prompt(300, 1500), new_id()
    leg = pool.submit(pair.prefill.complete, ids, max_tokens=1, params=pair.prefill_params(transfer_id))
    answer = pool.submit(pair.decode.complete, ids, max_tokens=TOKENS, params=pair.decode_params(transfer_id))
    wait_for("a transfer is open", lambda: pair.decode.status()["transfers"]["booked"] == 1, 10)
    pair.prefill.signal(signal.SIGSTOP)
    try:
        pair.decode.control({"op": "fail", "transfer_id": transfer_id, "reason": "prefill_silent"})
        time.sleep(LEASE * 2)
        assert pair.decode.status()["transfers"]["quarantined_blocks"] > 0, pair.account(transfer_id)
        assert not answer.done(), "the blocks may still be written: the request must not get them"
    finally:
        pair.prefill.signal(signal.SIGCONT)
    assert tokens_of(answer.result(timeout=60)) == expected(pair.decode, ids)
    leg.result(timeout=60)
    wait_for("all KV is free", lambda: pair.prefill.kv_usage() == 0 == pair.decode.kv_usage())
    check_next(pair, 301)


def test_a_killed_decode_frees_prefill(pair: Pair) -> None:
    ids, transfer_id = prompt(400, 1500), new_id()
    leg = pool.submit(pair.prefill.complete, ids, max_tokens=1, params=pair.prefill_params(transfer_id))
    pool.submit(pair.decode.complete, ids, max_tokens=TOKENS, params=pair.decode_params(transfer_id))
    wait_for("prefill pushes", lambda: pair.prefill.status()["transfers"]["pushing"] == 1, 10)
    time.sleep(0.3)
    pair.decode.stop()
    pair.decode.start()
    leg.result(timeout=60).raise_for_status()
    wait_for("prefill's KV is free", lambda: pair.prefill.kv_usage() == 0, LEASE * 10)
    pair.decode.wait()
    pair.warm()
    check_next(pair, 401)


def test_a_killed_prefill_fails_over_to_local_and_its_successor_serves(pair: Pair) -> None:
    """Killed in the middle of a prefill, restarted under the same address."""
    ids, transfer_id = prompt(500, 1500), new_id()
    wanted = expected(pair.decode, prompt(499, 60))
    leg = pool.submit(pair.prefill.complete, ids, max_tokens=1, params=pair.prefill_params(transfer_id))
    answer = pool.submit(pair.decode.complete, ids, max_tokens=TOKENS, params=pair.decode_params(transfer_id))
    wait_for("a transfer is open", lambda: pair.decode.status()["transfers"]["booked"] == 1, 10)
    time.sleep(0.4)
    pair.prefill.stop()
    pair.decode.control({"op": "peers", "peers": []})  # what the dispatcher says when the connection is refused
    began = time.monotonic()
    pair.prefill.start()
    tokens = tokens_of(answer.result(timeout=60))
    assert time.monotonic() - began < LEASE * 10
    assert pair.account(transfer_id)["reason"] == "prefill_dead"
    assert tokens == expected(pair.decode, ids)
    assert expected(pair.decode, prompt(499, 60)) == wanted
    wait_for("decode's KV is free", lambda: pair.decode.kv_usage() == 0)
    with pytest.raises(httpx.TransportError):
        leg.result(timeout=60).raise_for_status()
    pair.prefill.wait()
    pair.warm()
    check_next(pair, 501)
