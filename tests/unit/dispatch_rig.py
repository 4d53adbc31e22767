"""A decode pod without an engine: the real middleware, a fake app behind it, real HTTP peers, a real control socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prebook_connector.dispatch.asgi import DispatchMiddleware
from prebook_connector.dispatch.settings import Settings
from tests.unit.dispatch_engine import Call, FakeEngine, Json
from tests.unit.dispatch_peers import FakeConnector, FakePeer

LONG = list(range(200))
TOKEN = "s3cret"
FAST = {
    "connect": 0.5, "prefill": 5.0, "first_byte": 5.0, "body": 1.0, "poll": 0.05, "poll_steady": 0.05,
    "poll_timeout": 0.2, "lost_after": 0.5, "control": 0.5, "abandoned": 0.5, "forget_after": 0.5,
}  # fmt: skip


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
