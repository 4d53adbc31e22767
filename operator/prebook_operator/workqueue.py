"""One queue of model keys: debounced, prioritised, with back-off, and never two workers on the same model.

A burst of events for a model within the debounce window becomes one reconciliation. Two classes share the workers:
what just happened goes before what is only being looked at again (resync, or everything after a change of leader), so
a new model does not wait behind a thousand old ones."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from prebook_operator.records import Key


class Urgency(IntEnum):
    """Which of the due keys goes first."""

    EVENT = 0
    BACKGROUND = 1


@dataclass(frozen=True, kw_only=True)
class BackOff:
    """Exponential back-off with jitter, in seconds."""

    base: float = 0.5
    limit: float = 120.0

    def delay(self, failures: int, *, after: float | None, jitter: float) -> float:
        """Pause after the given number of failures in a row (1 is the first); `after` is the server's Retry-After,
        `jitter` in [0, 1)."""
        exponential = min(self.limit, self.base * float(2 ** min(failures - 1, 20)))
        spread = exponential * (0.5 + jitter)
        return spread if after is None else max(after, 0.0) + spread / 2


class WorkQueue:
    """Keys that are due, or will be. Times are of the injected monotonic clock."""

    def __init__(
        self,
        *,
        debounce: float = 0.1,
        back_off: BackOff | None = None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._debounce = debounce
        self._back_off = back_off or BackOff()
        self._clock = clock
        self._jitter = jitter
        self._due: dict[Key, tuple[float, Urgency]] = {}
        self._heaps: dict[Urgency, list[tuple[float, int, Key]]] = {urgency: [] for urgency in Urgency}
        self._order = itertools.count()
        self._active: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._held: dict[Key, float] = {}
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due)

    def depth(self) -> int:
        """Keys that are due now and wait for a worker."""
        now = self._clock()
        return sum(1 for due, _ in self._due.values() if due <= now)

    def add(self, key: Key) -> None:
        """Something happened to this model: due after the debounce window, which later events do not extend.

        While the key is backing off, it stays so: events are often the echo of what failed.
        """
        self._schedule(key, max(self._clock() + self._debounce, self._held.get(key, 0.0)), Urgency.EVENT)

    def add_fresh(self, key: Key) -> None:
        """The user has changed the model: earlier failures say nothing about the new spec."""
        self.succeed(key)
        self.add(key)

    def add_after(self, key: Key, delay: float) -> None:
        """Look at the model again after `delay` seconds, or sooner if something happens."""
        self._schedule(key, self._clock() + delay, Urgency.BACKGROUND)

    def fail(self, key: Key, *, after: float | None = None) -> float:
        """Schedules another attempt and returns the pause before it."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay = self._back_off.delay(failures, after=after, jitter=self._jitter())
        self._due.pop(key, None)
        self._held[key] = self._clock() + delay
        self._schedule(key, self._held[key], Urgency.BACKGROUND)
        return delay

    def hold(self, key: Key, seconds: float) -> None:
        """Look at the model in so many seconds and not before, whatever happens: the events to come are echoes of our
        own writes."""
        self._due.pop(key, None)
        self._held[key] = self._clock() + seconds
        self._schedule(key, self._held[key], Urgency.EVENT)

    def succeed(self, key: Key) -> None:
        """Forgets earlier failures."""
        self._failures.pop(key, None)
        self._held.pop(key, None)

    def forget(self, key: Key) -> None:
        """The model is gone."""
        self._due.pop(key, None)
        self.succeed(key)

    async def take(self) -> Key:
        """Waits for a due key that nobody works on, and reserves it until `done`."""
        while True:
            now = self._clock()
            key = self._pop(now)
            if key is not None:
                return key
            self._wake.clear()
            soonest = min((heap[0][0] for heap in self._heaps.values() if heap), default=now + 60.0)
            try:
                await asyncio.wait_for(self._wake.wait(), timeout=max(0.0, soonest - now))
            except TimeoutError:
                continue

    def done(self, key: Key) -> None:
        """Ends the reservation; events that came meanwhile are due as they would have been."""
        self._active.discard(key)
        entry = self._due.get(key)
        if entry is not None:
            self._push(key, *entry)

    def _schedule(self, key: Key, due: float, urgency: Urgency) -> None:
        known = self._due.get(key)
        if known is not None and known[0] <= due and known[1] <= urgency:
            return
        if known is not None:
            due, urgency = min(known[0], due), min(known[1], urgency)
        self._due[key] = (due, urgency)
        if key not in self._active:
            self._push(key, due, urgency)

    def _push(self, key: Key, due: float, urgency: Urgency) -> None:
        heapq.heappush(self._heaps[urgency], (due, next(self._order), key))
        self._wake.set()

    def _pop(self, now: float) -> Key | None:
        for urgency, heap in self._heaps.items():
            while heap and heap[0][0] <= now:
                due, _, key = heapq.heappop(heap)
                if self._due.get(key) == (due, urgency) and key not in self._active:
                    del self._due[key]
                    self._active.add(key)
                    return key
        return None
