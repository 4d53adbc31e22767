"""How much of the link a measurement used, from the kernel's byte counter of prefill's interface.

The counter sees everything that leaves prefill: KV, but also handshakes, answers of its API server and packet headers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

_INTERVAL_S: Final = 0.2


@dataclasses.dataclass(frozen=True)
class Reading:
    """The counter at one moment: seconds on the monotonic clock, bytes since the interface exists."""

    at: float
    sent: int


@contextlib.asynccontextmanager
async def watched(counter: Path | None) -> AsyncIterator[list[Reading]]:
    """Reads `counter` a few times a second while inside, and once at each end. No counter, no readings."""
    readings: list[Reading] = []
    if counter is None:
        yield readings
        return

    def read(path: Path = counter) -> None:
        # A file of sysfs: answered from memory, nothing to wait for.
        readings.append(Reading(at=time.monotonic(), sent=int(path.read_text(encoding="ascii"))))

    async def watch() -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            read()

    read()
    task = asyncio.create_task(watch())
    try:
        yield readings
    finally:
        task.cancel()
        await asyncio.wait([task])
        read()


def describe(readings: Sequence[Reading], *, bits_per_second: float | None) -> dict[str, Any] | None:
    """JSON values: bytes, mean and peak rate in bits per second, shares of the line, and the rate over time. Pure.

    `series` holds [seconds since the start, bits per second since the reading before] for each reading but the first.
    None without two readings.
    """
    if len(readings) < 2 or readings[-1].at <= readings[0].at:
        return None
    series = [
        [round(b.at - readings[0].at, 3), (b.sent - a.sent) * 8 / (b.at - a.at)]
        for a, b in itertools.pairwise(readings)
        if b.at > a.at
    ]
    seconds = readings[-1].at - readings[0].at
    sent = readings[-1].sent - readings[0].sent
    mean = sent * 8 / seconds
    return {
        "seconds": seconds,
        "bytes": sent,
        "mean_bits_per_second": mean,
        "peak_bits_per_second": max(rate for _, rate in series),
        "mean_share": mean / bits_per_second if bits_per_second else None,
        "series": series,
    }
