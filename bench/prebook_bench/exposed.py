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
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from prebook_bench import client, machine, stats
from prebook_bench.engines import Pair, PairOptions, Progress
from prebook_bench.fleet import awake, front_of, running_pairs
from prebook_bench.fronts import prefill_body
from prebook_bench.link import measure_bits_per_second
from prebook_bench.modes import Mode
from prebook_bench.rig import Rig, parse_rate
from prebook_bench.trace import client as client_timeline
from prebook_bench.workload import ModelShape, line_time, token_prompt

_WARM_UP_ATTEMPTS = 6
_WARM_UP_TOKENS = 1100


@dataclasses.dataclass(frozen=True)
class ExposedOptions:
    """What to measure. Lengths are prompt tokens; a request may take `timeout_s` seconds before it counts as failed."""

    modes: tuple[Mode, ...]
    lengths: tuple[int, ...]
    repeats: int
    pair: PairOptions
    together: bool
    timeout_s: float = 60.0
    seed: int = 0


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


async def measure(options: ExposedOptions, *, rig: Rig, command: Sequence[str], progress: Progress) -> dict[str, Any]:
    """Runs the measurement and returns the report (JSON values). Raises EngineError when an engine does not start."""
    model = ModelShape.of(Path(options.pair.shape.model))
    run = Run()
    measured_rate = measure_bits_per_second(rig) if rig.rate else None
    described = machine.describe(command)
    batches = [options.modes] if options.together else [(mode,) for mode in options.modes]
    with tempfile.TemporaryDirectory(prefix="prebook-bench-") as folder:
        for batch in batches:
            progress(f"starting {2 * len(batch)} engines ({', '.join(batch)}); logs in {folder}")
            async with running_pairs(
                batch, rig=rig, options=options.pair, folder=Path(folder), progress=progress
            ) as pairs:
                await _measure_batch(pairs, options=options, model=model, run=run, progress=progress)
    rate = parse_rate(rig.rate) if rig.rate else None
    return {
        "measurement": "exposed",
        "machine": described,
        "rig": {**rig.describe(), "measured_bits_per_second": measured_rate},
        "front": "dispatch" if options.pair.dispatch else "direct",
        "interleaved": options.together,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "chunk_tokens": options.pair.shape.chunk_tokens,
        "summary": summarise(run, options=options, model=model, rate=rate),
        "samples": [dataclasses.asdict(sample) for sample in run.samples],
        "errors": run.errors,
    }


async def _measure_batch(
    pairs: list[Pair], *, options: ExposedOptions, model: ModelShape, run: Run, progress: Progress
) -> None:
    connector = aiohttp.TCPConnector(force_close=True)  # a kept connection may have been closed while its server slept
    async with aiohttp.ClientSession(connector=connector) as session:
        for pair in pairs:
            with awake(pair, among=pairs):
                await _warm_up(pair, session=session, options=options, model=model, run=run, progress=progress)
        for repeat in range(options.repeats):
            for tokens in options.lengths:
                turn = repeat % len(pairs)
                for pair in pairs[turn:] + pairs[:turn]:
                    with awake(pair, among=pairs):
                        await _one(pair, session=session, tokens=tokens, repeat=repeat, options=options, model=model,
                                   run=run, progress=progress)  # fmt: skip


async def _warm_up(
    pair: Pair,
    *,
    session: aiohttp.ClientSession,
    options: ExposedOptions,
    model: ModelShape,
    run: Run,
    progress: Progress,
) -> None:
    """First requests of a pair (handshakes, first allocations). Stock connectors fail some of them: counted."""
    front = front_of(pair, dispatch=options.pair.dispatch)
    good = 0
    for attempt in range(_WARM_UP_ATTEMPTS):
        body = _body(_WARM_UP_TOKENS, options=options, model=model, seed=f"warm-{pair.mode}-{attempt}")
        try:
            async with asyncio.timeout(options.timeout_s):
                await client.post(session, _completions(pair), body=prefill_body(body))
                await front.send(session, body)
            good += 1
        except (aiohttp.ClientError, TimeoutError, client.RequestError) as error:
            run.errors.append({"mode": pair.mode, "phase": "warm-up", "attempt": attempt, "error": _words(error)})
            progress(f"{pair.mode}: warm-up request {attempt + 1} failed: {_words(error)}")
        for engine in pair.engines:
            engine.check_alive()
        if good == 2:
            return
    raise client.RequestError(
        f"{pair.mode}: no two of {_WARM_UP_ATTEMPTS} warm-up requests succeeded\n"
        f"{pair.prefill.log_tail()}\n{pair.decode.log_tail()}"
    )


