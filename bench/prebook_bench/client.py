"""One streamed request to an OpenAI-compatible server, with the arrival time of every token."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import aiohttp

#: An answer that takes longer than this counts as an error, not as a slow answer.
REQUEST_TIMEOUT_S: Final = 300.0


class RequestError(RuntimeError):
    """The server answered with an error, or the stream ended without a token."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """Times are seconds after the request was sent, on this process's monotonic clock.

    `arrivals` holds one entry for each event of the stream that carried tokens; `tokens` is the server's own count of
    output tokens where it reports usage, otherwise the number of those events. `sent_at` is the moment of sending on
    the monotonic clock itself.
    """

    arrivals: tuple[float, ...]
    tokens: int
    end: float
    text: str
    headers: Mapping[str, str]
    sent_at: float = 0.0

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.arrivals[0]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: the definition of vLLM's own benchmark. None for one token."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1) if self.tokens > 1 else None


async def sse_events(content: aiohttp.StreamReader) -> AsyncIterator[str]:
    """The data of each server-sent event; ends at ``[DONE]``. Comment lines and other fields are skipped."""
    async for line in content:
        text = line.decode("utf-8", errors="replace").rstrip("\r\n")
        if text.startswith("data:"):
            data = text[5:].lstrip()
            if data == "[DONE]":
                return
            yield data


def event_text(event: Mapping[str, Any]) -> str | None:
    """The text of a completion or chat chunk; None for chunks that carry no token (role, usage).

    A completion chunk counts even when its text is empty: a token may be part of a character.
    """
    choices = event.get("choices")
    if not choices:
        return None
    choice = choices[0]
    if "delta" not in choice:
        return str(choice.get("text") or "")
    delta = choice["delta"]
    text = delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content")
    return str(text) if text else None


async def stream(
    session: aiohttp.ClientSession, url: str, *, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Answer:
    """Sends `body` with streaming on and reads the answer to its end.

    Raises RequestError, aiohttp's errors and TimeoutError.
    """
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    started = time.perf_counter()
    arrivals: list[float] = []
    texts: list[str] = []
    tokens = 0
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with session.post(url, json=request, headers=headers, timeout=timeout) as response:
        if response.status != 200:
            raise RequestError(f"HTTP {response.status}: {(await response.text())[:300]}")
        async for data in sse_events(response.content):
            arrived = time.perf_counter() - started
            event = json.loads(data)
            if "error" in event:
                raise RequestError(f"error in the stream: {str(event['error'])[:300]}")
            text = event_text(event)
            if text is not None:
                arrivals.append(arrived)
                texts.append(text)
            if usage := event.get("usage"):
                tokens = int(usage["completion_tokens"])
        ended = time.perf_counter() - started
        answer_headers = {key.lower(): value for key, value in response.headers.items()}
    if not arrivals:
        raise RequestError("the stream ended without a token")
    return Answer(
        arrivals=tuple(arrivals),
        tokens=tokens or len(arrivals),
        end=ended,
        text="".join(texts),
        headers=answer_headers,
        sent_at=started,
    )


async def post(
    session: aiohttp.ClientSession, url: str, *, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], float]:
    """Sends `body` without streaming; returns the JSON answer and the seconds it took. Raises what `stream` does."""
    started = time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with session.post(url, json=dict(body), headers=headers, timeout=timeout) as response:
        text = await response.text()
        took = time.perf_counter() - started
        if response.status != 200:
            raise RequestError(f"HTTP {response.status}: {text[:300]}")
    answer = json.loads(text)
    if not isinstance(answer, dict):
        raise RequestError(f"not a JSON object: {text[:100]}")
    return answer, took
