"""Prompts too short to be worth a transfer: through Prebook's decode against one engine without a connector.

Both engines have the same core and the same flags; they take turns in blocks, the other one frozen. Prebook's
dispatcher sees that a prompt is at most `localPrefillMaxTokens` long and has decode compute it, so what is compared is
the dispatcher and a connector with nothing to do. Requests are sent one after the other.

Two starts of the very same engine differ by a few per cent, for as long as they run (where their memory lies decides
what fits into the caches). So everything is started several times, and a ratio's interval covers that.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final

import aiohttp

from prebook_bench import client, fleet, stats
from prebook_bench.engines import Pair
from prebook_bench.modes import Mode
from prebook_bench.setting import FAILURES, Setting, rotated, warm_up, words

#: One engine alone first: ratios are Prebook's figure over it.
MODES: Final = (Mode.NONE, Mode.PREBOOK)
_METRICS: Final = ("ttft", "tpot", "e2e")


@dataclasses.dataclass(frozen=True)
class ShortOptions:
    """Prompt lengths, tokens per answer, starts, blocks per start, and requests per block for each mode and length."""

    lengths: tuple[int, ...]
    output: int
    starts: int
    blocks: int
    requests: int


@dataclasses.dataclass(frozen=True)
class Short:
    """One answered request; seconds."""

    mode: Mode
    tokens: int
    start: int
    block: int
    ttft: float
    tpot: float
    e2e: float


async def measure(options: ShortOptions, *, setting: Setting) -> dict[str, Any]:
    """Runs the measurement and returns the report. Raises EngineError when an engine does not start."""
    about = setting.about()
    taken: list[Short] = []
    errors: list[dict[str, Any]] = []
    for start in range(options.starts):
        await _start(start, options=options, setting=setting, taken=taken, errors=errors)
    return {
        "measurement": "short-prompts",
        **about,
        "local_prefill_max_tokens": setting.pair.local_prefill_max_tokens,
        "output_tokens": options.output,
        "summary": summarise(taken),
        "requests": [dataclasses.asdict(one) for one in taken],
        "errors": errors,
    }


async def _start(
    start: int, *, options: ShortOptions, setting: Setting, taken: list[Short], errors: list[dict[str, Any]]
) -> None:
    """Starts both engines and measures all blocks; what comes of it goes into `taken` and `errors`."""
    async with (
        fleet.running_pairs(setting.modes, rig=setting.rig, options=setting.pair, progress=setting.progress) as pairs,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
    ):
        for pair in pairs:
            async with fleet.awake(pair, among=pairs):
                errors += await warm_up(
                    str(pair.mode),
                    functools.partial(_warm, pair=pair, session=session, setting=setting),
                    check=pair.check_alive,
                    timeout_s=setting.timeout_s,
                    progress=setting.progress,
                )
        for block in range(options.blocks):
            for pair in rotated(pairs, by=block):
                async with fleet.awake(pair, among=pairs):
                    found, failed = await _block(pair, start=start, block=block, session=session, options=options,
                                                 setting=setting)  # fmt: skip
                taken += found
                errors += failed
                setting.progress(
                    f"start {start + 1}/{options.starts}, block {block + 1}/{options.blocks}, {pair.mode}: "
                    f"{len(found)} answered"
                )


async def _warm(number: int, *, pair: Pair, session: aiohttp.ClientSession, setting: Setting) -> None:
    body = setting.body(32, output=8, seed=f"warm-{pair.mode}-{number}")
    await client.stream(session, f"{pair.decode.identity.base_url}/v1/completions", body=body)


async def _block(
    pair: Pair, *, start: int, block: int, session: aiohttp.ClientSession, options: ShortOptions, setting: Setting
) -> tuple[list[Short], list[dict[str, Any]]]:
    url = f"{pair.decode.identity.base_url}/v1/completions"
    found, errors = [], []
    for number in range(options.requests):
        for tokens in options.lengths:
            body = setting.body(tokens, output=options.output, seed=f"{setting.seed}-{tokens}-{start}-{block}-{number}")
            try:
                async with asyncio.timeout(setting.timeout_s):
                    answer = await client.stream(session, url, body=body)
                if pair.mode.ours and "x-prebook-local" not in answer.headers:
                    raise client.RequestError("the request was not prefilled locally: nothing to compare")
            except FAILURES as error:
                errors.append({"target": pair.mode, "phase": "measure", "tokens": tokens, "error": words(error)})
                pair.check_alive()
                continue
            found.append(Short(mode=pair.mode, tokens=tokens, start=start, block=block, ttft=answer.ttft,
                               tpot=answer.tpot or 0.0, e2e=answer.end))  # fmt: skip
    return found, errors


def summarise(taken: Sequence[Short]) -> list[dict[str, Any]]:
    """One row per length and metric: both medians, and Prebook's over the other's with a 95 % interval. Pure.

    A ratio is that of the medians of one block; see :func:`stats.bootstrap_groups`, the starts being the groups.
    `within_noise`: the interval holds 1, or is below it. `starts_differ`: the engine alone, its slowest start's median
    over its fastest's.
    """
    alone, ours = MODES
    rows = []
    for tokens in dict.fromkeys(one.tokens for one in taken):
        for metric in _METRICS:
            mine, seconds = [one for one in taken if one.tokens == tokens], attrgetter(metric)
            blocks = stats.medians(mine, key=lambda one: (one.start, one.block, one.mode), value=seconds)
            ratios: dict[int, list[float]] = {}
            for start, block, mode in blocks:
                if mode is ours and (start, block, alone) in blocks:
                    ratio = blocks[start, block, ours] / blocks[start, block, alone]
                    ratios.setdefault(start, []).append(ratio)
            if not ratios:
                continue
            interval = stats.bootstrap_groups(list(ratios.values()))
            both = stats.medians(mine, key=lambda one: one.mode, value=seconds)
            starts = stats.medians([one for one in mine if one.mode is alone], key=lambda one: one.start, value=seconds)
            rows.append(
                {
                    "tokens": tokens,
                    "metric": metric,
                    "starts": len(ratios),
                    "requests": sum(one.mode is ours for one in mine),
                    "alone_s": both[alone],
                    "prebook_s": both[ours],
                    "ratio": dataclasses.asdict(interval),
                    "within_noise": interval.low <= 1,
                    "starts_differ": max(starts.values()) / min(starts.values()),
                }
            )
    return rows
