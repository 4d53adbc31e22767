"""What a decode pod talks to: fake prefill pods over real HTTP, and a fake connector on a real control socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from prebook_connector.dispatch.probe import vllm_version
from tests.unit.dispatch_engine import FakeEngine, Json

NEVER = 3600.0
ANSWERED = {"client_error", "prefill_error", "prefill_busy", "prefill_forbidden", "prefill_garbage"}


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
    account: Json = field(default_factory=lambda: {"bytes": 4096, "lead_s": 0.5})
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
            return {"ok": True, "known": state is not None, "state": state, **self.account}
        elif request["op"] == "first_token":
            self.offered.append((request["transfer_id"], request["token"]))
            return {"ok": True, "held": self.held}
        elif request["op"] == "drain":
            self.draining = True
        return {"ok": True}
