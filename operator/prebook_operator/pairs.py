"""What decode pods say about their pairs: read from themselves, never assumed.

A pod is asked only if a StatefulSet of the model owns it by UID. The question is one GET with a short timeout;
redirects are not followed, answers are cut off at a fixed size, and at most so many pods of a model are asked. What
cannot be read or understood is an answer too: "unknown"."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import aiohttp

from prebook_operator.kube.errors import shorten
from prebook_operator.records import PodRecord

PORT: Final = 8000
PATH: Final = "/prebook/v1/status"
ANSWER_LIMIT: Final = 256 * 1024
MAX_PODS: Final = 32


@dataclass(frozen=True, kw_only=True)
class PodPairs:
    """One decode pod's word. `ready` pairs of `possible`; `failure` is the first failed pair's error; `error` says
    why the pod could not be understood."""

    ready: int = 0
    possible: int = 0
    failure: str = ""
    error: str = ""


class PairsReader(Protocol):
    """Asks pods."""

    async def read(self, pods: Iterable[PodRecord]) -> dict[str, PodPairs]:
        """Answers by pod name, never more than MAX_PODS of them. Never raises for what a pod does."""
        ...


class HttpPairsReader:
    """Asks over HTTP. An answer is reused for `fresh` seconds once all pairs are ready, and for `pending` seconds
    before."""

    def __init__(
        self,
        *,
        timeout: float = 2.0,
        fresh: float = 30.0,
        pending: float = 3.0,
        parallel: int = 16,
        port: int = PORT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._fresh = fresh
        self._pending = pending
        self._port = port
        self._clock = clock
        self._slots = asyncio.Semaphore(parallel)
        self._session: aiohttp.ClientSession | None = None
        self._known: dict[str, tuple[float, PodPairs]] = {}

    async def close(self) -> None:
        """Ends all connections."""
        if self._session is not None:
            await self._session.close()

    async def read(self, pods: Iterable[PodRecord]) -> dict[str, PodPairs]:
        """See PairsReader."""
        chosen = sorted(pods, key=lambda pod: pod.name)[:MAX_PODS]
        answers = await asyncio.gather(*(self._cached(pod) for pod in chosen))
        return {pod.name: answer for pod, answer in zip(chosen, answers, strict=True)}

    async def _cached(self, pod: PodRecord) -> PodPairs:
        now = self._clock()
        known = self._known.get(pod.uid)
        if known is not None and now < known[0]:
            return known[1]
        answer = await self._ask(pod)
        complete = not answer.error and answer.ready >= answer.possible
        self._known[pod.uid] = (self._clock() + (self._fresh if complete else self._pending), answer)
        self._expire(now)
        return answer

    def _expire(self, now: float) -> None:
        if len(self._known) > 4096:
            self._known = {uid: entry for uid, entry in self._known.items() if entry[0] > now}

    async def _ask(self, pod: PodRecord) -> PodPairs:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=self._timeout, connector=aiohttp.TCPConnector(force_close=True, limit=0)
            )
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        async with self._slots:
            try:
                async with self._session.get(f"http://{host}:{self._port}{PATH}", allow_redirects=False) as response:
                    body = await response.content.read(ANSWER_LIMIT + 1)
                    status = response.status
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                return PodPairs(error=shorten(f"{type(error).__name__}: {error}", limit=120))
        if status != 200:
            return PodPairs(error=f"HTTP {status}")
        return parse(body)


def parse(body: bytes) -> PodPairs:
    """A pod's answer, understood as far as it goes; total for any bytes."""
    if len(body) > ANSWER_LIMIT:
        return PodPairs(error="the answer is too long")
    try:
        document = json.loads(body)
    except ValueError:
        return PodPairs(error="the answer is not JSON")
    pairs = document.get("pairs") if isinstance(document, dict) else None
    if not isinstance(pairs, dict):
        return PodPairs(error="the answer has no pairs")
    ready, possible = _count(pairs.get("ready")), _count(pairs.get("possible"))
    if ready is None or possible is None or ready > possible:
        return PodPairs(error="the answer's counts make no sense")
    return PodPairs(ready=ready, possible=possible, failure=_failure(pairs.get("peers")))


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10_000 else None


def _failure(peers: Any) -> str:
    if not isinstance(peers, list):
        return ""
    failed = [peer for peer in peers if isinstance(peer, Mapping) and peer.get("state") == "failed"]
    texts = sorted(f"{peer.get('address', '?')}: {peer.get('error') or 'failed'}" for peer in failed)
    return shorten(texts[0], limit=200) if texts else ""
