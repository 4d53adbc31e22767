"""The A/B: the same open-loop load offered to several targets in turns, within one run.

For each request rate, each round goes through all targets in a rotating order and offers each of them the very same
plan (arrival times, lengths, prompts). Targets are endpoints that exist already, pairs that are started here, or local
runs of a model's manifest. A request that fails is counted; a target that dies is reported and left out from then on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp

from prebook_bench import client, fleet, link_use, load, machine, summary, vllm_bench
from prebook_bench.engines import EngineError, Pair, Progress
from prebook_bench.load import Arrival, Lengths, Record
from prebook_bench.modes import FrontKind
from prebook_bench.router import RouterError
from prebook_bench.setting import Setting, completion, rotated, warm_up
from prebook_bench.summary import Slo
from prebook_bench.workload import ModelShape


@dataclasses.dataclass(frozen=True)
class AbOptions:
    """What is offered. `requests` is per target and rate, spread over `rounds`.

    `tokenizer` set: `vllm bench serve` offers the load, with its own Poisson arrivals, prompts and clock.
    """

    rates: tuple[float, ...]
    requests: int
    rounds: int
    lengths: Lengths
    slo: Slo
    vocabulary: int
    model: str
    timeout_s: float = 120.0
    seed: int = 0
    tokenizer: str | None = None

    @property
    def generator(self) -> str:
        """Who offers the load, for the report."""
        return "vllm bench serve" if self.tokenizer is not None else "prebook_bench"


@dataclasses.dataclass(frozen=True)
class Target:
    """Something that answers completions.

    `turn` is held while the target is measured, `check` raises if it died; `base_url` is None where only `send` knows
    how to ask it. `link` is the byte counter of its link, and `bits_per_second` the link's rate, where there is one.
    """

    name: str
    base_url: str | None
    send: load.Send
    turn: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext
    check: Callable[[], None] = lambda: None
    link: Path | None = None
    bits_per_second: float | None = None


@dataclasses.dataclass(frozen=True)
class Taken:
    """One request of the run: where and when it belongs, and what became of it."""

    target: str
    rate: float
    round: int
    record: Record


@dataclasses.dataclass
class Measured:
    """What a run collects: requests, seconds under load and use of the link by target and rate, what went wrong."""

    taken: list[Taken] = dataclasses.field(default_factory=list)
    durations: dict[tuple[str, float], float] = dataclasses.field(default_factory=dict)
    links: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    errors: list[dict[str, Any]] = dataclasses.field(default_factory=list)


async def measure(targets: Sequence[Target], *, options: AbOptions, into: Measured, progress: Progress) -> None:
    """Offers the load to targets that are up at the same time."""
    alive = {target.name: target for target in targets}
    # A kept connection may have been closed by its server while that was frozen or busy.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        for target in targets:
            try:
                async with target.turn():
                    into.errors += await warm_up(
                        target.name,
                        functools.partial(_warm, target=target, session=session),
                        check=target.check,
                        timeout_s=options.timeout_s,
                        progress=progress,
                    )
            except (EngineError, RouterError) as error:
                _bury(target, error=error, alive=alive, into=into, progress=progress)
        for rate in options.rates:
            for number in range(options.rounds):
                for target in rotated(targets, by=number):
                    if target.name not in alive:
                        continue
                    try:
                        await _turn(target, rate=rate, number=number, session=session, options=options, into=into,
                                    progress=progress)  # fmt: skip
                    except (EngineError, RouterError) as error:
                        _bury(target, error=error, alive=alive, into=into, progress=progress)


def _bury(target: Target, *, error: Exception, alive: dict[str, Target], into: Measured, progress: Progress) -> None:
    del alive[target.name]
    into.errors.append({"target": target.name, "phase": "died", "error": str(error)[-2000:]})
    progress(f"{target.name}: out of the run: {error}")


async def _turn(
    target: Target,
    *,
    rate: float,
    number: int,
    session: aiohttp.ClientSession,
    options: AbOptions,
    into: Measured,
    progress: Progress,
) -> None:
    count = options.requests // options.rounds + (number < options.requests % options.rounds)
    seed = options.seed * 1000 + number
    async with target.turn(), link_use.watched(target.link) as readings:
        started = time.perf_counter()
        if options.tokenizer is not None:
            if target.base_url is None:
                raise ValueError(f"{target.name}: `vllm bench serve` needs a server to ask; use --front dispatch")
            asked = vllm_bench.Ask(base_url=target.base_url, model=options.model, tokenizer=options.tokenizer,
                                   rate=rate, count=max(1, count), lengths=options.lengths, seed=seed)  # fmt: skip
            records, took = await vllm_bench.offer(asked)
        else:
            arrivals = load.plan(rate=rate, count=max(1, count), lengths=options.lengths, seed=seed)
            records = await load.offer(arrivals, send=target.send, session=session, timeout_s=options.timeout_s)
            took = time.perf_counter() - started
    key = (target.name, rate)
    into.durations[key] = into.durations.get(key, 0.0) + took
    into.taken += [Taken(target.name, rate, number, record) for record in records]
    if used := link_use.describe(readings, bits_per_second=target.bits_per_second):
        into.links.append({"target": target.name, "rate": rate, "round": number, **used})
    failed = sum(not record.ok for record in records)
    progress(
        f"{target.name}, {rate:g}/s, round {number + 1}/{options.rounds}: {len(records)} requests "
        f"in {took:.1f} s, {failed} failed"
    )
    target.check()


async def _warm(number: int, *, target: Target, session: aiohttp.ClientSession) -> None:
    await target.send(session, Arrival(at=0, prompt_tokens=600, output_tokens=4, seed=f"warm-{number}"))


def report(measured: Measured, *, options: AbOptions, about: dict[str, Any]) -> dict[str, Any]:
    """The JSON report: a row per target and rate, ratios against the first target, all records. Pure."""
    rows = []
    for rate in options.rates:
        for target in dict.fromkeys(one.target for one in measured.taken):
            records = [one.record for one in measured.taken if one.target == target and one.rate == rate]
            if records:
                figures = summary.summarise(records, duration=measured.durations[target, rate], slo=options.slo)
                rows.append({"target": target, "rate": rate, **figures})
    base = measured.taken[0].target if measured.taken else ""
    return {
        "measurement": "ab",
        **about,
        "generator": options.generator,
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
        "link": measured.links,
        "errors": measured.errors,
        "records": [_json(one) for one in measured.taken],
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


def endpoint(name: str, url: str, *, options: AbOptions) -> Target:
    """A target that runs already, at its base URL."""
    base = url.rstrip("/").removesuffix("/v1")

    async def send(session: aiohttp.ClientSession, arrival: Arrival) -> client.Answer:
        return await client.stream(session, f"{base}/v1/completions", body=_body(arrival, options=options))

    return Target(name=name, base_url=base, send=send)


def _body(arrival: Arrival, *, options: AbOptions) -> dict[str, Any]:
    return completion(
        options.model,
        tokens=arrival.prompt_tokens,
        output=arrival.output_tokens,
        vocabulary=options.vocabulary,
        seed=arrival.seed,
    )


async def served_model(url: str) -> str:
    """The first model that an endpoint lists. Raises RequestError when it lists none."""
    address = url.rstrip("/").removesuffix("/v1") + "/v1/models"
    try:
        async with aiohttp.ClientSession() as session, session.get(address) as response:
            answer = await response.json()
            return str(answer["data"][0]["id"])
    except (aiohttp.ClientError, KeyError, IndexError, ValueError, TypeError) as error:
        raise client.RequestError(f"{address} lists no model ({error!r})") from error


def pair_target(pair: Pair, *, among: Sequence[Pair], options: AbOptions, setting: Setting) -> Target:
    """A pair that was started here. What decode prefilled by itself is an answer like any other, counted as local."""
    if pair.base_url is not None:
        target = endpoint(str(pair.mode), pair.base_url, options=options)
    else:
        front = fleet.front_of(pair)

        async def send(session: aiohttp.ClientSession, arrival: Arrival) -> client.Answer:
            return (await front.send(session, _body(arrival, options=options))).answer

        target = Target(name=str(pair.mode), base_url=None, send=send)
    return dataclasses.replace(
        target,
        turn=lambda: fleet.awake(pair, among=among),
        check=pair.check_alive,
        link=setting.rig.crossed if pair.mode.transfers else None,
        bits_per_second=setting.bits_per_second,
    )


def for_setting(options: AbOptions, *, setting: Setting) -> AbOptions:
    """The options with what the setting's own model determines."""
    shape = setting.pair.shape
    vocabulary = ModelShape.of(Path(shape.model)).vocabulary
    return dataclasses.replace(options, model=shape.served_name, vocabulary=vocabulary, seed=setting.seed)


