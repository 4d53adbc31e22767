"""Leader election over one Lease object, on the monotonic clock of each process.

kopf's peering decides who is *paused*, and two operators that do not see each other both run; that is not an election
(kopf#1108). Here:

- a candidate takes the lease when it is unheld, or when the record it observes has not changed for a whole lease
  duration *of its own monotonic clock*; clocks of different machines are never compared;
- every write to the lease carries the resourceVersion that was read, so of two candidates one gets a conflict;
- the leader counts from *before* it sent the last successful renewal, and stops writing `renew_margin` before a rival
  may take over;
- on exit the holder is emptied, so that the next leader starts at once instead of after a lease duration.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from prebook_operator.kube.client import KubeClient
from prebook_operator.kube.errors import Conflict, KubeError, NotFound
from prebook_operator.kube.resources import LEASE
from prebook_operator.kube.transport import JsonObject

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LeaseSettings:
    """Durations in seconds. `duration` is what rivals wait; the leader writes only until `duration - margin` after
    its last renewal, and renews every `period`. A candidate looks at the lease every `look`."""

    namespace: str
    name: str = "prebook-operator"
    identity: str
    duration: float = 15.0
    margin: float = 5.0
    period: float = 2.5
    look: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.period < self.duration - self.margin < self.duration or self.look <= 0:
            raise ValueError("a lease needs 0 < period < duration - margin < duration, and looks now and then")


@dataclass(frozen=True)
class _Observed:
    """What was last seen in the lease, and when (monotonic)."""

    version: str
    holder: str
    duration: float
    at: float


class Election:
    """Campaigns for the lease until told to stop. `on_change(leading)` is called in the event loop at every
    transition."""

    def __init__(
        self,
        client: KubeClient,
        settings: LeaseSettings,
        *,
        on_change: Callable[[bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._settings = settings
        self._on_change = on_change
        self._clock = clock
        self._observed: _Observed | None = None
        self._held: JsonObject | None = None
        self._renewed_at = float("-inf")
        self._leading = False

    def remaining(self) -> float:
        """Seconds for which writing is certainly safe; the write gate of the client."""
        if self._held is None:
            return 0.0
        usable = self._settings.duration - self._settings.margin
        return self._renewed_at + usable - self._clock()

    @property
    def leading(self) -> bool:
        """Is the lease ours, and recent enough?"""
        return self.remaining() > 0

    @property
    def pause(self) -> float:
        """Seconds until the next step."""
        return self._settings.look if self._held is None else self._settings.period

    async def run(self) -> None:
        """Campaigns until cancelled. Does not release: see `release`."""
        while True:
            await self.step()
            await asyncio.sleep(self.pause)

    async def step(self) -> None:
        """One attempt to take or renew the lease. Never raises a KubeError: not reaching the server costs the
        leadership when its time is up."""
        started = self._clock()
        try:
            if self._held is not None:
                self._hold(await self._renew(self._held), started)
            else:
                await self._campaign(started)
        except (Conflict, NotFound):
            self._held = None  # somebody else wrote the lease, or it was deleted: look again next time
        except KubeError as error:
            logger.warning("the leader lease could not be renewed or read: %s", error)
        self._announce()

    async def release(self) -> None:
        """Empties the holder, if it is us, so that a standby need not wait. Best effort: without it the lease runs
        out by itself."""
        held, self._held = self._held, None
        self._announce()
        if held is None:
            return
        spec = {**held["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
        try:
            await self._write({**held, "spec": spec})
        except KubeError as error:
            logger.info("the leader lease was not released and will run out by itself: %s", error)

    def _announce(self) -> None:
        leading = self.leading
        if leading != self._leading:
            self._leading = leading
            logger.info("leadership %s", "gained" if leading else "lost", extra={"identity": self._settings.identity})
            self._on_change(leading)

    async def _campaign(self, started: float) -> None:
        lease = await self._read()
        if lease is None:
            self._hold(await self._create(), started)
            return
        if not self._may_take(lease):
            return
        previous = lease["spec"]
        spec = self._spec(transitions=int(previous.get("leaseTransitions") or 0) + 1)
        self._hold(await self._write({**lease, "spec": spec}), started)

    def _may_take(self, lease: JsonObject) -> bool:
        spec = lease.get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        version = str(lease["metadata"]["resourceVersion"])
        if not holder or holder == self._settings.identity:
            return True
        if self._observed is None or self._observed.version != version:
            duration = float(spec.get("leaseDurationSeconds") or self._settings.duration)
            self._observed = _Observed(version=version, holder=holder, duration=duration, at=self._clock())
            return False
        return self._clock() - self._observed.at >= self._observed.duration

    def _hold(self, lease: JsonObject, started: float) -> None:
        self._held = lease
        self._renewed_at = started

    def _spec(self, *, transitions: int) -> dict[str, Any]:
        now = _timestamp()
        return {
            "holderIdentity": self._settings.identity,
            "leaseDurationSeconds": round(self._settings.duration),
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }

    async def _renew(self, held: JsonObject) -> JsonObject:
        return await self._write({**held, "spec": {**held["spec"], "renewTime": _timestamp()}})

    async def _read(self) -> JsonObject | None:
        try:
            return await self._client.get(LEASE, namespace=self._settings.namespace, name=self._settings.name)
        except NotFound:
            return None

    async def _create(self) -> JsonObject:
        body = {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": {"name": self._settings.name, "namespace": self._settings.namespace},
            "spec": self._spec(transitions=0),
        }
        return await self._client.create_ungated(LEASE, body, namespace=self._settings.namespace)

    async def _write(self, lease: JsonObject) -> JsonObject:
        return await self._client.replace(LEASE, lease, namespace=self._settings.namespace, name=self._settings.name)


def _timestamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
