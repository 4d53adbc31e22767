"""The client's channel and the decode leg: the wrapped app, called with a body of ours and a way to make it stop.

Until the first byte of an answer is on its way to the client, the dispatcher may still change its mind. So a decode
leg's response start is held back until its first content, and whoever has content first *commits* the channel; every
other leg is silenced from then on. After that, messages pass through one by one: nothing is collected.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence

from prebook_connector.dispatch import metrics, tracing
from prebook_connector.dispatch.errors import ErrorAnswer, send_error
from prebook_connector.dispatch.opening import Continuation, Diverged, Opening
from prebook_connector.dispatch.reasons import Refusal
from prebook_connector.dispatch.types import App, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)


class BodyRefused(Exception):
    """The request body was not taken in."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.value)
        self.refusal = refusal


class ClientGone(Exception):
    """The client left before its request was complete."""


class ClientChannel:
    """One client's ASGI channel, read by one reader only.

    ``gone`` is set once the server says that the client is gone, which it also does when the response is complete;
    ``left`` tells the two apart.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.gone = asyncio.Event()
        self.started = False
        self.complete = False
        self.owner: DecodeLeg | None = None
        self._continuation: Continuation | None = None
        self._sending = asyncio.Lock()

    @property
    def left(self) -> bool:
        """Whether the client left before its response was complete."""
        return self.gone.is_set() and not self.complete

    async def read_body(self, *, limit: int, seconds: float) -> bytes:
        """The whole request body. Raises :class:`BodyRefused` or :class:`ClientGone`."""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        self.gone.set()
                        raise ClientGone
                    part = message.get("body", b"")
                    size += len(part)
                    if size > limit:
                        raise BodyRefused(Refusal.BODY_TOO_LARGE)
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise BodyRefused(Refusal.BODY_TIMEOUT) from None

    async def watch(self) -> None:
        """Waits for the client to leave. To be run as a task while legs are under way."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone.set()
                return

    def replay(self, body: bytes) -> Receive:
        """A receive channel that gives ``body`` and then the client's own messages."""
        given = False

        async def receive() -> Message:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            return await self._receive()

        return receive

    @property
    def direct(self) -> Send:
        """The server's own send, for a request that is the engine's alone: a token on its way pays for nothing here."""
        return self._send

    async def send(self, message: Message) -> None:
        """Passes a message to the client; a second response start (after a change of legs) is left out."""
        async with self._sending:
            await self._pass(message)

    async def lead(self, start: Message, opening: Opening) -> None:
        """Begins the stream with ``opening``; what legs send from now on is cut so that it continues it."""
        async with self._sending:
            await self._pass(start)
            await self._pass({"type": "http.response.body", "body": opening.events, "more_body": True})
            self._continuation = Continuation(opening.text)

    async def _pass(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self.started:
                return
            self.started = True
        elif message["type"] == "http.response.body":
            if self.complete:
                return
            message = self._continued(message)
            self.complete = not message.get("more_body", False)
        await self._send(message)

    def _continued(self, message: Message) -> Message:
        if self._continuation is None or self._continuation.settled:
            return message
        more = message.get("more_body", False)
        try:
            body = self._continuation.feed(bytes(message.get("body", b"")))
            if not more and not self._continuation.settled:
                raise Diverged
        except (Diverged, ValueError, LookupError, TypeError):
            # A wrong text must not go on as if nothing had happened, and the engine need not go on at all.
            logger.exception("decode did not continue the stream that prefill's first token began")
            metrics.FIRST_TOKENS.labels("diverged").inc()
            self.gone.set()
            body, more = ErrorAnswer.of(Refusal.FIRST_TOKEN_LOST).event(), False
        return {**message, "body": body, "more_body": more}

    async def refuse(self, answer: ErrorAnswer, *, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Ends the response with an error of ours."""
        if not self.started:
            self.started = True
            await send_error(self._send, answer, headers=tuple(headers))
        else:
            await self._send({"type": "http.response.body", "body": answer.event(), "more_body": False})


class DecodeLeg:
    """One run of the wrapped app for a request.

    ``opened``: its response has begun, and nothing of it was sent. ``committed``: its answer is on its way to the
    client. ``rejected``: it answered with a server error before that, and was asked to hold such an answer back so that
    another leg can do better.
    """

    def __init__(
        self,
        app: App,
        scope: Scope,
        channel: ClientChannel,
        *,
        body: bytes,
        mark: tuple[bytes, bytes],
        hold_errors: bool,
    ) -> None:
        self._app = app
        # Version 2.3 makes starlette's StreamingResponse listen on `receive` for the disconnect, whatever the server.
        self._scope = {
            **scope,
            "asgi": {**scope.get("asgi", {}), "spec_version": "2.3"},
            "state": dict(scope.get("state", {})),
        }
        self._channel = channel
        self._body = body
        self._given = False
        self._mark = mark
        self._hold_errors = hold_errors
        self._start: Message | None = None
        self._muted = False
        self._stop = asyncio.Event()
        self.opened = asyncio.Event()
        self.committed = asyncio.Event()
        self.rejected = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def status(self) -> int:
        """HTTP status of the answer, 0 before there is one."""
        return int(self._start["status"]) if self._start is not None else 0

    @property
    def can_lead(self) -> bool:
        """Whether its response has begun well and has no content so far, so that another token could go first."""
        return self.status == 200 and not self._muted and self._channel.owner is None

    async def lead(self, opening: Opening) -> bool:
        """Begins the client's stream with ``opening`` under this leg's response headers; False when it is too late."""
        if self._start is None or not self.can_lead:
            return False
        await self._channel.lead(self._start, opening)
        return True

    def start(self) -> asyncio.Task[None]:
        """Starts the app in a task of its own."""
        self.task = asyncio.create_task(self._run(), name="prebook-decode-leg")
        return self.task

    async def _run(self) -> None:
        await self._app(self._scope, self._receive, self._send_message)

    def abandon(self) -> None:
        """Silences the leg and tells the app that its client left, which makes vLLM abort the request."""
        self._muted = True
        self._stop.set()

    async def _receive(self) -> Message:
        if not self._given:
            self._given = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        stop = asyncio.create_task(self._stop.wait())
        gone = asyncio.create_task(self._channel.gone.wait())
        try:
            await asyncio.wait({stop, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            gone.cancel()
        return {"type": "http.disconnect"}

    async def _send_message(self, message: Message) -> None:
        if self._muted:
            return
        if message["type"] == "http.response.start":
            self._start = {**message, "headers": [*message.get("headers", ()), self._mark]}
            self.opened.set()
        elif self.committed.is_set():
            await self._channel.send(message)
        elif message["type"] == "http.response.body":
            await self._first_content(message)

    async def _first_content(self, message: Message) -> None:
        """Decides what the first content of the response means: nothing yet, a failure to hold back, or the answer."""
        start = self._start
        if start is None:
            raise RuntimeError("the app sent a body before its response start")
        body = message.get("body", b"")
        more = message.get("more_body", False)
        if more and (not body or body.startswith(b":")):
            # A server-sent comment only keeps proxies awake; it is no answer, and a fresh leg can go on after it.
            if body:
                await self._channel.send(start)
                await self._channel.send(message)
            return
        if self._hold_errors and is_server_error(int(start["status"]), bytes(body)):
            self._muted = True
            self.rejected.set()
            return
        if self._channel.owner is not None:
            self._muted = True
            return
        self._channel.owner = self
        self.committed.set()
        tracing.first_token("decode")
        if self._channel.started and start["status"] != 200:
            # A comment of an earlier leg already began a stream: an error can only come as its next event.
            event = b"data: " + bytes(body) + b"\n\ndata: [DONE]\n\n"
            message = {"type": "http.response.body", "body": event, "more_body": False}
        await self._channel.send(start)
        await self._channel.send(message)


def is_server_error(status: int, body: bytes) -> bool:
    """Whether a first piece of response says that the engine failed (not: that it is overloaded, or the client erred).

    vLLM reports a failure inside a stream as an event ``data: {"error": {..., "code": 500}}`` under status 200.
    """
    if status == 500:
        return True
    if status != 200 or not body.startswith(b'data: {"error"'):
        return False
    try:
        event = json.loads(body[len(b"data: ") :].split(b"\n", 1)[0])
        return int(event["error"]["code"]) == 500
    except (ValueError, TypeError, KeyError):
        return False


async def settle(task: asyncio.Task[None], *, seconds: float) -> None:
    """Waits for an abandoned leg, cancels it when it does not end, and keeps its exception to the log."""
    done, _ = await asyncio.wait({task}, timeout=seconds)
    if not done:
        task.cancel()
        await asyncio.wait({task}, timeout=seconds)
    if task.done() and not task.cancelled() and (error := task.exception()) is not None:
        logger.debug("abandoned decode leg ended with %r", error)
