"""The A/B: the same open-loop load offered to several targets in turns, within one run.

For each request rate, each round goes through all targets in a rotating order and offers each of them the very same
plan (arrival times, lengths, prompts). Targets are endpoints that exist already, or pairs that are started here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import aiohttp

from prebook_bench import client, load, machine, summary
from prebook_bench.engines import Pair, PairOptions, Progress
from prebook_bench.fleet import awake, front_of, running_pairs
from prebook_bench.load import Arrival, Lengths, Record
from prebook_bench.modes import Mode
from prebook_bench.rig import Rig
from prebook_bench.summary import Slo
from prebook_bench.workload import ModelShape, token_prompt

_WARM_UP_ATTEMPTS = 6


@dataclasses.dataclass(frozen=True)
class AbOptions:
    """What is offered. `requests` is per target and rate, spread over `rounds`."""

    rates: tuple[float, ...]
    requests: int
    rounds: int
    lengths: Lengths
    slo: Slo
    vocabulary: int
    model: str
    timeout_s: float = 120.0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Target:
    """Something that answers completions. `turn` is held while the target is measured, `check` raises if it died."""

    name: str
    send: load.Send
    turn: Callable[[], AbstractContextManager[None]]
    check: Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Taken:
    """One request of the run: where and when it belongs, and what became of it."""

    target: str
    rate: float
    round: int
    record: Record


async def measure(
    targets: Sequence[Target], *, options: AbOptions, progress: Progress
) -> tuple[list[Taken], dict[tuple[str, float], float], list[dict[str, Any]]]:
    """Runs everything; returns the requests, the seconds each target was under load at each rate, warm-up failures."""
    taken: list[Taken] = []
    durations: dict[tuple[str, float], float] = {}
    failures: list[dict[str, Any]] = []
    # A kept connection may have been closed by its server while that was frozen or busy.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        for target in targets:
            with target.turn():
                failures += await _warm_up(target, session=session, options=options, progress=progress)
        for rate in options.rates:
            for number in range(options.rounds):
                arrivals = _plan(options, rate=rate, number=number)
                turn = number % len(targets)
                for target in [*targets[turn:], *targets[:turn]]:
                    with target.turn():
                        started = time.perf_counter()
                        records = await load.offer(
                            arrivals, send=target.send, session=session, timeout_s=options.timeout_s
                        )
                        took = time.perf_counter() - started
                        target.check()
                    key = (target.name, rate)
                    durations[key] = durations.get(key, 0.0) + took
                    taken += [Taken(target.name, rate, number, record) for record in records]
                    failed = sum(not record.ok for record in records)
                    progress(
                        f"{target.name}, {rate:g}/s, round {number + 1}/{options.rounds}: {len(records)} requests "
                        f"in {took:.1f} s, {failed} failed"
                    )
    return taken, durations, failures


def report(
    taken: Sequence[Taken],
    *,
    durations: dict[tuple[str, float], float],
    failures: Sequence[dict[str, Any]],
    options: AbOptions,
    about: dict[str, Any],
) -> dict[str, Any]:
    """The JSON report: a row per target and rate, ratios against the first target, all records. Pure."""
    rows = []
    for rate in options.rates:
        for target in dict.fromkeys(one.target for one in taken):
            records = [one.record for one in taken if one.target == target and one.rate == rate]
            figures = summary.summarise(records, duration=durations[target, rate], slo=options.slo)
            rows.append({"target": target, "rate": rate, **figures})
    base = taken[0].target if taken else ""
    return {
        "measurement": "ab",
        **about,
        "workload": dataclasses.asdict(options.lengths),
        "slo": {"ttft_s": options.slo.ttft, "tpot_s": options.slo.tpot},
        "rounds": options.rounds,
        "seed": options.seed,
        "summary": rows,
        "ratios_to": base,
        "ratios": {
            f"{rate:g}": summary.ratios([row for row in rows if row["rate"] == rate], base=base)
            for rate in options.rates
        },
        "errors": list(failures),
        "records": [_json(one) for one in taken],
    }


def _json(one: Taken) -> dict[str, Any]:
    record = one.record
    return {
        "target": one.target,
        "rate": one.rate,
        "round": one.round,
        "at": round(record.arrival.at, 6),
        "prompt_tokens": record.arrival.prompt_tokens,
        "output_tokens": record.tokens,
        **{name: _rounded(getattr(record, name)) for name in ("late", "ttft", "tpot", "e2e")},
        "remote": record.remote,
        "error": record.error,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _plan(options: AbOptions, *, rate: float, number: int) -> list[Arrival]:
    share = options.requests // options.rounds + (number < options.requests % options.rounds)
    return load.plan(rate=rate, count=max(1, share), lengths=options.lengths, seed=options.seed * 1000 + number)


async def _warm_up(
    target: Target, *, session: aiohttp.ClientSession, options: AbOptions, progress: Progress
) -> list[dict[str, Any]]:
    """Two good requests before anything is measured; what failed on the way is reported, not measured."""
    failures: list[dict[str, Any]] = []
    good = 0
    for attempt in range(_WARM_UP_ATTEMPTS):
        arrival = Arrival(at=0, prompt_tokens=600, output_tokens=4, seed=f"warm-{attempt}")
        (record,) = await load.offer([arrival], send=target.send, session=session, timeout_s=options.timeout_s)
        target.check()
        good += record.ok
        if record.error is not None:
            failures.append({"target": target.name, "phase": "warm-up", "error": record.error})
            progress(f"{target.name}: warm-up request {attempt + 1} failed: {record.error}")
        if good == 2:
            return failures
    raise client.RequestError(
        f"{target.name}: no two of {_WARM_UP_ATTEMPTS} warm-up requests succeeded: {failures[-1]}"
    )


def body_of(arrival: Arrival, *, options: AbOptions) -> dict[str, Any]:
    """The completion request of an arrival: token ids, a fixed number of output tokens, greedy."""
    return {
        "model": options.model,
        "prompt": token_prompt(arrival.prompt_tokens, vocabulary=options.vocabulary, seed=arrival.seed),
        "max_tokens": arrival.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def endpoint(name: str, url: str, *, options: AbOptions) -> Target:
    """A target that runs already, at its base URL."""
    address = url.rstrip("/").removesuffix("/v1") + "/v1/completions"

    async def send(session: aiohttp.ClientSession, arrival: Arrival) -> client.Answer:
        return await client.stream(session, address, body=body_of(arrival, options=options))

    return Target(name=name, send=send, turn=contextlib.nullcontext, check=lambda: None)


async def served_model(url: str) -> str:
    """The first model that an endpoint lists. Raises RequestError when it lists none."""
    address = url.rstrip("/").removesuffix("/v1") + "/v1/models"
    try:
        async with aiohttp.ClientSession() as session, session.get(address) as response:
            answer = await response.json()
            return str(answer["data"][0]["id"])
    except (aiohttp.ClientError, KeyError, IndexError, ValueError, TypeError) as error:
        raise client.RequestError(f"{address} lists no model ({error!r})") from error


@contextlib.asynccontextmanager
async def pairs(
    modes: Sequence[Mode], *, rig: Rig, pair: PairOptions, options: AbOptions, progress: Progress
) -> AsyncIterator[list[Target]]:
    """Targets that are started here, all up and frozen but the one whose turn it is."""
    with tempfile.TemporaryDirectory(prefix="prebook-bench-") as folder:
        progress(f"starting engines ({', '.join(modes)}); logs in {folder}")
        async with running_pairs(modes, rig=rig, options=pair, folder=Path(folder), progress=progress) as running:
            yield [_pair_target(one, running=running, pair=pair, options=options) for one in running]


def _pair_target(one: Pair, *, running: Sequence[Pair], pair: PairOptions, options: AbOptions) -> Target:
    front = front_of(one, dispatch=pair.dispatch)

    async def send(session: aiohttp.ClientSession, arrival: Arrival) -> client.Answer:
        return (await front.send(session, body_of(arrival, options=options))).answer

    def check() -> None:
        for engine in one.engines:
            engine.check_alive()

    return Target(name=str(one.mode), send=send, turn=lambda: awake(one, among=running), check=check)


async def run_pairs(
    modes: Sequence[Mode],
    *,
    rig: Rig,
    pair: PairOptions,
    options: AbOptions,
    command: Sequence[str],
    progress: Progress,
) -> dict[str, Any]:
    """The A/B over pairs started here; returns the report."""
    about = {
        "machine": machine.describe(command),
        "rig": rig.describe(),
        "front": "dispatch" if pair.dispatch else "direct",
        "kv_bytes_per_token": ModelShape.of(Path(pair.shape.model)).kv_bytes_per_token,
        "chunk_tokens": pair.shape.chunk_tokens,
    }
    async with pairs(modes, rig=rig, pair=pair, options=options, progress=progress) as targets:
        taken, durations, failures = await measure(targets, options=options, progress=progress)
    return report(taken, durations=durations, failures=failures, options=options, about=about)


async def run_endpoints(
    endpoints: dict[str, str], *, options: AbOptions, command: Sequence[str], progress: Progress
) -> dict[str, Any]:
    """The A/B over endpoints that exist; returns the report. Without a model name the first endpoint is asked."""
    if not options.model:
        options = dataclasses.replace(options, model=await served_model(next(iter(endpoints.values()))))
    targets = [endpoint(name, url, options=options) for name, url in endpoints.items()]
    about = {"machine": machine.describe(command), "rig": {"endpoints": endpoints}, "model": options.model}
    taken, durations, failures = await measure(targets, options=options, progress=progress)
    return report(taken, durations=durations, failures=failures, options=options, about=about)
