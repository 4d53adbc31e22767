"""Who drives the two legs of a request: the dispatch middleware in decode, or this client itself.

The direct front exists to measure a connector alone: no dispatcher between client and engines, and the prefill leg of
the very request that is measured is timed too. Its parameters are those that vLLM's own routers send.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

import aiohttp

from prebook_bench import client
from prebook_bench.modes import EngineIdentity, Mode


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A client's view of one request, and how long its prefill leg took where the front saw it (seconds).

    `transfer_id` is set where the request's transfer has one.
    """

    answer: client.Answer
    prefill_leg: float | None
    transfer_id: str | None = None


class Front(Protocol):
    """Sends one completion request through a pair."""

    name: str

    async def send(self, session: aiohttp.ClientSession, body: Mapping[str, Any]) -> Outcome:
        """Raises what :func:`prebook_bench.client.stream` raises."""


class PlainFront:
    """Asks one server, and what happens behind it is its own business: an engine that does everything, or a router."""

    name = "plain"

    def __init__(self, base_url: str) -> None:
        self._url = f"{base_url}/v1/completions"

    async def send(self, session: aiohttp.ClientSession, body: Mapping[str, Any]) -> Outcome:
        return Outcome(answer=await client.stream(session, self._url, body=body), prefill_leg=None)


class DispatchFront:
    """Asks decode's API server; its middleware does the rest. Nothing but the answer is visible from here."""

    name = "dispatch"

    def __init__(self, decode: EngineIdentity) -> None:
        self._url = f"{decode.base_url}/v1/completions"

    async def send(self, session: aiohttp.ClientSession, body: Mapping[str, Any]) -> Outcome:
        answer = await client.stream(session, self._url, body=body)
        if reason := answer.headers.get("x-prebook-local"):
            raise client.RequestError(f"prefill ran locally ({reason}): nothing was transferred")
        return Outcome(answer=answer, prefill_leg=None, transfer_id=answer.headers.get("x-prebook-transfer"))


class DirectFront:
    """Drives both legs: one after the other for pull, at the same moment for push and Prebook."""

    name = "direct"

    def __init__(self, prefill: EngineIdentity, *, decode: EngineIdentity) -> None:
        self._prefill = prefill
        self._decode = decode

    async def send(self, session: aiohttp.ClientSession, body: Mapping[str, Any]) -> Outcome:
        if self._prefill.mode is Mode.PULL:
            return await self._sequential(session, body)
        return await self._concurrent(session, body)

    async def _sequential(self, session: aiohttp.ClientSession, body: Mapping[str, Any]) -> Outcome:
        headers = {"X-Request-Id": uuid.uuid4().hex}
        started = time.perf_counter()
        reply, _ = await self._leg(session, body, params=_PREFILL_PARAMS, headers=headers)
        leg = time.perf_counter() - started
        params = reply.get("kv_transfer_params")
        if not params:
            raise client.RequestError("prefill's answer carries no kv_transfer_params")
        answer = await client.stream(
            session, self._url(self._decode), body={**body, "kv_transfer_params": params}, headers=headers
        )
        return Outcome(answer=_shifted(answer, by=leg), prefill_leg=leg)

    async def _concurrent(self, session: aiohttp.ClientSession, body: Mapping[str, Any]) -> Outcome:
        transfer_id = uuid.uuid4().hex
        headers = {"X-Request-Id": transfer_id}
        ours = self._prefill.mode.ours
        prefill_params = {**_PREFILL_PARAMS, **({"transfer_id": transfer_id} if ours else {})}
        decode_params = {**self._decode_params(transfer_id), **({"transfer_id": transfer_id} if ours else {})}
        prefill = asyncio.create_task(self._leg(session, body, params=prefill_params, headers=headers))
        decode = asyncio.create_task(
            client.stream(
                session, self._url(self._decode), body={**body, "kv_transfer_params": decode_params}, headers=headers
            )
        )
        try:
            (_, leg), answer = await asyncio.gather(prefill, decode)
        except BaseException:
            prefill.cancel()
            decode.cancel()
            await asyncio.gather(prefill, decode, return_exceptions=True)
            raise
        return Outcome(answer=answer, prefill_leg=leg, transfer_id=transfer_id)

    def _decode_params(self, request_id: str) -> dict[str, Any]:
        """What decode must know about a prefill that has not answered yet."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._prefill.engine_id,
            "remote_request_id": request_id,
            "remote_host": self._prefill.address,
            "remote_port": self._prefill.side_channel_port,
            "tp_size": 1,
            "pp_size": 1,
            "dp_rank": 0,
        }

    async def _leg(
        self,
        session: aiohttp.ClientSession,
        body: Mapping[str, Any],
        *,
        params: Mapping[str, Any],
        headers: Mapping[str, str],
    ) -> tuple[dict[str, Any], float]:
        request = {**prefill_body(body), "kv_transfer_params": params}
        return await client.post(session, self._url(self._prefill), body=request, headers=headers)

    @staticmethod
    def _url(engine: EngineIdentity) -> str:
        return f"{engine.base_url}/v1/completions"


_PREFILL_PARAMS: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}


def prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The request of a prefill leg: the same prompt and sampling, one token, not streamed."""
    request = {key: value for key, value in body.items() if key not in ("stream", "stream_options", "min_tokens")}
    return {**request, "max_tokens": 1, "stream": False}


def _shifted(answer: client.Answer, *, by: float) -> client.Answer:
    """The answer's times counted from `by` seconds earlier."""
    return dataclasses.replace(
        answer, arrivals=tuple(t + by for t in answer.arrivals), end=answer.end + by, sent_at=answer.sent_at - by
    )
