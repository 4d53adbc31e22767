"""Pairs of several modes at once: all up, all but one frozen, so that modes take turns within one run.

A frozen engine (SIGSTOP) uses no CPU, which matters where some of them spin while idle; what it costs is memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import aiohttp

from prebook_bench.engines import EngineError, Pair, PairOptions, Progress, running_pair
from prebook_bench.fronts import DirectFront, DispatchFront, Front, PlainFront
from prebook_bench.modes import FrontKind, Mode
from prebook_bench.rig import Rig

#: Memory of one small CPU engine (three processes) without its KV cache: its share of what processes have in common
#: (PSS of /proc/PID/smaps_rollup) with one pair up. With more engines up there is more to share.
_ENGINE_BYTES: Final = int(2.1 * 1024**3)
#: The dispatchers of a pair that has just been thawed find each other again within one or two polls.
_PAIRED_TIMEOUT_S: Final = 30.0


def batches(modes: Sequence[Mode], *, available_bytes: int, kv_cache_bytes: int) -> tuple[tuple[Mode, ...], ...]:
    """Modes that are up at the same time, in order: as many as fit into the free memory with a tenth to spare, at least
    one at a time."""
    room = int(available_bytes / (1.1 * (_ENGINE_BYTES + kv_cache_bytes)))
    made: list[tuple[Mode, ...]] = []
    for mode in modes:
        last = made[-1] if made else ()
        if last and sum(one.engines for one in last) + mode.engines <= room:
            made[-1] = (*last, mode)
        else:
            made.append((mode,))
    return tuple(made)


@contextlib.asynccontextmanager
async def running_pairs(
    modes: Sequence[Mode], *, rig: Rig, options: PairOptions, progress: Progress
) -> AsyncIterator[list[Pair]]:
    """Pairs of all modes, started at the same time, frozen once they are healthy when there are several."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prebook-bench-")))
        progress(f"starting {sum(mode.engines for mode in modes)} engines ({', '.join(modes)}); logs in {folder}")
        try:
            async with asyncio.TaskGroup() as group:  # one failure stops the engines of all
                starts = [
                    group.create_task(
                        stack.enter_async_context(
                            running_pair(mode, rig=rig, options=options, folder=folder, progress=progress)
                        )
                    )
                    for mode in modes
                ]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        pairs = [start.result() for start in starts]
        progress("all engines are healthy")
        if len(pairs) > 1:
            for pair in pairs:
                pair.freeze()
        yield pairs


@contextlib.asynccontextmanager
async def awake(pair: Pair, *, among: Sequence[Pair]) -> AsyncIterator[None]:
    """The pair thawed and paired inside the context, frozen again after it when other pairs are up too."""
    if len(among) > 1:
        pair.thaw()
    try:
        await wait_paired(pair)
        yield
    finally:
        if len(among) > 1:
            pair.freeze()


async def wait_paired(pair: Pair) -> None:
    """Waits until decode's dispatcher has a prefill to send legs to; at once where there is no dispatcher.

    In a cluster that is what makes a decode pod ready. Raises EngineError when it does not happen in time.
    """
    if pair.front is not FrontKind.DISPATCH:
        return
    url = f"{pair.decode.identity.base_url}/prebook/v1/status"
    deadline = time.monotonic() + _PAIRED_TIMEOUT_S
    said = "nothing"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while time.monotonic() < deadline:
            pair.check_alive()
            try:
                async with session.get(url) as response:
                    pairs = (await response.json())["pairs"]
                    if pairs["ready"]:
                        return
                    said = str(pairs)[:300]
            except (aiohttp.ClientError, TimeoutError) as error:
                said = repr(error)
            await asyncio.sleep(0.1)
    raise EngineError(
        f"{pair.mode}: no pair after {_PAIRED_TIMEOUT_S:.0f} s; the dispatcher said {said}\n{pair.decode.log_tail()}"
    )


def front_of(pair: Pair) -> Front:
    """How requests are sent to a pair by a measurement that must know that KV moved."""
    if pair.front is FrontKind.DIRECT:
        return DirectFront(pair.prefill.identity, decode=pair.decode.identity)
    if pair.front is FrontKind.DISPATCH:
        return DispatchFront(pair.decode.identity)
    return PlainFront(pair.base_url or pair.decode.identity.base_url)
