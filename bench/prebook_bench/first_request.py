"""What the first request of a fresh pair costs, against the same pair once it is warm.

Each repeat starts a pair of every mode anew, waits until it is ready (with a dispatcher: until decode has a pair, which
is what makes a decode pod ready), sends one request, then more of the same length, one after the other. The engine
itself is slower at its first request, too; mode `aggregated` (one engine, nothing to transfer) shows by how much.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from prebook_bench import fleet, stats
from prebook_bench.engines import Pair, running_pair
from prebook_bench.modes import Mode
from prebook_bench.setting import FAILURES, Setting, rotated, words


@dataclasses.dataclass(frozen=True)
class FirstOptions:
    """Prompt tokens, fresh pairs per mode, requests to each after its first."""

    tokens: int
    repeats: int
    warm: int


@dataclasses.dataclass(frozen=True)
class Fresh:
    """One fresh pair: TTFT of its first request (None: it failed) and of those after it that were answered, seconds."""

    mode: Mode
    repeat: int
    first: float | None
    warm: tuple[float, ...]
    errors: tuple[str, ...]


async def measure(options: FirstOptions, *, setting: Setting) -> dict[str, Any]:
    """Runs the measurement and returns the report (JSON values). Raises EngineError when an engine does not start."""
    about = setting.about()
    taken = []
    for repeat in range(options.repeats):
        for mode in rotated(setting.modes, by=repeat):
            with tempfile.TemporaryDirectory(prefix="prebook-bench-") as folder:
                async with running_pair(
                    mode, rig=setting.rig, options=setting.pair, folder=Path(folder), progress=setting.progress
                ) as pair:
                    await fleet.wait_paired(pair)
                    one = await _fresh(pair, repeat=repeat, options=options, setting=setting)
            taken.append(one)
            setting.progress(f"{mode}, pair {repeat + 1}/{options.repeats}: {_told(one)}")
    return {
        "measurement": "first-request",
        **about,
        "tokens": options.tokens,
        "summary": summarise(taken),
        "pairs": [dataclasses.asdict(one) for one in taken],
    }


async def _fresh(pair: Pair, *, repeat: int, options: FirstOptions, setting: Setting) -> Fresh:
    front = fleet.front_of(pair)
    times: list[float | None] = []
    errors = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        for number in range(1 + options.warm):
            body = setting.body(options.tokens, output=4, seed=f"{setting.seed}-{pair.mode}-{repeat}-{number}")
            try:
                async with asyncio.timeout(setting.timeout_s):
                    times.append((await front.send(session, body)).answer.ttft)
            except FAILURES as error:
                times.append(None)
                errors.append(f"request {number + 1}: {words(error)}")
            pair.check_alive()
    warm = tuple(time for time in times[1:] if time is not None)
    return Fresh(mode=pair.mode, repeat=repeat, first=times[0], warm=warm, errors=tuple(errors))


def summarise(taken: Sequence[Fresh]) -> list[dict[str, Any]]:
    """One row per mode: medians over its fresh pairs; the ratio is taken within each pair. Pure."""
    rows = []
    for mode in dict.fromkeys(one.mode for one in taken):
        mine = [one for one in taken if one.mode is mode]
        firsts = [one.first for one in mine if one.first is not None]
        warm = [time for one in mine for time in one.warm]
        ratios = [one.first / stats.median(one.warm) for one in mine if one.first is not None and one.warm]
        rows.append(
            {
                "mode": mode,
                "pairs": len(mine),
                "first_failed": sum(one.first is None for one in mine),
                "warm_failed": sum(len(one.errors) - (one.first is None) for one in mine),
                "first_s": stats.median(firsts) if firsts else None,
                "warm_median_s": stats.median(warm) if warm else None,
                "ratio": stats.median(ratios) if ratios else None,
                "ratios": ratios,
            }
        )
    return rows


def _told(one: Fresh) -> str:
    first = "failed" if one.first is None else f"{one.first * 1e3:.0f} ms"
    warm = f"{stats.median(one.warm) * 1e3:.0f} ms" if one.warm else "all failed"
    return f"first {first}, then {warm}" + (f"; {'; '.join(one.errors)}" if one.errors else "")