async def _one(
    pair: Pair,
    *,
    session: aiohttp.ClientSession,
    tokens: int,
    repeat: int,
    options: ExposedOptions,
    model: ModelShape,
    run: Run,
    progress: Progress,
) -> None:
    seed = f"{options.seed}-{pair.mode}-{tokens}-{repeat}"
    try:
        async with asyncio.timeout(options.timeout_s):
            bare = prefill_body(_body(tokens, options=options, model=model, seed=seed + "-bare"))
            _, bare_leg = await client.post(session, _completions(pair), body=bare)
            body = _body(tokens, options=options, model=model, seed=seed)
            outcome = await front_of(pair, dispatch=options.pair.dispatch).send(session, body)
    except (aiohttp.ClientError, TimeoutError, client.RequestError) as error:
        run.errors.append(
            {"mode": pair.mode, "phase": "measure", "tokens": tokens, "repeat": repeat, "error": _words(error)}
        )
        progress(f"{pair.mode}, {tokens} tokens: failed: {_words(error)}")
        for engine in pair.engines:
            engine.check_alive()
        return
    if options.pair.timeline_dir is not None:
        client_timeline.record(options.pair.timeline_dir, outcome)
    sample = Sample(
        mode=pair.mode,
        tokens=tokens,
        repeat=repeat,
        bare_leg=bare_leg,
        ttft=outcome.answer.ttft,
        prefill_leg=outcome.prefill_leg,
    )
    run.samples.append(sample)
    progress(
        f"{pair.mode}, {tokens} tokens, {repeat + 1}/{options.repeats}: "
        f"TTFT {sample.ttft * 1e3:.0f} ms, bare prefill {bare_leg * 1e3:.0f} ms"
    )


def summarise(run: Run, *, options: ExposedOptions, model: ModelShape, rate: float | None) -> list[dict[str, Any]]:
    """One row per mode and length that has samples: medians in seconds, ratios to pull of the same length."""
    rows: list[dict[str, Any]] = []
    for tokens in options.lengths:
        for mode in options.modes:
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
                    "kv_bytes": tokens * model.kv_bytes_per_token,
                    "line_time_s": _line(tokens, model=model, rate=rate),
                    "last_chunk_line_time_s": _line(_last_chunk(tokens, options=options), model=model, rate=rate),
                }
            )
    pull = {row["tokens"]: row for row in rows if row["mode"] is Mode.PULL}
    for row in rows:
        base = pull.get(row["tokens"])
        row["exposed_to_pull"] = row["exposed_s"] / base["exposed_s"] if base and base["exposed_s"] > 0 else None
    return rows


def _last_chunk(tokens: int, *, options: ExposedOptions) -> int:
    return tokens % options.pair.shape.chunk_tokens or options.pair.shape.chunk_tokens


def _line(tokens: int, *, model: ModelShape, rate: float | None) -> float | None:
    if rate is None:
        return None
    return line_time(tokens, kv_bytes_per_token=model.kv_bytes_per_token, bits_per_second=rate)


def _body(tokens: int, *, options: ExposedOptions, model: ModelShape, seed: str) -> dict[str, Any]:
    return {
        "model": options.pair.shape.served_name,
        "prompt": token_prompt(tokens, vocabulary=model.vocabulary, seed=seed),
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
    }


def _completions(pair: Pair) -> str:
    return f"{pair.prefill.identity.base_url}/v1/completions"


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error) or 'no answer in time'}"[:300]
