"""Exposed transfer: how much later the first token comes than the prefill engine alone could have given it.

For every mode and prompt length: ``exposed = median(TTFT through the pair) - median(bare prefill leg)``, where the bare
leg is the same kind of prompt sent to the same prefill engine with ``max_tokens=1`` and no transfer. Every prompt is
new (no prefix hits). Repeats go round all modes and lengths, so that slow drifts of the machine hit all of them alike;
pairs that are not being measured are frozen. With the direct front the prefill leg of the measured request itself is
known too (``exposed_in_request_s``): less noise, but blind to a transfer that slows prefill down.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import aiohttp

from prebook_bench import client, fleet, stats
from prebook_bench.engines import Pair
from prebook_bench.fronts import prefill_body
from prebook_bench.modes import Mode
from prebook_bench.setting import FAILURES, Setting, rotated, warm_up, words
from prebook_bench.trace import client as client_timeline
from prebook_bench.workload import line_time

_WARM_UP_TOKENS = 1100
_OUTPUT_TOKENS = 4


@dataclasses.dataclass(frozen=True)
class ExposedOptions:
    """What to measure: prompt lengths in tokens, measured requests per mode and length."""

    lengths: tuple[int, ...]
    repeats: int


@dataclasses.dataclass(frozen=True)
class Sample:
    """One measured request. Seconds; `prefill_leg` is the request's own leg where the front saw it."""

    mode: Mode
    tokens: int
    repeat: int
    bare_leg: float
    ttft: float
    prefill_leg: float | None


@dataclasses.dataclass
class Run:
    """What a run collects while it goes."""

    samples: list[Sample] = dataclasses.field(default_factory=list)
    errors: list[dict[str, Any]] = dataclasses.field(default_factory=list)


async def measure(options: ExposedOptions, *, setting: Setting) -> dict[str, Any]:
    """Runs the measurement and returns the report (JSON values). Raises EngineError when an engine does not start."""
    about = setting.about()
    run = Run()
    for batch in setting.batches:
        async with fleet.running_pairs(
            batch, rig=setting.rig, options=setting.pair, progress=setting.progress
        ) as pairs:
            await measure_pairs(pairs, among=pairs, options=options, setting=setting, run=run)
    return report(run, options=options, setting=setting, about=about)


def report(run: Run, *, options: ExposedOptions, setting: Setting, about: dict[str, Any]) -> dict[str, Any]:
    """The JSON report. Pure."""
    return {
        "measurement": "exposed",
        **about,
        "summary": summarise(run, options=options, setting=setting),
        "samples": [dataclasses.asdict(sample) for sample in run.samples],
        "errors": run.errors,
    }


async def measure_pairs(
    pairs: Sequence[Pair], *, among: Sequence[Pair], options: ExposedOptions, setting: Setting, run: Run
) -> None:
    """Measures `pairs` out of those that are up at the same time."""
    connector = aiohttp.TCPConnector(force_close=True)  # a kept connection may have been closed while its server slept
    async with aiohttp.ClientSession(connector=connector) as session:
        for pair in pairs:
            async with fleet.awake(pair, among=among):
                run.errors += await warm_up(
                    str(pair.mode),
                    functools.partial(_first, pair=pair, session=session, setting=setting),
                    check=pair.check_alive,
                    timeout_s=setting.timeout_s,
                    progress=setting.progress,
                )
        for repeat in range(options.repeats):
            for tokens in options.lengths:
                for pair in rotated(pairs, by=repeat):
                    async with fleet.awake(pair, among=among):
                        await _one(pair, session=session, tokens=tokens, repeat=repeat, setting=setting, run=run)


async def _first(number: int, *, pair: Pair, session: aiohttp.ClientSession, setting: Setting) -> None:
    body = setting.body(_WARM_UP_TOKENS, output=_OUTPUT_TOKENS, seed=f"warm-{pair.mode}-{number}")
    await client.post(session, _completions(pair), body=prefill_body(body))
    await fleet.front_of(pair).send(session, body)


async def _one(
    pair: Pair, *, session: aiohttp.ClientSession, tokens: int, repeat: int, setting: Setting, run: Run
) -> None:
    seed = f"{setting.seed}-{pair.mode}-{tokens}-{repeat}"
    try:
        async with asyncio.timeout(setting.timeout_s):
            bare = prefill_body(setting.body(tokens, output=_OUTPUT_TOKENS, seed=seed + "-bare"))
            _, bare_leg = await client.post(session, _completions(pair), body=bare)
            body = setting.body(tokens, output=_OUTPUT_TOKENS, seed=seed)
            outcome = await fleet.front_of(pair).send(session, body)
    except FAILURES as error:
        run.errors.append(
            {"target": pair.mode, "phase": "measure", "tokens": tokens, "repeat": repeat, "error": words(error)}
        )
        setting.progress(f"{pair.mode}, {tokens} tokens: failed: {words(error)}")
        pair.check_alive()
        return
    if setting.pair.timeline_dir is not None:
        client_timeline.record(setting.pair.timeline_dir, outcome)
    sample = Sample(
        mode=pair.mode,
        tokens=tokens,
        repeat=repeat,
        bare_leg=bare_leg,
        ttft=outcome.answer.ttft,
        prefill_leg=outcome.prefill_leg,
    )
    run.samples.append(sample)
    setting.progress(
        f"{pair.mode}, {tokens} tokens, repeat {repeat + 1}: "
        f"TTFT {sample.ttft * 1e3:.0f} ms, bare prefill {bare_leg * 1e3:.0f} ms"
    )


def summarise(run: Run, *, options: ExposedOptions, setting: Setting) -> list[dict[str, Any]]:
    """One row per mode and length that has samples: medians in seconds, ratios to pull of the same length."""
    rows: list[dict[str, Any]] = []
    chunk = setting.pair.shape.chunk_tokens
    for tokens in options.lengths:
        for mode in setting.modes:
            chosen = [s for s in run.samples if s.mode is mode and s.tokens == tokens]
            if not chosen:
                continue
            ttft, bare = stats.median([s.ttft for s in chosen]), stats.median([s.bare_leg for s in chosen])
            own = [s.ttft - s.prefill_leg for s in chosen if s.prefill_leg is not None]
            rows.append(
                {
                    "mode": mode,
                    "tokens": tokens,
                    "samples": len(chosen),
                    "ttft_s": ttft,
                    "bare_prefill_s": bare,
                    "exposed_s": ttft - bare,
                    "exposed_in_request_s": stats.median(own) if own else None,
                    "kv_bytes": tokens * setting.model.kv_bytes_per_token,
                    "line_time_s": _line(tokens, setting=setting),
                    "last_chunk_line_time_s": _line(tokens % chunk or chunk, setting=setting),
                }
            )
    pull = {row["tokens"]: row for row in rows if row["mode"] is Mode.PULL}
    for row in rows:
        base = pull.get(row["tokens"])
        row["exposed_to_pull"] = row["exposed_s"] / base["exposed_s"] if base and base["exposed_s"] > 0 else None
    return rows


def _line(tokens: int, *, setting: Setting) -> float | None:
    rate = setting.bits_per_second
    if rate is None:
        return None
    return line_time(tokens, kv_bytes_per_token=setting.model.kv_bytes_per_token, bits_per_second=rate)


def _completions(pair: Pair) -> str:
    return f"{pair.prefill.identity.base_url}/v1/completions"
