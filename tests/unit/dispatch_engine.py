"""A fake vLLM application behind the real middleware, and one request of a client in front of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from prebook_connector.dispatch.types import Message, Receive, Scope, Send

Json = dict[str, Any]


class Call:
    """One ASGI request in flight: what the client sends, what it got so far, and a way to leave."""

    def __init__(self, app: Any, path: str, body: bytes, *, method: str = "POST", headers: dict[str, str] | None = None,
                 owner: Any = None, parts: int = 1, query: str = "", complete: bool = True) -> None:  # fmt: skip
        self.messages: list[Message] = []
        self.times: list[float] = []
        self.left = asyncio.Event()
        self.done = asyncio.Event()
        step = max(1, -(-len(body) // parts))
        pieces = [body[at : at + step] for at in range(0, len(body), step)] or [b""]
        self._incoming: list[Message] = [
            {"type": "http.request", "body": piece, "more_body": not complete or index < len(pieces) - 1}
            for index, piece in enumerate(pieces)
        ]
        names = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
        scope: Scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": method,
            "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "", "scheme": "http",
            "headers": [(key.encode(), value.encode()) for key, value in names.items()], "app": owner, "state": {},
        }  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._incoming:
            return self._incoming.pop(0)
        waits = [asyncio.create_task(self.left.wait()), asyncio.create_task(self.done.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self.left.is_set():
            return  # as a server does
        assert not self.done.is_set(), "the application sent something after the end"
        if message["type"] == "http.response.start":
            assert not self.messages, "a second response start reached the client"
        self.messages.append(message)
        self.times.append(time.monotonic())
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.done.set()

    async def finish(self, seconds: float = 10.0) -> Call:
        """Waits until the application is through with the request."""
        await asyncio.wait_for(self.task, seconds)
        return self

    @property
    def status(self) -> int:
        """HTTP status, 0 when nothing was answered."""
        return int(self.messages[0]["status"]) if self.messages else 0

    @property
    def headers(self) -> dict[str, str]:
        """Response headers."""
        return {bytes(k).decode().lower(): bytes(v).decode() for k, v in self.messages[0]["headers"]}

    @property
    def content(self) -> bytes:
        """The body so far."""
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    def json(self) -> Json:
        """The body as an object."""
        value: Json = json.loads(self.content)
        return value


@dataclass
class Leg:
    """One call of the fake engine."""

    path: str
    body: Json | None
    raw: bytes
    headers: dict[str, str]
    aborted: bool = False
    answered: bool = False

    @property
    def params(self) -> Json | None:
        """kv_transfer_params that reached the engine."""
        return (self.body or {}).get("kv_transfer_params")


class FakeEngine:
    """Stands for vLLM's application: waits for KV when a request says that it comes from elsewhere, then answers.

    ``arrived[transfer_id]`` is set by peers and by the fake connector; ``broken`` ids answer 500 once they are set.
    """

    def __init__(self) -> None:
        self.legs: list[Leg] = []
        self.arrived: dict[str, asyncio.Event] = {}
        self.broken: set[str] = set()
        self.healthy = True
        self.tokens = 3
        self.queued = 0.0
        self.pace = 0.0
        self.answer: Callable[[Leg, Send], Awaitable[None]] | None = None
        self.comment_first = False
        self.refuse_local: str | None = None
        self.events: list[tuple[float, str]] = []
        self.lifespan: list[str] = []
        self.state = SimpleNamespace(
            vllm_config=SimpleNamespace(
                kv_transfer_config=SimpleNamespace(engine_id="engine-here"),
                model_config=SimpleNamespace(use_mla=False)))  # fmt: skip

    def key(self, leg: Leg) -> str:
        """What names the transfer in every mode."""
        params = leg.params or {}
        return str(params.get("transfer_id") or params.get("remote_request_id") or "")

    def event(self, key: str) -> asyncio.Event:
        """The event "the KV of this transfer is here"."""
        return self.arrived.setdefault(key, asyncio.Event())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            self.lifespan.append(scope["type"])
            return
        if scope["path"] == "/health":
            await _respond(send, 200 if self.healthy else 503, b"")
            return
        raw = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {bytes(k).decode(): bytes(v).decode() for k, v in scope["headers"]}
        assert int(headers["content-length"]) == len(raw)
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        leg = Leg(scope["path"], body if isinstance(body, dict) else None, raw, headers)
        self.legs.append(leg)
        self.events.append((time.monotonic(), "decode leg"))
        work = asyncio.create_task(self._work(leg, send))
        watch = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                leg.aborted = True
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                if not leg.body or not leg.body.get("stream"):
                    # vLLM's with_cancellation returns None, and FastAPI answers with that.
                    await _respond(send, 200, b"null")
            else:
                work.result()
        finally:
            watch.cancel()
            work.cancel()

    async def _work(self, leg: Leg, send: Send) -> None:
        if leg.body is None or leg.body.get("model") == "unknown":
            await _respond(send, 400, b'{"error":{"message":"engine says no","code":400}}')
            return
        if self.refuse_local is not None and leg.params is None:
            await _respond(send, 503, self.refuse_local.encode())
            return
        stream = leg.body.get("stream") is True
        head = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
        if stream:
            await send(head)
            if self.comment_first:
                await send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})
        if leg.params and leg.params.get("do_remote_prefill"):
            await asyncio.sleep(self.queued)
            await self.event(self.key(leg)).wait()
            if self.key(leg) in self.broken:
                leg.answered = True
                if stream:
                    error = b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n'
                    await send({"type": "http.response.body", "body": error, "more_body": True})
                    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
                else:
                    await _respond(send, 500, b'{"error":{"message":"kv load failed","code":500}}')
                return
        if self.answer is not None:
            await self.answer(leg, send)
        elif stream:
            for index in range(self.tokens):
                await send({"type": "http.response.body", "body": b'data: {"t":%d}\n\n' % index, "more_body": True})
                await asyncio.sleep(self.pace)
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
        else:
            await _respond(send, 200, json.dumps({"choices": [{"text": "hello"}]}).encode())
        leg.answered = True

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            self.lifespan.append(message["type"])
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _respond(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
