"""The paths below ``/prebook/v1``: what peers, the operator, probes and the drain hook ask of a pod."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from prebook_connector.dispatch.control import Control
from prebook_connector.dispatch.discovery import Discovery
from prebook_connector.dispatch.errors import ErrorAnswer, send_error, send_json
from prebook_connector.dispatch.identity import Identity
from prebook_connector.dispatch.metrics import REFUSED, Totals
from prebook_connector.dispatch.probe import Engine
from prebook_connector.dispatch.security import TOKEN_HEADER, PeerToken
from prebook_connector.dispatch.settings import Role, Settings
from prebook_connector.dispatch.types import Scope, Send, header

PREFIX = "/prebook/v1/"
_MAX_DRAIN = 3600.0
_DRAIN_TICK = 0.2

Account = dict[str, Any]


@dataclass
class Work:
    """What this process has at hand."""

    requests: int = 0
    legs: int = 0
    leg_tokens: int = 0
    draining: bool = False


@dataclass(frozen=True)
class View:
    """Everything that the endpoints look at."""

    settings: Settings
    engine: Engine
    discovery: Discovery
    control: Control | None
    token: PeerToken
    totals: Totals
    work: Work
    accounts: deque[Account]
    own: Callable[[], Identity | None]
    clock: Callable[[], float] = time.monotonic


class Endpoints:
    """Answers requests below :data:`PREFIX`."""

    def __init__(self, view: View) -> None:
        self._view = view

    async def serve(self, scope: Scope, path: str, send: Send) -> None:
        """Answers one request; ``path`` is relative to :data:`PREFIX`."""
        method = scope["method"]
        if method == "GET" and path == "identity":
            await self._identity(send)
        elif method == "GET" and path == "status":
            await _json(send, await self.status())
        elif method == "GET" and path == "ready":
            ready, reason = await self.readiness()
            await _json(send, {"ready": ready, "reason": reason}, status=200 if ready else 503)
        elif method == "GET" and path.startswith("transfers/"):
            await self._transfer(path.removeprefix("transfers/"), send)
        elif method == "POST" and path == "drain":
            await self._drain(scope, send)
        else:
            await send_error(send, ErrorAnswer(404, "No such path", "NotFoundError"))

    async def _identity(self, send: Send) -> None:
        identity = self._view.own()
        if identity is None:
            await send_error(send, ErrorAnswer(503, "The engine is not up", "ServiceUnavailableError"))
            return
        await send_json(send, identity.model_dump_json().encode())

    async def readiness(self) -> tuple[bool, str]:
        """Whether this pod should get requests, and why (not).

        A prefill pod is ready when its engine is. A decode pod also needs a ready pair, unless it may compute prompts
        itself (``onFailure: Recompute``): then it serves without one, slower, and the reason says so.
        """
        view = self._view
        if view.work.draining or (view.control is not None and view.control.draining):
            return False, "draining"
        if not await view.engine.healthy():
            return False, "the engine is not healthy"
        ready, possible = view.discovery.table.count()
        if view.settings.role is Role.PREFILL:
            return True, f"the engine is healthy; {ready} of {possible} pairs are ready"
        if ready:
            return True, f"{ready} of {possible} pairs are ready"
        if view.settings.recompute:
            return True, f"no pair of {possible} is ready; prompts are prefilled here"
        return False, f"no pair of {possible} is ready"

    async def status(self) -> Account:
        """The document of ``/prebook/v1/status``."""
        view = self._view
        ready, reason = await self.readiness()
        table = view.discovery.table
        pairs_ready, possible = table.count()
        peers = [
            {
                "address": peer.address,
                "engine_id": peer.identity.engine_id if peer.identity is not None else None,
                "state": table.state(peer).value,
                "error": peer.error or (peer.pair.error if peer.pair is not None else None),
            }
            for peer in table.peers()
        ]
        return {
            "role": view.settings.role.value,
            "engine_id": view.engine.engine_id,
            "ready": ready,
            "reason": reason,
            "pairs": {"ready": pairs_ready, "possible": possible, "peers": peers},
            "transfers": view.control.transfers() if view.control is not None else {},
            "requests": view.totals.snapshot(),
            "in_flight": {"requests": view.work.requests, "legs": view.work.legs, "leg_tokens": view.work.leg_tokens},
            "workers": sorted(view.control.workers) if view.control is not None else [],
            "draining": view.work.draining or (view.control is not None and view.control.draining),
            "last_transfers": list(view.accounts),
        }

    async def _transfer(self, transfer_id: str, send: Send) -> None:
        account: Account | None = next(
            (entry for entry in self._view.accounts if entry["transfer_id"] == transfer_id), None
        )
        if account is None and self._view.control is not None and 0 < len(transfer_id) <= 128:
            account = await self._view.control.transfer(transfer_id)
        if account is None:
            await send_error(send, ErrorAnswer(404, "No such transfer", "NotFoundError"))
        else:
            await _json(send, {"transfer_id": transfer_id, **account})

    async def _drain(self, scope: Scope, send: Send) -> None:
        refusal = self._view.token.check(header(scope, TOKEN_HEADER.encode()))
        if refusal is not None:
            REFUSED.labels(refusal.value).inc()
            await send_error(send, ErrorAnswer.of(refusal))
            return
        timeout = _timeout(scope)
        if timeout is None:
            await send_error(send, ErrorAnswer(400, "timeout must be a number of seconds", "BadRequestError"))
            return
        drained = await self.drain(seconds=timeout)
        await _json(
            send,
            {
                "drained": drained,
                "requests": self._view.work.requests,
                "transfers": self._view.control.transfers() if self._view.control is not None else {},
            },
        )

    async def drain(self, *, seconds: float) -> bool:
        """Takes no new work from now on and waits, at most ``seconds``, until nothing is under way."""
        view = self._view
        view.work.draining = True
        deadline = view.clock() + seconds
        if view.control is not None:
            await view.control.drain()
        while not self._idle():
            left = deadline - view.clock()
            if left <= 0:
                return False
            await asyncio.sleep(min(_DRAIN_TICK, left))
            if view.control is not None:
                await view.control.round()
        return True

    def _idle(self) -> bool:
        view = self._view
        if view.work.requests:
            return False
        if view.control is None:
            return True
        counts = view.control.transfers()
        return counts["booked"] + counts["pushing"] == 0


def _timeout(scope: Scope) -> float | None:
    values = parse_qs(bytes(scope.get("query_string", b"")).decode("latin-1")).get("timeout", ["60"])
    try:
        seconds = float(values[-1])
    except ValueError:
        return None
    return min(seconds, _MAX_DRAIN) if math.isfinite(seconds) and seconds >= 0 else None


async def _json(send: Send, value: Account, *, status: int = 200) -> None:
    await send_json(send, json.dumps(value).encode(), status=status)
