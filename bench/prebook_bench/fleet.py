"""Pairs of several modes at once: all up, all but one frozen, so that modes take turns within one run.

A frozen engine (SIGSTOP) uses no CPU, which matters where some of them spin while idle; what it costs is memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Final

from prebook_bench.engines import Pair, PairOptions, Progress, running_pair
from prebook_bench.fronts import DirectFront, DispatchFront, Front, PlainFront
from prebook_bench.modes import Mode
from prebook_bench.rig import Rig

#: Resident memory of one small CPU engine (three processes) without its KV cache, measured.
_ENGINE_BYTES: Final = int(2.5 * 1024**3)


def fits_together(modes: int, *, available_bytes: int, kv_cache_bytes: int) -> bool:
    """Whether the engines of all modes fit into the free memory at once, with a tenth to spare."""
    return modes * 2 * (_ENGINE_BYTES + kv_cache_bytes) * 1.1 < available_bytes


@contextlib.asynccontextmanager
async def running_pairs(
    modes: Sequence[Mode], *, rig: Rig, options: PairOptions, folder: Path, progress: Progress
) -> AsyncIterator[list[Pair]]:
    """Pairs of all modes, started at the same time, frozen once they are healthy when there are several."""
    async with contextlib.AsyncExitStack() as stack:
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


@contextlib.contextmanager
def awake(pair: Pair, *, among: Sequence[Pair]) -> Iterator[None]:
    """The pair thawed inside the context, frozen again after it when other pairs are up too."""
    if len(among) == 1:
        yield
        return
    pair.thaw()
    try:
        yield
    finally:
        pair.freeze()


def front_of(pair: Pair, *, dispatch: bool) -> Front:
    """How requests are sent to a pair."""
    if not pair.mode.transfers:
        return PlainFront(pair.decode.identity)
    if dispatch:
        return DispatchFront(pair.decode.identity)
    return DirectFront(pair.prefill.identity, decode=pair.decode.identity)
