"""Looks after the two legs of one attempt until its answer has begun, and decides nothing after that.

The loop never blocks on one thing alone: it wakes for the prefill leg, the decode leg, the loss of the peer and the
client, and once a second for deadlines and for the connector's word on the transfer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prebook_connector.dispatch import metrics, policy
from prebook_connector.dispatch.client import LegAnswer, LegFailed
from prebook_connector.dispatch.legs import ClientChannel, DecodeLeg
from prebook_connector.dispatch.reasons import Failure
from prebook_connector.dispatch.settings import Settings

_TICK = 1.0
_TICK_TOLD = 0.25
"""Seconds between two wake-ups, and the same after a failure that decode recomputes in place."""
_ASK_PREFILLING = 5.0
"""Seconds between two questions to the connector while prefill computes; afterwards every tick."""
_SETTLED = frozenset({"committed", "failed"})
"""States of a transfer in which the decode leg needs nothing of the peer any more."""

Answer = dict[str, Any]


class Connector(Protocol):
    """What is asked of this pod's connector (see :class:`prebook_connector.dispatch.control.Control`)."""

    async def fail(self, transfer_id: str, reason: str) -> bool:
        """Takes note that a prefill leg failed; False when it could not be told."""
        ...

    async def transfer(self, transfer_id: str) -> Answer | None:
        """The account of one transfer, if known."""
        ...

    async def offer_first_token(self, transfer_id: str, token: int) -> bool | None:
        """Offers prefill's first token to the samplers: all will begin with it, none, or (None) only some."""
        ...


class AttemptFailed(Exception):
    """A remote attempt failed before the first byte of its answer."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.value)
        self.failure = failure


@dataclass(frozen=True)
class Legs:
    """What runs for one attempt. ``lost`` is resolved when the prefill engine is."""

    channel: ClientChannel
    decode: DecodeLeg
    task: asyncio.Task[None]
    prefill: asyncio.Task[LegAnswer]
    lost: asyncio.Future[Failure]


@dataclass(frozen=True)
class Terms:
    """What an attempt is measured by. ``connector`` is None in the stock modes; times are on ``clock``."""

    transfer_id: str
    began: float
    settings: Settings
    connector: Connector | None
    totals: metrics.Totals
    next_plan: Callable[[Failure, bool], policy.Plan | policy.Wait]
    """What would follow a failure; the flag says that the connector took note of it."""
    clock: Callable[[], float]
    prefilled: Callable[[LegAnswer], Awaitable[None]] | None = None
    """Called with prefill's good answer, unless decode has begun to answer by then."""


class Supervision:
    """One attempt under way. ``run`` raises :class:`AttemptFailed` when another plan has to be made."""

    def __init__(self, legs: Legs, terms: Terms) -> None:
        self._legs = legs
        self._terms = terms
        self._over: float | None = None
        """When the prefill leg ended (well, or badly with the connector told), on the monotonic clock."""
        self._told: Failure | None = None
        """The failure after which the decode leg recomputes in place."""
        self._settled = False
        self._asked = terms.clock()

    @property
    def in_place(self) -> bool:
        """Whether the decode leg had to compute the prompt after all, as far as is known here."""
        return self._told is not None

    async def run(self) -> None:
        """Until the decode leg has ended with an answer, or the client has left."""
        legs = self._legs
        signals = [
            asyncio.create_task(event.wait())
            for event in (legs.decode.committed, legs.decode.rejected, legs.channel.gone)
        ]
        try:
            while not await self._step(signals):
                pass
        finally:
            for signal in signals:
                signal.cancel()
        if self._legs.channel.left or not self._legs.decode.committed.is_set():
            self._legs.prefill.cancel()
        await asyncio.shield(self._legs.task)

    async def _step(self, signals: Sequence[asyncio.Task[bool]]) -> bool:
        """One wake-up; True when there is nothing left to decide."""
        waiting: set[asyncio.Future[Any]] = {self._legs.task, *signals}
        if self._over is None:
            waiting.add(self._legs.prefill)
        if not self._legs.lost.done():
            waiting.add(self._legs.lost)
        await asyncio.wait(
            waiting, timeout=_TICK if self._told is None else _TICK_TOLD, return_when=asyncio.FIRST_COMPLETED
        )
        if self._legs.decode.rejected.is_set():
            raise AttemptFailed(Failure.DECODE_ERROR)
        if self._legs.decode.committed.is_set() or self._legs.channel.gone.is_set():
            return True
        if self._legs.task.done():
            return self._ended_without_answer()
        if self._over is None and self._legs.prefill.done():
            await self._prefill_ended()
        if self._legs.lost.done():
            await self._peer_lost()
        await self._check_time()
        return False

    def _ended_without_answer(self) -> bool:
        crashed = not self._legs.task.cancelled() and self._legs.task.exception() is not None
        if crashed and self._terms.settings.recompute:
            raise AttemptFailed(Failure.DECODE_ERROR)
        return True

    async def _prefill_ended(self) -> None:
        try:
            answer = self._legs.prefill.result()
        except LegFailed as error:
            if await self._state() == "committed":
                self._settled = True  # only the answer was lost: everything that it announces is here
            else:
                await self._failed(error.failure)
        else:
            if self._terms.prefilled is not None:
                await self._terms.prefilled(answer)
        self._over = self._terms.clock()

    async def _failed(self, failure: Failure) -> None:
        """Tells the connector, then either goes on waiting in place or gives the attempt up."""
        connector = self._terms.connector
        told = connector is not None and await connector.fail(self._terms.transfer_id, failure.value)
        began = self._legs.decode.committed.is_set()  # while the connector was told, decode may have begun to answer
        if not began and not isinstance(self._terms.next_plan(failure, told), policy.Wait):
            raise AttemptFailed(failure)
        self._told = failure
        metrics.LEG_FAILURES.labels(failure.value).inc()
        if failure is not Failure.CLIENT_ERROR:
            self._terms.totals.count_failover(failure, "in_place")

    async def _peer_lost(self) -> None:
        if self._settled or await self._state() in _SETTLED:
            self._settled = True
            return
        await self._failed(self._legs.lost.result())

    async def _check_time(self) -> None:
        now = self._terms.clock()
        if now - self._terms.began > self._terms.settings.timing.first_byte:
            await self._failed(Failure.FIRST_BYTE_DEADLINE)
        if self._settled:
            return
        if self._terms.connector is None:
            if self._over is not None and now - self._over > self._terms.settings.lease_seconds:
                await self._failed(Failure.TRANSFER_DEADLINE)
            return
        if now - self._asked >= (_ASK_PREFILLING if self._over is None else _TICK_TOLD if self._told else _TICK):
            self._asked = now
            await self._check_transfer(now)

    async def _check_transfer(self, now: float) -> None:
        """Asks the connector. A transfer it does not know yet is a decode leg still in the engine's queue."""
        state = await self._state()
        self._settled = state in _SETTLED
        if self._told is not None and state == "booked" and self._terms.connector is not None:
            # The word came before decode had booked anything, and the connector keeps none for later.
            await self._terms.connector.fail(self._terms.transfer_id, self._told.value)
        if state == "quarantined":
            await self._failed(Failure.QUARANTINED)
        overdue = self._over is not None and now - self._over > 2 * self._terms.settings.lease_seconds
        if overdue and state in ("booked", "cancelling"):
            await self._failed(Failure.TRANSFER_DEADLINE)

    async def _state(self) -> str | None:
        connector = self._terms.connector
        account = None if connector is None else await connector.transfer(self._terms.transfer_id)
        return None if account is None else str(account.get("state"))
