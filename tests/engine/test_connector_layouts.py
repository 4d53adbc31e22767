"""Tensor parallelism that differs between the two sides, and layouts that are pushed whole at the end of prefill."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from prebook_operator.local.models import ensure_model
from tests.engine.pair import Engine, EngineSpec, Pair, engines, new_id, tokens_of, wait_for

# Little KV: six workers share one machine.
ARGS = (
    "--block-size",
    "32",
    "--max-num-batched-tokens",
    "256",
    "--max-model-len",
    "1024",
    "--num-gpu-blocks-override",
    "80",
)
TOKENS = 5
LENGTHS = (1, 31, 32, 33, 257, 700)

pool = ThreadPoolExecutor(4)


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 500) for _ in range(length)]


def through(pair: Pair, ids: list[int]) -> tuple[list[int], list[dict[str, Any]]]:
    """Tokens through both engines, and every decode rank's account."""
    transfer_id = new_id()
    leg = pool.submit(pair.prefill.complete, ids, max_tokens=1, params=pair.prefill_params(transfer_id))
    answer = pair.decode.complete(ids, max_tokens=TOKENS, params=pair.decode_params(transfer_id))
    leg.result().raise_for_status()
    ranks = range(pair.decode.spec.tp)
    ask = {"op": "transfer", "transfer_id": transfer_id}
    return tokens_of(answer), [pair.decode.control(ask, f"worker-0-0-{rank}.sock") for rank in ranks]


@pytest.fixture(scope="module")
def by_tp() -> Iterator[dict[tuple[str, int], Engine]]:
    """Prefill and decode engines with one and two ranks, all at once."""
    model = ensure_model("tiny")
    # float32: another order of summation must not flip near ties of random weights.
    specs = [
        EngineSpec(role, model, {"lease_seconds": 10}, ARGS, tp=tp) for role in ("prefill", "decode") for tp in (1, 2)
    ]
    with engines(*specs) as started:
        yield {(engine.spec.role, engine.spec.tp): engine for engine in started}


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1), (2, 2)])
def test_tensor_parallel_pairs(by_tp: dict[tuple[str, int], Engine], prefill_tp: int, decode_tp: int) -> None:
    pair = Pair(by_tp["prefill", prefill_tp], by_tp["decode", decode_tp])
    pair.warm(60)
    prefill_bytes = pair.prefill.status()["block_bytes"] * prefill_tp
    for length in LENGTHS:
        ids = prompt(length + 10 * prefill_tp + decode_tp, length)
        tokens, accounts = through(pair, ids)
        assert tokens == tokens_of(pair.prefill.complete(ids, max_tokens=TOKENS)), length
        for account in accounts:
            assert account["state"] == "committed", account
            assert account["blocks"] == -(-length // 32)
        if prefill_tp >= decode_tp:
            # With one decode rank the account has the bytes of every prefill rank; with two each has its own half.
            assert sum(account["bytes"] for account in accounts) == prefill_bytes * -(-length // 32)
    wait_for("all KV is free", lambda: pair.prefill.kv_usage() == 0 == pair.decode.kv_usage())


@pytest.fixture(scope="module")
def windowed() -> Iterator[Pair]:
    """A model whose layers look back over a sliding window: not eligible for progressive push."""
    model = ensure_model("tiny-w256")
    specs = [EngineSpec(role, model, {"lease_seconds": 10}, ARGS) for role in ("prefill", "decode")]
    with engines(*specs) as (prefill, decode):
        pair = Pair(prefill, decode)
        pair.warm()
        yield pair


@pytest.mark.parametrize("length", LENGTHS)
def test_a_sliding_window_is_pushed_whole_and_right(windowed: Pair, length: int) -> None:
    ids = prompt(9000 + length, length)
    tokens, (account,) = through(windowed, ids)
    assert tokens == tokens_of(windowed.prefill.complete(ids, max_tokens=TOKENS))
    assert account["state"] == "committed", account
    assert account["overlap"] == 0
    wait_for("all KV is free", lambda: windowed.prefill.kv_usage() == 0 == windowed.decode.kv_usage())
