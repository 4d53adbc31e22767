"""The front Service: a TCP balancer over the ready decode pods.

It chooses per connection, as kube-proxy does, but the backend with the fewest open connections; a backend that
refuses is skipped. With nothing ready it answers the request itself (503, OpenAI's error format), so that a client
sees why.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
from collections import Counter
from collections.abc import Callable, Sequence

from prebook_operator.local.errors import MachineError

Backend = tuple[str, int]
_CONNECT_TIMEOUT = 5.0
_BUFFER = 1 << 16
# After the client's side ended: seconds for the rest of an answer that is on its way.
_HALF_CLOSED = 1.0


class Balancer:
    """Listens on ``host:port`` and forwards to what ``backends`` returns at that moment."""

    def __init__(self, *, host: str, port: int, backends: Callable[[], Sequence[Backend]]) -> None:
        self.host = host
        self.port = port
        self._backends = backends
        self._open: Counter[Backend] = Counter()
        self._served: Counter[Backend] = Counter()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begins to listen; raises ``MachineError`` when the port is taken. Port 0 takes a free one and writes it to
        ``port``.
        """
        try:
            self._server = await asyncio.start_server(self._accept, self.host, self.port, limit=_BUFFER)
        except OSError as error:
            if error.errno not in {errno.EADDRINUSE, errno.EACCES}:
                raise
            what = "is in use" if error.errno == errno.EADDRINUSE else "may not be used by you"
            raise MachineError(
                f"port {self.port} of {self.host} {what}",
                remedy="choose another with --port; `prebook ps` shows whether a model of yours holds it",
            ) from error
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Closes the port and every connection."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _load(self, backend: Backend) -> tuple[int, int]:
        """Fewest open connections first; among equals the one that served least, so that idle backends take turns."""
        return self._open[backend], self._served[backend]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # either side went away, or the balancer stops: the connection just ends
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for backend in sorted(self._backends(), key=self._load):
            try:
                async with asyncio.timeout(_CONNECT_TIMEOUT):
                    upstream_reader, upstream_writer = await asyncio.open_connection(*backend, limit=_BUFFER)
            except OSError:  # includes TimeoutError: this one does not answer, the next may
                continue
            self._open[backend] += 1
            self._served[backend] += 1
            try:
                await _join(client=(reader, writer), upstream=(upstream_reader, upstream_writer))
            finally:
                self._open[backend] -= 1
                upstream_writer.close()
            return
        await _refuse(reader, writer)


async def _join(
    *,
    client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """Copies both ways. The answer's end closes the connection; the end of the request's side only half-closes it.

    A client that goes away is noticed by the failed write or by its reset; its upstream is then closed, and the
    engine aborts the request.
    """
    up = asyncio.create_task(_copy(client[0], upstream[1]))
    down = asyncio.create_task(_copy(upstream[0], client[1]))
    try:
        await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        if up.done() and up.exception() is None:
            # Half-closed (or gone): HTTP clients keep their side open until they have read the answer, so the client
            # left.
            with contextlib.suppress(OSError):
                upstream[1].write_eof()
            async with asyncio.timeout(_HALF_CLOSED):
                await asyncio.wait({down})
    except TimeoutError:
        pass  # the client closed its side and the answer did not come: both sides are closed by the caller
    finally:
        for task in (up, down):
            task.cancel()
        await asyncio.gather(up, down, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_BUFFER):
        writer.write(data)
        await writer.drain()


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        async with asyncio.timeout(_CONNECT_TIMEOUT):
            await reader.readuntil(b"\r\n\r\n")
    error = {
        "error": {"message": "no decode pod is ready", "type": "ServiceUnavailableError", "param": None, "code": 503}
    }
    body = json.dumps(error).encode()
    writer.write(
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\nConnection: close\r\n"
        + f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    await writer.drain()