async def run_pairs(options: AbOptions, *, setting: Setting) -> dict[str, Any]:
    """The A/B over pairs started here; returns the report."""
    options = for_setting(options, setting=setting)
    if options.tokenizer is not None and FrontKind.DIRECT in {setting.pair.front_of(mode) for mode in setting.modes}:
        raise ValueError("`vllm bench serve` needs a server to ask: use --front dispatch or router")
    about = setting.about()
    measured = Measured()
    for batch in setting.batches:
        async with fleet.running_pairs(
            batch, rig=setting.rig, options=setting.pair, progress=setting.progress
        ) as pairs:
            targets = [pair_target(one, among=pairs, options=options, setting=setting) for one in pairs]
            await measure(targets, options=options, into=measured, progress=setting.progress)
    return report(measured, options=options, about=about)


async def run_endpoints(
    endpoints: dict[str, str], *, options: AbOptions, command: Sequence[str], progress: Progress
) -> dict[str, Any]:
    """The A/B over endpoints that exist; returns the report. Without a model name the first endpoint is asked."""
    if not options.model:
        options = dataclasses.replace(options, model=await served_model(next(iter(endpoints.values()))))
    about = {"machine": machine.describe(command), "rig": {"endpoints": endpoints}, "model": options.model}
    measured = Measured()
    targets = [endpoint(name, url, options=options) for name, url in endpoints.items()]
    await measure(targets, options=options, into=measured, progress=progress)
    return report(measured, options=options, about=about)
