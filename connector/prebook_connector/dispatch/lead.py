"""``firstToken: Prefill``: shows prefill's token to the client while its KV is still under way.

In this order, so that nothing is ever shown that decode does not continue from: prefill's answer is there; decode's
response has begun (its headers are the client's); every sampler of the pod holds the token; the client gets it. From
then on only this pod can go on with the request: another prefill engine would sample another token.
"""

from __future__ import annotations

import asyncio
import logging

from prebook_connector.dispatch import metrics, tracing
from prebook_connector.dispatch.client import LegAnswer
from prebook_connector.dispatch.legs import ClientChannel, DecodeLeg
from prebook_connector.dispatch.opening import Opening, opening
from prebook_connector.dispatch.reasons import Failure
from prebook_connector.dispatch.supervision import AttemptFailed, Connector

logger = logging.getLogger(__name__)

_HEADERS_SECONDS = 2.0
"""Decode's response begins once it has tokenized the prompt, long before prefill has computed it."""


class Lead:
    """One request's first token.

    ``given`` is what the client has seen, None before that; ``request_id`` the X-Request-Id that names it.
    """

    def __init__(self, path: str, channel: ClientChannel, connector: Connector) -> None:
        self._path = path
        self._channel = channel
        self._connector = connector
        self.given: Opening | None = None
        self.request_id: str | None = None

    async def take(self, transfer_id: str, request_id: str, leg: DecodeLeg, answer: LegAnswer) -> None:
        """Shows the token of prefill's ``answer`` if it can be shown.

        Raises :class:`AttemptFailed` when some samplers of this pod would begin with it and some would not.
        """
        outcome = await self._take(transfer_id, leg, answer)
        metrics.FIRST_TOKENS.labels(outcome).inc()
        self.request_id = request_id
        if outcome == "split":
            raise AttemptFailed(Failure.FIRST_TOKEN_SPLIT)

    async def _take(self, transfer_id: str, leg: DecodeLeg, answer: LegAnswer) -> str:
        found = opening(self._path, answer.document, (answer.params or {}).get("first_token_id"))
        if found is None:
            return "not_shown"
        signals = [
            asyncio.create_task(event.wait()) for event in (leg.opened, leg.committed, leg.rejected, self._channel.gone)
        ]
        try:
            await asyncio.wait(signals, timeout=_HEADERS_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for signal in signals:
                signal.cancel()
        if not leg.can_lead:
            return "overtaken"
        held = await self._connector.offer_first_token(transfer_id, found.token)
        if held is None:
            return "split"
        if not held:
            return "late"
        if not await leg.lead(found):
            return "overtaken"
        self.given = found
        tracing.first_token("prefill")
        return "shown"
