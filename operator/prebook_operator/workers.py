"""The workers: take a key, reconcile it, schedule the next look. They work only while this process leads and the
cache is complete."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

from prebook_operator.kube.errors import KubeError, NotLeader, RetryLater
from prebook_operator.metrics import Metrics
from prebook_operator.reconcile import Reconciler, Result
from prebook_operator.records import Key
from prebook_operator.workqueue import WorkQueue

logger = logging.getLogger(__name__)


class Workers:
    """A fixed number of workers on one queue."""

    def __init__(
        self,
        reconciler: Reconciler,
        queue: WorkQueue,
        *,
        metrics: Metrics,
        synced: asyncio.Event,
        number: int,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._reconciler = reconciler
        self._queue = queue
        self._metrics = metrics
        self._synced = synced
        self._number = number
        self._jitter = jitter
        self._leading = asyncio.Event()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._busy = 0

    def lead(self, leading: bool) -> None:
        """Leadership was gained or lost."""
        self._metrics.leader.set(int(leading))
        if leading:
            self._leading.set()
        else:
            self._leading.clear()

    async def run(self) -> None:
        """Works until cancelled. A programming error in one reconciliation is logged and backed off, and stops nobody
        else."""
        await self._synced.wait()
        await asyncio.gather(*(self._work() for _ in range(self._number)))

    async def drain(self, *, seconds: float) -> None:
        """Takes no further key, and waits until those in work are done or the time is up."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout=seconds)
        except TimeoutError:
            logger.warning("reconciliations are still running at the end; the next leader will finish them")

    async def _work(self) -> None:
        while not self._draining:
            await self._leading.wait()
            key = await self._queue.take()
            if self._draining or not self._leading.is_set():
                self._queue.done(key)
                self._queue.add(key)
                continue
            self._busy += 1
            self._idle.clear()
            try:
                await self._reconcile(key)
            finally:
                self._queue.done(key)
                self._busy -= 1
                if not self._busy:
                    self._idle.set()

    async def _reconcile(self, key: Key) -> None:
        started = time.monotonic()
        label = "ok"
        try:
            result = await self._reconciler.reconcile(key)
        except NotLeader:
            label = "not-leader"
            self._queue.add_after(key, 1.0)
        except RetryLater as error:
            label = "retry"
            pause = self._queue.fail(key, after=error.after)
            logger.info("will try again: %s", error, extra={"model": str(key), "seconds": round(pause, 1)})
        except KubeError as error:
            label = "error"
            pause = self._queue.fail(key)
            logger.warning("reconciliation failed: %s", error, extra={"model": str(key), "seconds": round(pause, 1)})
        except Exception:
            label = "bug"
            self._queue.fail(key)
            logger.exception("reconciliation failed unexpectedly", extra={"model": str(key)})
        else:
            self._schedule(key, result)
        finally:
            self._metrics.reconciles.labels(label).inc()
            self._metrics.reconcile_seconds.observe(time.monotonic() - started)

    def _schedule(self, key: Key, result: Result) -> None:
        if result.error:
            pause = self._queue.fail(key)
            logger.info("will try again: %s", result.error, extra={"model": str(key), "seconds": round(pause, 1)})
            return
        if result.after is None:
            self._queue.forget(key)
            return
        self._queue.succeed(key)
        # Models that were reconciled together need not be looked at together ever after.
        after = result.after * (0.85 + 0.3 * self._jitter())
        if result.hold:
            self._queue.hold(key, after)
        else:
            self._queue.add_after(key, after)
