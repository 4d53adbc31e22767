"""The prefill leg: one HTTP request to a prefill pod, with everything that can go wrong sorted into failures."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from prebook_connector.dispatch import metrics, tracing
from prebook_connector.dispatch.reasons import Failure
from prebook_connector.dispatch.settings import Timing
from prebook_connector.dispatch.types import Send

logger = logging.getLogger(__name__)

_MAX_ANSWER = 16 << 20
"""A pull-mode answer lists block ids: about 8 bytes a block, so this is far above any real one."""
_KEEP_ALIVE = 2.5
"""Below uvicorn's idle limit in vLLM (5 s), so that a pooled connection is never closed under a new leg."""


class LegFailed(Exception):
    """A prefill leg did not succeed. ``detail`` is the dispatcher's own words, for the log."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(f"{failure}: {detail}")
        self.failure = failure
        self.detail = detail


@dataclass(frozen=True)
class LegAnswer:
    """A successful prefill leg.

    ``params`` is what vLLM returned as kv_transfer_params, if anything; ``document`` its whole answer.
    """

    params: dict[str, Any] | None
    cached_tokens: int | None
    seconds: float
    document: dict[str, Any] = field(default_factory=dict, repr=False)


class PrefillClient:
    """Sends prefill legs over pooled keep-alive connections. Must be created inside the event loop."""

    def __init__(self, timing: Timing) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
            timeout=aiohttp.ClientTimeout(total=timing.prefill, sock_connect=timing.connect),
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            # Nothing that a peer sends may grow after its size was checked.
            auto_decompress=False,
            headers={"accept-encoding": "identity"},
        )

    async def send(self, address: str, path: str, body: bytes, headers: dict[str, str]) -> LegAnswer:
        """Posts a leg and waits for its answer. Raises :class:`LegFailed`; cancelling closes the connection, which
        makes vLLM abort the leg."""
        began = time.monotonic()
        try:
            with tracing.prefill_leg(headers, address) as traced:
                answer = await self._send(address, path, body, traced, began)
        except LegFailed as error:
            metrics.LEG_SECONDS.labels(error.failure.value).observe(time.monotonic() - began)
            raise
        metrics.LEG_SECONDS.labels("ok").observe(answer.seconds)
        return answer

    async def relay(self, address: str, path: str, body: bytes, headers: dict[str, str], send: Send) -> None:
        """Has a prefill pod answer a request by itself and passes its answer on as it comes.

        Raises :class:`LegFailed`; nothing was passed on then unless the connection broke in the middle of the answer.
        """
        with _sorted_failures():
            async with self._session.post(
                f"http://{address}{path}", data=body, headers=headers, allow_redirects=False
            ) as response:
                if response.status >= 500 or response.status == 429:
                    raise LegFailed(_failure_of(response.status), f"HTTP status {response.status}")
                kept = [(b"content-type", response.headers.get("content-type", "application/json").encode())]
                mark = (b"x-prebook-prefill-only", b"max_tokens")
                await send({"type": "http.response.start", "status": response.status, "headers": [*kept, mark]})
                async for piece in response.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, address: str, path: str, body: bytes, headers: dict[str, str], began: float) -> LegAnswer:
        with _sorted_failures():
            async with self._session.post(
                f"http://{address}{path}", data=body, headers=headers, allow_redirects=False
            ) as response:
                raw = await _bounded(response)
                if response.status != 200:
                    raise LegFailed(_failure_of(response.status), f"HTTP status {response.status}")
        return _read_answer(raw, time.monotonic() - began)

    async def close(self) -> None:
        """Closes every connection."""
        await self._session.close()


@contextlib.contextmanager
def _sorted_failures() -> Iterator[None]:
    """Turns whatever the HTTP library raises into a :class:`LegFailed`."""
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise LegFailed(Failure.CONNECT, "connecting timed out") from error
    except aiohttp.ClientConnectorError as error:
        raise LegFailed(Failure.CONNECT, str(error.os_error.strerror)) from error
    except TimeoutError as error:
        raise LegFailed(Failure.PREFILL_DEADLINE, "no answer in time") from error
    except aiohttp.ClientResponseError as error:
        raise LegFailed(Failure.PREFILL_GARBAGE, "the answer is not HTTP") from error
    except (aiohttp.ClientError, OSError) as error:
        raise LegFailed(Failure.RESET, type(error).__name__) from error
    except LegFailed:
        raise
    except Exception as error:
        # Whatever else a broken answer makes the HTTP library raise, the client must not pay for it.
        logger.exception("a prefill leg failed in an unknown way")
        raise LegFailed(Failure.PREFILL_GARBAGE, type(error).__name__) from error


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > _MAX_ANSWER:
            response.close()
            raise LegFailed(Failure.PREFILL_GARBAGE, f"more than {_MAX_ANSWER} bytes")
    return b"".join(parts)


def _failure_of(status: int) -> Failure:
    if status in (401, 403):
        return Failure.PREFILL_FORBIDDEN
    if status in (429, 503):
        return Failure.PREFILL_BUSY
    if 400 <= status < 500:
        return Failure.CLIENT_ERROR
    return Failure.PREFILL_ERROR if status >= 500 else Failure.PREFILL_GARBAGE


def _read_answer(raw: bytes, seconds: float) -> LegAnswer:
    try:
        answer = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise LegFailed(Failure.PREFILL_GARBAGE, "the answer is not JSON") from error
    if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
        raise LegFailed(Failure.PREFILL_GARBAGE, "the answer is not a completion")
    params = answer.get("kv_transfer_params")
    usage = answer.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return LegAnswer(
        params=params if isinstance(params, dict) else None,
        cached_tokens=cached if isinstance(cached, int) else None,
        seconds=seconds,
        document=answer,
    )
