"""A decode pod without an engine: the real middleware, a fake app behind it, real HTTP peers, a real control socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from prebook_connector.dispatch.asgi import DispatchMiddleware
from prebook_connector.dispatch.probe import vllm_version
from prebook_connector.dispatch.settings import Settings
from prebook_connector.dispatch.types import Message, Receive, Scope, Send

LONG = list(range(200))
TOKEN = "s3cret"
FAST = {
    "connect": 0.5, "prefill": 5.0, "first_byte": 5.0, "body": 1.0, "poll": 0.05, "poll_steady": 0.05,
    "poll_timeout": 0.2, "lost_after": 0.5, "control": 0.5, "abandoned": 0.5, "forget_after": 0.5,
}  # fmt: skip
NEVER = 3600.0
ANSWERED = {"client_error", "prefill_error", "prefill_busy", "prefill_forbidden", "prefill_garbage"}

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


class FakePeer:
    """A prefill pod: real HTTP, scripted faults. ``act`` handles a leg; the default computes for ``seconds``."""

    def __init__(self, engine: FakeEngine, name: str) -> None:
        self.engine = engine
        self.name = name
        self.engine_id = f"engine-{name}"
        self.act: Callable[[FakePeer, web.Request, Json], Awaitable[web.StreamResponse]] = FakePeer.compute
        self.seconds = 0.02
        self.legs: list[Json] = []
        self.headers: list[dict[str, str]] = []
        self.aborted = 0
        self.silent = False
        self.changes: Json = {}
        self.raw_identity: bytes | None = None
        self.address = ""
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self) -> None:
        """Listens; a second start uses the same port."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/prebook/v1/identity", self._identity)
        app.router.add_post("/v1/{rest:.*}", self._leg)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.address = f"127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Goes away at once: open connections are reset, new ones refused."""
        if self._runner is not None:
            server = self._runner.server
            assert server is not None
            for connection in list(server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await self._runner.cleanup()
        self._runner = None

    def identity(self) -> Json:
        """What ``/prebook/v1/identity`` says."""
        return {
            "version": 1, "role": "prefill", "engine_id": self.engine_id,
            "side_channel": {"host": "127.0.0.1", "port": 5600}, "tp_size": 1, "pp_size": 1, "dp_size": 1,
            "revision": "r1", "compat_hash": None, "mode": "prebook", "vllm_version": vllm_version(),
            "served_model": "m", "draining": False, "load": {"legs": 0, "tokens": 0}, **self.changes,
        }  # fmt: skip

    async def _identity(self, request: web.Request) -> web.Response:
        if self.silent:
            await asyncio.sleep(NEVER)
        raw = self.raw_identity if self.raw_identity is not None else json.dumps(self.identity()).encode()
        return web.Response(body=raw, content_type="application/json")

    async def _leg(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.engine.events.append((time.monotonic(), "prefill leg"))
        self.legs.append(body)
        self.headers.append({key.lower(): value for key, value in request.headers.items()})
        try:
            return await self.act(self, request, body)
        except asyncio.CancelledError:
            self.aborted += 1
            raise

    async def compute(self, request: web.Request, body: Json) -> web.StreamResponse:
        """Computes, delivers the KV, answers like vLLM."""
        return await self._compute(body, deliver=True)

    async def forget(self, request: web.Request, body: Json) -> web.StreamResponse:
        """Computes and answers, but the KV never leaves."""
        return await self._compute(body, deliver=False)

    async def _compute(self, body: Json, *, deliver: bool) -> web.StreamResponse:
        await asyncio.sleep(self.seconds)
        key = str(body["kv_transfer_params"]["transfer_id"])
        request_id = self.headers[-1]["x-request-id"]
        for name in (key, f"cmpl-{request_id}-0", f"chatcmpl-{request_id}", f"pulled-{request_id}"):
            if deliver:
                self.engine.event(name).set()
        params = {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": self.engine_id, "remote_request_id": f"pulled-{request_id}", "remote_host": "127.0.0.1",
            "remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 200,
        }  # fmt: skip
        return web.json_response({"choices": [{"text": "x"}], "kv_transfer_params": params})

    async def hang(self, request: web.Request, body: Json) -> web.StreamResponse:
        """Never answers."""
        await asyncio.sleep(NEVER)
        raise AssertionError

    async def reset(self, request: web.Request, body: Json) -> web.StreamResponse:
        """Breaks the connection in the middle of the leg."""
        await asyncio.sleep(self.seconds)
        assert request.transport is not None
        request.transport.abort()
        await asyncio.sleep(NEVER)
        raise AssertionError

    def answering(self, status: int, body: bytes = b'{"error":{"message":"no"}}') -> None:
        """Makes every leg end with this answer."""

        async def act(peer: FakePeer, request: web.Request, leg: Json) -> web.StreamResponse:
            await asyncio.sleep(peer.seconds)
            return web.Response(status=status, body=body, content_type="application/json")

        self.act = act


@dataclass
class FakeConnector:
    """The worker's control socket of this pod."""

    engine: FakeEngine
    folder: Path
    pair_state: str = "ready"
    peers: list[Json] = field(default_factory=list)
    lists: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)
    deaf: bool = False
    refuses_fail: bool = False
    draining: bool = False
    busy: int = 0
    compat_hash: str | None = None
    held: bool = True
    offered: list[tuple[str, int]] = field(default_factory=list)
    overrides: dict[str, Json] = field(default_factory=dict)
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def start(self) -> None:
        """Opens the socket."""
        path = self.folder / "worker-0-0-0.sock"
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(path))

    async def stop(self) -> None:
        """Closes the socket and every connection."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()
        (self.folder / "worker-0-0-0.sock").unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            while line := await reader.readline():
                request = json.loads(line)
                if not self.deaf:
                    writer.write(json.dumps(self._answer(request)).encode() + b"\n")

    def _answer(self, request: Json) -> Json:
        if request["op"] == "peers":
            self.peers, self.lists = request["peers"], self.lists + 1
        elif request["op"] == "status":
            pairs = {peer["engine_id"]: {"state": self.pair_state, "error": None} for peer in self.peers}
            return {"ok": True, "kind": "worker", "engine_id": "engine-here", "pairs": {**pairs, **self.overrides},
                    "transfers": {"booked": self.busy, "pushing": 0, "quarantined_blocks": 0},
                    "compat_hash": self.compat_hash, "draining": self.draining}  # fmt: skip
        elif request["op"] == "fail":
            if self.refuses_fail:
                return {"ok": False, "error": "unknown transfer"}
            self.failed.append((request["transfer_id"], request["reason"]))
            if request["transfer_id"] not in self.engine.arrived:
                return {"ok": True}  # not booked yet: forgotten
            if request["reason"] in ANSWERED:  # the peer is alive: it acknowledges, and the engine recomputes
                asyncio.get_running_loop().call_later(0.05, self.engine.event(request["transfer_id"]).set)
            else:
                self.states[request["transfer_id"]] = "quarantined"
        elif request["op"] == "transfer":
            transfer = request["transfer_id"]
            state = self.states.get(transfer)
            if state is None and transfer in self.engine.arrived:
                state = "committed" if self.engine.arrived[transfer].is_set() else "booked"
            return {"ok": True, "known": state is not None, "state": state, "bytes": 4096, "lead_s": 0.5}
        elif request["op"] == "first_token":
            self.offered.append((request["transfer_id"], request["token"]))
            return {"ok": True, "held": self.held}
        elif request["op"] == "drain":
            self.draining = True
        return {"ok": True}


@dataclass
class Rig:
    """Everything of one test."""

    middleware: DispatchMiddleware
    engine: FakeEngine
    peers: list[FakePeer]
    connector: FakeConnector | None
    settings: Settings
    folder: Path

    def call(self, body: Json | bytes | None = None, *, path: str = "/v1/completions", **options: Any) -> Call:
        """Starts a request."""
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        return Call(self.middleware, path, raw, owner=self.engine, **options)

    async def get(self, path: str) -> Call:
        """A finished GET."""
        return await self.call(None, path=path, method="GET").finish()

    async def status(self) -> Json:
        """The status document."""
        return (await self.get("/prebook/v1/status")).json()

    async def wait_pairs(self, ready: int, seconds: float = 20.0) -> None:
        """Waits until that many pairs are ready."""
        await until(lambda: self._ready() == ready, seconds)

    def _ready(self) -> int:
        return self.middleware._discovery.table.count()[0]

    def set_peers(self, *peers: FakePeer) -> None:
        """Rewrites the file that discovery reads."""
        (self.folder / "peers.json").write_text(json.dumps([peer.address for peer in peers]))


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Polls until true; fails otherwise."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "still not true"
        await asyncio.sleep(0.01)


def request(**changes: Any) -> Json:
    """A completion with a prompt that is worth a transfer."""
    return {"model": "m", "prompt": LONG, "max_tokens": 5, **changes}


@contextlib.asynccontextmanager
async def rig(folder: Path, *, peers: int = 1, mode: str = "prebook", role: str = "decode", ready: bool = True,
              **changes: Any) -> AsyncIterator[Rig]:  # fmt: skip
    """A started pod with ``peers`` fake prefill pods."""
    (folder / "token").write_text(TOKEN + "\n")
    engine = FakeEngine()
    fakes = [FakePeer(engine, str(index)) for index in range(peers)]
    for fake in fakes:
        fake.changes = {"mode": mode, "role": "prefill" if role == "decode" else "decode"}
        await fake.start()
    settings = Settings.model_validate({
        "role": role, "mode": mode, "peers": f"file://{folder}/peers.json", "token_file": str(folder / "token"),
        "revision": "r1", "control_dir": str(folder), "local_prefill_max_tokens": 64, "lease_seconds": 1.0,
        "side_channel_host": "127.0.0.1", "served_model": "m", "bind": "127.0.0.1:1", **changes,
        "timing": {**FAST, **changes.get("timing", {})},
    })  # fmt: skip
    connector = FakeConnector(engine, folder) if mode == "prebook" else None
    if connector is not None:
        await connector.start()
    pod = Rig(DispatchMiddleware(engine, settings=settings), engine, fakes, connector, settings, folder)
    pod.set_peers(*fakes)
    await pod.get("/prebook/v1/identity")
    try:
        if ready:
            await pod.wait_pairs(peers)
        yield pod
    finally:
        await pod.middleware._stop()
        for fake in fakes:
            await fake.stop()
        if connector is not None:
            await connector.stop()
