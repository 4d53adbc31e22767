"""Is every watch alive, and when has a list ended? Learnt from the HTTP traffic of the session that kopf watches
through.

kopf delivers objects; it does not tell that a list was complete, nor that a stream has gone silent while its health
endpoint still says yes (kopf#585, #957). Both can be seen on the wire: a GET without `watch` opens a list, the watch
that follows it means that the list was complete, and each chunk of a stream is a sign of life, for the API server
sends a bookmark every minute."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL


@dataclass(frozen=True)
class Scope:
    """One watched collection: a kind in one namespace, or everywhere."""

    plural: str
    namespace: str | None


class WatchProgress:
    """Middleware of kopf's session. Its callbacks run in kopf's thread."""

    def __init__(
        self,
        plurals: frozenset[str],
        *,
        on_list: Callable[[Scope], None],
        on_watch: Callable[[Scope], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plurals = plurals
        self._on_list = on_list
        self._on_watch = on_watch
        self._clock = clock
        self._alive: dict[Scope, float] = {}

    def expect(self, scopes: Iterable[Scope]) -> None:
        """These are to be watched: they count as silent from now on, until they show a sign of life."""
        for scope in scopes:
            self._sign(scope)

    def silent(self, seconds: float) -> list[Scope]:
        """Scopes without any sign of life for so long; safe to call from another thread."""
        now = self._clock()
        return [scope for scope, at in list(self._alive.items()) if now - at > seconds]

    async def middleware(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Watches one exchange; see aiohttp's client middlewares."""
        scope = scope_of(request.url, self._plurals) if request.method == "GET" else None
        if scope is None:
            return await handler(request)
        watching = request.url.query.get("watch") == "true"
        if not watching and "continue" not in request.url.query:
            self._on_list(scope)
        response = await handler(request)
        if response.status < 400:
            self._sign(scope)
        if watching and response.status == 200:
            self._on_watch(scope)
            response.content = _Tapped(response.content, lambda: self._sign(scope))  # type: ignore[assignment]
        return response

    def _sign(self, scope: Scope) -> None:
        self._alive[scope] = self._clock()


class _Tapped:
    """A response's stream that reports each chunk which it hands out."""

    def __init__(self, stream: aiohttp.StreamReader, on_chunk: Callable[[], None]) -> None:
        self._stream = stream
        self._on_chunk = on_chunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Chunks of the stream."""
        async for chunk in self._stream.iter_chunked(size):
            self._on_chunk()
            yield chunk


def scope_of(url: URL, plurals: frozenset[str]) -> Scope | None:
    """The collection that a URL names: `…/<plural>` or `…/namespaces/<namespace>/<plural>`; None for anything else."""
    parts = [part for part in url.path.split("/") if part]
    if not parts or parts[-1] not in plurals:
        return None
    prefix = 2 if parts[0] == "api" else 3
    if parts[0] not in ("api", "apis"):
        return None
    if len(parts) == prefix + 1:
        return Scope(parts[-1], None)
    if len(parts) == prefix + 3 and parts[prefix] == "namespaces":
        return Scope(parts[-1], parts[prefix + 1])
    return None
