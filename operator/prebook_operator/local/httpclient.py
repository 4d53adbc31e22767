"""A small HTTP/1.1 client for this machine's own pods: probes, status, the one question of ``--ask``.

Plain HTTP, one connection per request, bodies of known length or chunked. Prebook's base installation has no HTTP
library, and needs no more than this.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

_MAX_LINE = 1 << 16
_MAX_BODY = 16 << 20


class HttpError(Exception):
    """No usable answer: not reachable, too slow, or not HTTP."""


@dataclass
class Response:
    """Status, headers (lower-case names) and the still unread body."""

    status: int
    headers: Mapping[str, str]
    _reader: asyncio.StreamReader

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives, without the chunked framing."""
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await _line(self._reader)).split(b";")[0], 16):
                yield await self._reader.readexactly(size)
                await self._reader.readexactly(2)
            return
        left = int(self.headers["content-length"]) if "content-length" in self.headers else None
        while left is None or left > 0:
            part = await self._reader.read(min(65536, left or 65536))
            if not part:
                if left:
                    raise HttpError("the connection ended in the middle of the body")
                return
            left = None if left is None else left - len(part)
            yield part

    async def body(self) -> bytes:
        """The whole body, up to 16 MiB."""
        parts: list[bytes] = []
        total = 0
        async for part in self.chunks():
            total += len(part)
            if total > _MAX_BODY:
                raise HttpError("the body is larger than 16 MiB")
            parts.append(part)
        return b"".join(parts)


@asynccontextmanager
async def request(
    method: str,
    *,
    host: str,
    port: int,
    path: str,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    head_within: float | None = None,
) -> AsyncIterator[Response]:
    """One request; the connection closes at the end of the block. Raises ``HttpError``.

    The head of the answer has to come ``head_within`` seconds; other deadlines are the caller's (``asyncio.timeout``),
    and their ``TimeoutError`` passes through.
    """
    try:
        reader, writer = await asyncio.open_connection(host, port, limit=_MAX_LINE)
    except OSError as error:
        raise HttpError(f"cannot connect to {host}:{port}: {error.strerror or error}") from error
    try:
        lines = {"Host": f"{host}:{port}", "Connection": "close", "User-Agent": "prebook", **(headers or {})}
        if body:
            lines["Content-Length"] = str(len(body))
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(head.encode() + b"\r\n" + body)
        await writer.drain()
        async with asyncio.timeout(head_within):
            response = await _head(reader)
        yield response
    except TimeoutError:
        raise
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        raise HttpError(f"{host}:{port}{path}: {error}") from error
    finally:
        writer.close()


async def get_json(*, host: str, port: int, path: str, within: float) -> tuple[int, dict[str, Any]]:
    """Status and JSON object of a GET; raises ``HttpError`` also for a body that is not a JSON object or none
    ``within`` seconds.
    """
    try:
        async with asyncio.timeout(within), request("GET", host=host, port=port, path=path) as response:
            body = await response.body()
            status = response.status
    except TimeoutError as error:
        raise HttpError(f"{host}:{port}{path}: no answer within {within:g} s") from error
    try:
        value = json.loads(body)
    except ValueError as error:
        raise HttpError(f"{host}:{port}{path}: the answer is not JSON") from error
    if not isinstance(value, dict):
        raise HttpError(f"{host}:{port}{path}: the answer is not a JSON object")
    return status, value


async def _head(reader: asyncio.StreamReader) -> Response:
    first = (await _line(reader)).split(b" ", 2)
    if len(first) < 2 or not first[0].startswith(b"HTTP/1.") or not first[1].isdigit():
        raise HttpError("the answer is not HTTP")
    headers: dict[str, str] = {}
    while line := await _line(reader):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return Response(status=int(first[1]), headers=headers, _reader=reader)


async def _line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readuntil(b"\n")
    return line.rstrip(b"\r\n")
