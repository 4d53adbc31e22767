"""A pod's own side: legs that arrive at prefill, the /prebook/v1 paths, readiness, drain, life and death."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from prebook_connector import dispatch, drain
from prebook_connector.dispatch.asgi import DispatchMiddleware
from prebook_connector.dispatch.settings import SettingsError
from tests.unit.dispatch_engine import Call
from tests.unit.dispatch_peers import FakePeer
from tests.unit.dispatch_rig import TOKEN, request, rig, until

LEG = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t1"}}


@pytest.mark.parametrize(
    ("token", "body", "status"),
    [
        (None, LEG, 403), ("wrong", LEG, 403), ("", LEG, 403), (TOKEN, LEG, 200),
        (TOKEN, {}, 400), (TOKEN, {"kv_transfer_params": {"do_remote_prefill": True}}, 400),
        (TOKEN, {"kv_transfer_params": "x"}, 400), (TOKEN, {"kv_transfer_params": {"do_remote_decode": True,
                                                                                   "transfer_id": [1]}}, 400),
        (None, {"kv_transfer_params": {"do_remote_prefill": True}}, 403), (None, {}, 200), ("wrong", {}, 403),
        (None, {"vllm_xargs": {"kv_transfer_params": "x"}}, 403),
    ],
)  # fmt: skip
async def test_which_requests_a_prefill_pod_serves(
    tmp_path: Path, token: str | None, body: dict[str, Any], status: int
) -> None:
    async with rig(tmp_path, role="prefill", peers=0) as pod:
        headers = {} if token is None else {"x-prebook-token": token}
        call = await pod.call(request(**body), headers=headers).finish()
        assert call.status == status
        assert len(pod.engine.legs) == (status == 200)
        if status != 200:
            assert call.json()["error"]["code"] == status
        else:
            assert "x-prebook-token" not in pod.engine.legs[0].headers


async def test_params_elsewhere_than_completions_need_the_token_too(tmp_path: Path) -> None:
    async with rig(tmp_path, role="prefill", peers=0) as pod:
        for path in ("/v1/responses", "/inference/v1/generate", "/invocations", "/v1/completions/"):
            assert (await pod.call(LEG, path=path).finish()).status == 403
        await pod.call(b"{nope").finish()
        assert pod.engine.legs[0].raw == b"{nope"


async def test_without_a_token_file_no_leg_is_accepted(tmp_path: Path) -> None:
    async with rig(tmp_path, role="prefill", peers=0, token_file=str(tmp_path / "none")) as pod:
        for token in ("", "x"):
            assert (await pod.call(request(**LEG), headers={"x-prebook-token": token}).finish()).status == 403
        assert (await pod.call(request()).finish()).status == 200


@pytest.mark.parametrize(
    ("body", "headers"), [(LEG, {"x-prebook-token": TOKEN}), ({"max_tokens": 1}, {})], ids=["leg", "relayed"]
)
async def test_load_is_in_the_identity(tmp_path: Path, body: dict[str, Any], headers: dict[str, str]) -> None:
    async with rig(tmp_path, role="prefill", peers=0) as pod:
        gate = asyncio.Event()

        async def wait(leg: Any, send: Any) -> None:
            await gate.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}", "more_body": False})

        pod.engine.answer = wait
        calls = [pod.call(request(**body), headers=headers) for _ in range(2)]
        await until(lambda: len(pod.engine.legs) == 2)
        assert (await pod.get("/prebook/v1/identity")).json()["load"] == {"legs": 2, "tokens": 400}
        gate.set()
        for call in calls:
            await call.finish()
        assert (await pod.get("/prebook/v1/identity")).json()["load"] == {"legs": 0, "tokens": 0}


async def test_identity_and_status(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        identity = (await pod.get("/prebook/v1/identity")).json()
        assert {key: identity[key] for key in ("version", "role", "engine_id", "side_channel", "mode", "revision")} == {
            "version": 1, "role": "decode", "engine_id": "engine-here", "mode": "prebook", "revision": "r1",
            "side_channel": {"host": "127.0.0.1", "port": 5600},
        }  # fmt: skip
        call = await pod.call(request()).finish()
        await pod.call(request(n=2)).finish()
        transfer = call.headers["x-prebook-transfer"]
        await until(lambda: bool(pod.middleware._accounts))
        status = await pod.status()
        assert status["pairs"]["ready"] == status["pairs"]["possible"] == 1
        assert status["requests"] == {
            "remote": 1, "local": {"several_choices": 1}, "relayed": 0, "failed_over": 0, "retried": 0}  # fmt: skip
        account = status["last_transfers"][-1]
        assert (account["transfer_id"], account["bytes"], account["state"]) == (transfer, 4096, "committed")
        assert account["prefill_leg_s"] > 0
        one = (await pod.get(f"/prebook/v1/transfers/{transfer}")).json()
        assert one == account
        assert (await pod.get("/prebook/v1/transfers/nobody")).status == 404
        assert (await pod.get("/prebook/v1/other")).status == 404
        value = REGISTRY.get_sample_value("prebook_dispatch_peers", {"state": "ready"})
        assert value == 1


async def test_only_the_last_accounts_are_kept(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        for _ in range(20):
            await pod.call(request()).finish()
        await until(lambda: len(pod.middleware._accounts) == 16)
        assert len((await pod.status())["last_transfers"]) == 16


async def test_readiness_of_decode_and_prefill(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        assert (await pod.get("/prebook/v1/ready")).json() == {"ready": True, "reason": "1 of 1 pairs are ready"}
        pod.engine.healthy = False
        unhealthy = await pod.get("/prebook/v1/ready")
        assert (unhealthy.status, unhealthy.json()["reason"]) == (503, "the engine is not healthy")
        pod.engine.healthy = True
        await pod.peers[0].stop()
        await pod.wait_pairs(0)
        alone = await pod.get("/prebook/v1/ready")
        assert alone.status == 200
        assert "prefilled here" in alone.json()["reason"]


async def test_engine_that_is_not_up_has_no_identity(tmp_path: Path) -> None:
    async with rig(tmp_path, peers=1, ready=False) as pod:
        pod.engine.state.vllm_config.kv_transfer_config.engine_id = None
        assert (await pod.get("/prebook/v1/identity")).status == 503


async def test_drain_of_decode_waits_for_requests_and_transfers(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        assert pod.connector is not None
        pod.engine.tokens, pod.engine.pace = 10, 0.05
        pod.connector.busy = 1
        stream = pod.call(request(stream=True))
        await until(lambda: len(stream.messages) > 2)
        token = {"x-prebook-token": TOKEN}
        draining = pod.call(b"", path="/prebook/v1/drain", headers=token, query="timeout=5")
        await until(lambda: pod.connector is not None and pod.connector.draining)
        assert (await pod.get("/prebook/v1/ready")).status == 503
        assert (await pod.get("/prebook/v1/identity")).json()["draining"] is True
        late = await pod.call(request()).finish()
        assert late.headers["x-prebook-local"] == "draining"
        await stream.finish()
        await asyncio.sleep(0.4)
        assert not draining.task.done(), "a transfer is still booked"
        pod.connector.busy = 0
        await draining.finish(3)
        assert draining.json()["drained"] is True
        assert stream.content.endswith(b"[DONE]\n\n")


async def test_drain_of_prefill_refuses_legs_which_go_elsewhere(tmp_path: Path) -> None:
    async with rig(tmp_path, role="prefill", peers=0) as pod:
        token = {"x-prebook-token": TOKEN}
        done = await pod.call(b"", path="/prebook/v1/drain", headers=token).finish()
        assert done.json()["drained"] is True
        leg = await pod.call(request(**LEG), headers=token).finish()
        assert (leg.status, leg.json()["error"]["type"]) == (503, "ServiceUnavailableError")


async def test_draining_peer_gets_no_legs(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        pod.peers[0].changes["draining"] = True
        await pod.wait_pairs(0)
        call = await pod.call(request()).finish()
        assert call.headers["x-prebook-local"] == "no_ready_peer"


async def test_drain_needs_the_token_and_a_sane_timeout(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        assert (await pod.call(b"", path="/prebook/v1/drain").finish()).status == 403
        token = {"x-prebook-token": TOKEN}
        for query in ("timeout=x", "timeout=-1", "timeout=nan", "timeout=inf"):
            wrong = await pod.call(b"", path="/prebook/v1/drain", headers=token, query=query).finish()
            assert wrong.status == 400
        assert not (await pod.status())["draining"]
        assert pod.connector is not None
        pod.connector.busy = 3
        late = await pod.call(b"", path="/prebook/v1/drain", headers=token, query="timeout=0.3").finish(3)
        assert late.json()["drained"] is False


async def test_lifespan_starts_and_stops_everything(tmp_path: Path) -> None:
    async with rig(tmp_path, ready=False) as pod:
        middleware = DispatchMiddleware(pod.engine, settings=pod.settings)
        incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        outgoing: asyncio.Queue[Any] = asyncio.Queue()
        life = asyncio.create_task(
            middleware({"type": "lifespan", "app": pod.engine}, incoming.get, outgoing.put))  # fmt: skip
        await incoming.put({"type": "lifespan.startup"})
        assert (await outgoing.get())["type"] == "lifespan.startup.complete"
        await until(lambda: middleware._discovery.table.count()[0] == 1)
        await incoming.put({"type": "lifespan.shutdown"})
        await asyncio.wait_for(life, 3)
        assert all(task.done() for task in middleware._loops)
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert sum("prebook-poll" in name for name in names) == 1, "only the rig's own middleware polls"


async def test_server_that_shuts_down_cancels_both_legs(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        pod.peers[0].act = FakePeer.hang
        call = pod.call(request())
        await until(lambda: bool(pod.peers[0].legs))
        call.task.cancel()
        await asyncio.gather(call.task, return_exceptions=True)
        await until(lambda: pod.peers[0].aborted == 1 and pod.engine.legs[0].aborted)


async def test_exceptions_of_the_application_stay_its_own(tmp_path: Path) -> None:
    async with rig(tmp_path, on_failure="fail") as pod:

        async def burst(leg: Any, send: Any) -> None:
            raise ZeroDivisionError

        pod.engine.answer = burst
        for body in (request(), request(prompt=[1])):
            with pytest.raises(ZeroDivisionError):
                await pod.call(body).finish()
        assert (await pod.status())["in_flight"]["requests"] == 0


def test_settings_are_checked_when_vllm_looks_the_class_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PREBOOK_DISPATCH", raising=False)
    with pytest.raises(SettingsError, match="PREBOOK_DISPATCH"):
        _ = dispatch.DispatchMiddleware
    monkeypatch.setenv("PREBOOK_DISPATCH", hook("a:1", tmp_path)["PREBOOK_DISPATCH"])
    assert dispatch.DispatchMiddleware is DispatchMiddleware


# -- the preStop hook


@contextmanager
def server(answer: Any) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    seen: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append((self.path, self.headers.get("x-prebook-token")))
            status, body = answer
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            return None

    http = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{http.server_port}", seen
    finally:
        http.shutdown()
        http.server_close()


def hook(bind: str, folder: Path, role: str = "prefill") -> dict[str, str]:
    (folder / "token").write_text(TOKEN)
    return {"PREBOOK_DISPATCH": json.dumps({
        "role": role, "peers": "static:///a:1", "token_file": str(folder / "token"), "bind": bind,
        "side_channel_host": "10.0.0.1"})}  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "status"),
    [((200, b'{"drained":true}'), 0), ((200, b'{"drained":false}'), 1), ((200, b"[]"), 1), ((200, b"x"), 2),
     ((403, b"{}"), 2), ((500, b"{}"), 2)],
)  # fmt: skip
def test_hook_reports_what_it_was_told(tmp_path: Path, answer: tuple[int, bytes], status: int) -> None:
    with server(answer) as (bind, seen):
        assert drain.main(["--timeout", "7"], environment=hook(bind, tmp_path)) == status
        assert seen == [("/prebook/v1/drain?timeout=7.0", TOKEN)]


def test_hook_lets_decode_settle_first(tmp_path: Path) -> None:
    slept: list[float] = []
    with server((200, b'{"drained":true}')) as (bind, seen):
        environment = hook(bind, tmp_path, "decode")
        assert drain.main(["--timeout", "10", "--settle", "3"], environment=environment, sleep=slept.append) == 0
        assert (slept, seen[0][0]) == ([3.0], "/prebook/v1/drain?timeout=7.0")


def test_hook_without_a_server_or_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert drain.main([], environment=hook("127.0.0.1:9", tmp_path)) == 0
    assert "nothing to drain" in capsys.readouterr().out
    assert drain.main([], environment={}) == 2
    assert "PREBOOK_DISPATCH" in capsys.readouterr().err


async def test_hook_against_the_real_endpoint(tmp_path: Path) -> None:
    """The hook's own request, answered by the real middleware behind a real socket."""
    from aiohttp import web

    async with rig(tmp_path, role="prefill", peers=0) as pod:

        async def handle(req: web.Request) -> web.Response:
            call = await Call(pod.middleware, req.path, await req.read(), owner=pod.engine, query=req.query_string,
                              headers={key.lower(): value for key, value in req.headers.items()}).finish()  # fmt: skip
            return web.Response(status=call.status, body=call.content)

        app = web.Application()
        app.router.add_post("/{rest:.*}", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        environment = hook(f"127.0.0.1:{port}", tmp_path)
        assert await asyncio.to_thread(drain.main, ["--timeout", "3"], environment=environment) == 0
        await runner.cleanup()
        assert (await pod.status())["draining"]
