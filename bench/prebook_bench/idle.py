"""CPU that an idle pair uses: nothing is asked of it, every thread that spins shows.

Per kind of pair (no connector, stock push, Prebook): start, one request through the pair so that handshakes are done,
settle, then CPU seconds of both engines' process trees over wall seconds. 1.0 is one core.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from prebook_bench import client, machine
from prebook_bench.engines import Pair, PairOptions, Progress, running_pair
from prebook_bench.fleet import front_of, wait_paired
from prebook_bench.fronts import prefill_body
from prebook_bench.modes import Mode
from prebook_bench.rig import Rig
from prebook_bench.workload import ModelShape, token_prompt

_SETTLE_S = 8.0


async def measure(
    modes: Sequence[Mode],
    *,
    seconds: float,
    rig: Rig,
    options: PairOptions,
    command: Sequence[str],
    progress: Progress,
) -> dict[str, Any]:
    """Returns the report (JSON values). Raises EngineError when an engine does not start."""
    described = machine.describe(command)
    rows = []
    with tempfile.TemporaryDirectory(prefix="prebook-bench-") as folder:
        for mode in modes:
            progress(f"{mode}: starting two engines; logs in {folder}")
            async with running_pair(mode, rig=rig, options=options, folder=Path(folder), progress=progress) as pair:
                await wait_paired(pair)
                warm = await _warm_up(pair, options=options)
                progress(f"{mode}: idle for {_SETTLE_S + seconds:.0f} s")
                await asyncio.sleep(_SETTLE_S)
                rows.append({"mode": mode, "warm_up": warm, **await _cpu(pair, seconds=seconds)})
    return {
        "measurement": "idle",
        "machine": described,
        "rig": rig.describe(),
        "seconds": seconds,
        "summary": with_baseline(rows),
    }


async def _cpu(pair: Pair, *, seconds: float) -> dict[str, float]:
    before = [engine.cpu_seconds() for engine in pair.engines]
    started = time.monotonic()
    await asyncio.sleep(seconds)
    after = [engine.cpu_seconds() for engine in pair.engines]
    wall = time.monotonic() - started
    for engine in pair.engines:
        engine.check_alive()
    prefill, decode = ((b - a) / wall for a, b in zip(before, after, strict=True))
    return {"prefill_cores": prefill, "decode_cores": decode, "pair_cores": prefill + decode}


def with_baseline(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds what each pair uses beyond one without a connector, where that was measured in the same run."""
    base = next((row["pair_cores"] for row in rows if row["mode"] is Mode.NONE), None)
    return [{**row, "beyond_baseline_cores": None if base is None else row["pair_cores"] - base} for row in rows]


async def _warm_up(pair: Pair, *, options: PairOptions) -> str:
    """One request that moves KV (two plain ones without a connector); "failed: …" when the pair could not do it."""
    model = ModelShape.of(Path(options.shape.model))
    body = {
        "model": options.shape.served_name,
        "prompt": token_prompt(600, vocabulary=model.vocabulary, seed="idle"),
        "max_tokens": 4,
        "temperature": 0,
    }
    error: Exception | None = None
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        for _ in range(3):
            try:
                async with asyncio.timeout(60):
                    if not pair.mode.transfers:
                        for engine in pair.engines:
                            url = f"{engine.identity.base_url}/v1/completions"
                            await client.post(session, url, body=prefill_body(body))
                    else:
                        await front_of(pair).send(session, body)
                return "ok"
            except (aiohttp.ClientError, TimeoutError, client.RequestError) as failure:
                error = failure
                for engine in pair.engines:
                    engine.check_alive()
    return f"failed: {error!r}"[:300]
