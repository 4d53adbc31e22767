"""Sources of addresses, identity polls, and the control socket to the connector."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from prebook_connector.dispatch.addresses import is_address
from prebook_connector.dispatch.control import Control, ControlError, Link, merge_accounts, merge_pairs
from prebook_connector.dispatch.peertable import Pair
from prebook_connector.dispatch.sources import DnsSource, FileSource, SourceError, open_source
from tests.unit.dispatch_peers import FakePeer
from tests.unit.dispatch_rig import request, rig, until


@pytest.mark.parametrize(
    ("text", "fine"),
    [("a:1", True), ("10.0.0.1:8000", True), ("[fd00::1]:8000", True), ("a", False), ("a:0", False), ("a:70000", False),
     ("a b:1", False), ("http://a:1", False), ("fd00::1:80", False), ("a:1/x", False), ("", False)],
)  # fmt: skip
def test_addresses(text: str, fine: bool) -> None:
    assert is_address(text) is fine


@pytest.mark.parametrize("text", ["", "a:1", "http:///a:1", "dns:///", "dns:///a", "static:///a:1,b", "dns://a:1"])
def test_sources_that_do_not_exist(text: str) -> None:
    with pytest.raises(ValueError, match="peers"):
        open_source(text, resolve_interval=1)


async def test_static_and_file_sources(tmp_path: Path) -> None:
    assert await open_source("static:///a:1, b:2", resolve_interval=1).read() == ["a:1", "b:2"]
    path = tmp_path / "peers.json"
    source = open_source(f"file://{path}", resolve_interval=1)
    assert isinstance(source, FileSource)
    assert await source.read() == []
    path.write_text('["a:1", "a:1", "b:2"]')
    assert await source.read() == ["a:1", "b:2"]
    for wrong in ("{", '{"a":1}', "[1]", '["nope"]', "[" * 100_000):
        path.write_text(wrong)
        with pytest.raises(SourceError):
            await source.read()
    path.write_text("[]")
    assert await source.read() == []


async def test_dns_source() -> None:
    answers: list[list[str] | Exception] = [["10.0.0.2", "10.0.0.1", "10.0.0.2"], ["fd00::1"], [], OSError("no name")]

    async def lookup(host: str, port: int) -> list[str]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    source = DnsSource("m.ns.svc", 8000, interval=1, lookup=lookup)
    assert await source.read() == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert await source.read() == ["[fd00::1]:8000"]
    for _ in range(2):
        with pytest.raises(SourceError, match=r"m\.ns\.svc"):
            await source.read()
    real = open_source("dns:///localhost:8000", resolve_interval=1)
    assert "127.0.0.1:8000" in await real.read()


async def test_broken_source_keeps_the_last_peers_for_a_while(tmp_path: Path) -> None:
    async with rig(tmp_path, timing={"forget_after": 1.5}) as pod:
        (tmp_path / "peers.json").write_text("{broken")
        await asyncio.sleep(0.8)
        assert pod._ready() == 1
        await until(lambda: pod.middleware._discovery.table.peers() == [], 4)
        pod.set_peers(*pod.peers)
        await pod.wait_pairs(1)


async def test_peers_come_and_go(tmp_path: Path) -> None:
    async with rig(tmp_path, peers=2) as pod:
        assert pod.connector is not None
        connector = pod.connector
        assert sorted(peer["engine_id"] for peer in connector.peers) == ["engine-0", "engine-1"]
        assert connector.peers[0].keys() == {
            "engine_id", "host", "port", "tp_size", "pp_size", "dp_rank", "role", "address"}  # fmt: skip
        pod.set_peers(pod.peers[1])
        await until(lambda: [peer["engine_id"] for peer in connector.peers] == ["engine-1"])
        lists = connector.lists
        await asyncio.sleep(0.3)
        assert connector.lists == lists, "nothing is sent while nothing changes"


async def test_one_dead_peer_delays_nobody(tmp_path: Path) -> None:
    async with rig(tmp_path, peers=2, ready=False) as pod:
        pod.peers[0].silent = True
        began = time.monotonic()
        await pod.wait_pairs(1)
        assert time.monotonic() - began < 2
        call = await pod.call(request()).finish()
        assert call.status == 200
        assert len(pod.peers[1].legs) == 1


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b"not json", b"x" * (1 << 20), b'{"version": 1}', b"[" * 50_000, b"\xff\xfe"])  # fmt: skip
async def test_garbage_identity(tmp_path: Path, raw: bytes) -> None:
    async with rig(tmp_path, ready=False) as pod:
        pod.peers[0].raw_identity = raw
        await until(lambda: any(peer.error for peer in pod.middleware._discovery.table.peers()))
        peers = (await pod.status())["pairs"]["peers"]
        assert peers[0]["state"] == "incompatible"
        assert len(peers[0]["error"]) < 200
        pod.peers[0].raw_identity = None
        await pod.wait_pairs(1)


async def test_wrong_revision_is_shown_and_never_used(tmp_path: Path) -> None:
    async with rig(tmp_path, ready=False) as pod:
        pod.peers[0].changes["revision"] = "r2"
        await until(lambda: any(peer.error for peer in pod.middleware._discovery.table.peers()))
        call = await pod.call(request()).finish()
        assert call.headers["x-prebook-local"] == "no_ready_peer"
        assert pod.peers[0].legs == []
        assert "revision" in (await pod.status())["pairs"]["peers"][0]["error"]


async def test_compat_hash_of_the_own_engine_separates(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        assert pod.connector is not None
        pod.peers[0].changes["compat_hash"] = "theirs"
        pod.connector.compat_hash = "ours"
        await pod.wait_pairs(0)
        assert (await pod.get("/prebook/v1/identity")).json()["compat_hash"] == "ours"
        pod.peers[0].changes["compat_hash"] = "ours"
        await pod.wait_pairs(1)


async def test_connector_that_restarts_is_told_again(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        assert pod.connector is not None
        connector = pod.connector
        await connector.stop()
        await pod.wait_pairs(0)
        connector.peers = []
        await connector.start()
        await until(lambda: len(connector.peers) == 1)
        await pod.wait_pairs(1)


async def test_deaf_connector_costs_pairs_but_no_request(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        assert pod.connector is not None
        pod.connector.deaf = True
        await pod.wait_pairs(0, 12)
        call = await pod.call(request()).finish()
        assert call.headers["x-prebook-local"] == "no_ready_peer"


@pytest.mark.parametrize(
    "answer",
    [b"nonsense\n", b"[]\n", b'{"ok":false,"error":"no"}\n', b"", b"x" * (5 << 20), b'{"ok":true',
     b"[" * 99_999 + b"\n"],
)  # fmt: skip
async def test_garbage_on_the_control_socket(tmp_path: Path, answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    path = tmp_path / "worker-0-0-0.sock"
    server = await asyncio.start_unix_server(serve, str(path))
    link = Link(path, timeout=0.5)
    with pytest.raises(ControlError) as caught:
        await link.call({"op": "status"})
    assert len(str(caught.value)) < 500
    server.close()


def test_merged_pairs_need_every_worker() -> None:
    ready = {"pairs": {"e": {"state": "ready"}}}
    connecting = {"pairs": {"e": {"state": "connecting"}}}
    failed = {"pairs": {"e": {"state": "failed", "error": "x"}}}
    assert merge_pairs([ready, ready], expected=2) == {"e": Pair("ready")}
    assert merge_pairs([ready], expected=2) == {"e": Pair("connecting")}
    assert merge_pairs([ready, {"pairs": {}}], expected=2) == {"e": Pair("connecting")}
    assert merge_pairs([ready, connecting], expected=2) == {"e": Pair("connecting")}
    assert merge_pairs([ready, failed], expected=2) == {"e": Pair("failed", "x")}
    assert merge_pairs([{"pairs": "x"}, {}, {"pairs": {"e": 1}}], expected=1) == {}


def test_merged_accounts() -> None:
    one = {"ok": True, "known": True, "state": "committed", "bytes": 10, "lead_s": 1.0, "exposed_s": 0.1, "tokens": 5}
    two = {**one, "bytes": 20, "lead_s": 0.5, "exposed_s": 0.3}
    assert merge_accounts([one, two]) == {
        "state": "committed", "bytes": 30, "lead_s": 0.5, "exposed_s": 0.3, "tokens": 5}  # fmt: skip
    assert (merge_accounts([one, {**two, "state": "booked"}]) or {})["state"] == "booked"
    assert merge_accounts([]) is None


async def test_two_workers_are_both_asked(tmp_path: Path) -> None:
    async with rig(tmp_path, tp_size=2, ready=False) as pod:
        assert pod.connector is not None
        pod.peers[0].changes["tp_size"] = 2
        await asyncio.sleep(0.6)
        assert pod._ready() == 0, "one of two workers has not spoken"
        second = tmp_path / "worker-0-0-1.sock"
        server = await asyncio.start_unix_server(pod.connector._serve, str(second))
        await pod.wait_pairs(1)
        control = pod.middleware._control
        assert isinstance(control, Control)
        assert await control.fail("t", "reason")
        assert pod.connector.failed == [("t", "reason"), ("t", "reason")]
        server.close()


async def test_peer_that_moves_to_another_engine_while_idle(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        fresh = FakePeer(pod.engine, "next")
        fresh.changes = dict(pod.peers[0].changes)
        await pod.peers[0].stop()
        await pod.wait_pairs(0)
        fresh._port = pod.peers[0]._port
        await fresh.start()
        pod.peers.append(fresh)
        await pod.wait_pairs(1)
        await pod.call(request()).finish()
        assert json.loads(json.dumps(fresh.legs))
