"""Prompts too short to be worth a transfer: through Prebook's decode against one engine without a connector.

Both engines have the same core and the same flags; they take turns in blocks, the other one frozen. Prebook's
dispatcher sees that a prompt is at most `localPrefillMaxTokens` long and has decode compute it, so what is compared is
the dispatcher and a connector with nothing to do. Requests are sent one after the other.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
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
    """Prompt lengths, tokens per answer, blocks and requests per block, for each mode and length."""

    lengths: tuple[int, ...]
    output: int
    blocks: int
    requests: int


@dataclasses.dataclass(frozen=True)
class Short:
    """One answered request; seconds."""

    mode: Mode
    tokens: int
    block: int
    ttft: float
    tpot: float
    e2e: float


async def measure(options: ShortOptions, *, setting: Setting) -> dict[str, Any]:
    """Runs the measurement and returns the report. Raises EngineError when an engine does not start."""
    about = setting.about()
    taken: list[Short] = []
    errors: list[dict[str, Any]] = []
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
                    found, failed = await _block(pair, block=block, session=session, options=options,
                                                 setting=setting)  # fmt: skip
                taken += found
                errors += failed
                setting.progress(f"{pair.mode}, block {block + 1}/{options.blocks}: {len(found)} answered")
    return {
        "measurement": "short-prompts",
        **about,
        "local_prefill_max_tokens": setting.pair.local_prefill_max_tokens,
        "output_tokens": options.output,
        "summary": summarise(taken),
        "requests": [dataclasses.asdict(one) for one in taken],
        "errors": errors,
    }


async def _warm(number: int, *, pair: Pair, session: aiohttp.ClientSession, setting: Setting) -> None:
    body = setting.body(32, output=8, seed=f"warm-{pair.mode}-{number}")
    await client.stream(session, f"{pair.decode.identity.base_url}/v1/completions", body=body)


async def _block(
    pair: Pair, *, block: int, session: aiohttp.ClientSession, options: ShortOptions, setting: Setting
) -> tuple[list[Short], list[dict[str, Any]]]:
    url = f"{pair.decode.identity.base_url}/v1/completions"
    found, errors = [], []
    for number in range(options.requests):
        for tokens in options.lengths:
            body = setting.body(tokens, output=options.output, seed=f"{setting.seed}-{tokens}-{block}-{number}")
            try:
                async with asyncio.timeout(setting.timeout_s):
                    answer = await client.stream(session, url, body=body)
                if pair.mode.ours and "x-prebook-local" not in answer.headers:
                    raise client.RequestError("the request was not prefilled locally: nothing to compare")
            except FAILURES as error:
                errors.append({"target": pair.mode, "phase": "measure", "tokens": tokens, "error": words(error)})
                pair.check_alive()
                continue
            found.append(Short(mode=pair.mode, tokens=tokens, block=block, ttft=answer.ttft, tpot=answer.tpot or 0.0,
                               e2e=answer.end))  # fmt: skip
    return found, errors


def summarise(taken: Sequence[Short]) -> list[dict[str, Any]]:
    """One row per length and metric: both medians, and Prebook's over the other with a 95 % bootstrap interval. Pure.

    `within_noise`: the interval of the ratio holds 1, or is below it.
    """
    alone, ours = MODES
    rows = []
    for tokens in dict.fromkeys(one.tokens for one in taken):
        for metric in _METRICS:
            values = {
                mode: [getattr(one, metric) for one in taken if one.mode is mode and one.tokens == tokens]
                for mode in MODES
            }
            if not all(values.values()):
                continue
            ratio = stats.bootstrap_ratio(values[ours], values[alone], statistic=stats.median)
            rows.append(
                {
                    "tokens": tokens,
                    "metric": metric,
                    "requests": len(values[ours]),
                    "alone_s": stats.median(values[alone]),
                    "prebook_s": stats.median(values[ours]),
                    "ratio": dataclasses.asdict(ratio),
                    "within_noise": ratio.low <= 1,
                }
            )
    return rows
