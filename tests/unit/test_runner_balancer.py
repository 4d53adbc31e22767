"""The front Service: choice of a backend, refusals, streams, departures. Real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from prebook_operator.local.balancer import Backend, Balancer
from prebook_operator.local.errors import MachineError
from prebook_operator.local.kube import ServicePort
from prebook_operator.local.services import PeersFiles, selected, target_port
from prebook_operator.local.workload import build_workload
from tests.unit.runner_support import free_port, front_service, stateful_set

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def backend(serve: Serve) -> tuple[asyncio.Server, Backend]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    return server, (host, port)


def echo(name: str, *, hold: asyncio.Event | None = None) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(f"{name}\n".encode())
        await writer.drain()
        if hold is not None:
            await hold.wait()
        writer.close()

    return serve


async def front(*backends: Backend) -> Balancer:
    balancer = Balancer(host="127.0.0.1", port=0, backends=lambda: list(backends))
    await balancer.start()
    return balancer


async def ask(balancer: Balancer) -> str:
    reader, writer = await asyncio.open_connection(balancer.host, balancer.port)
    writer.write(b"hello\n")
    line = await reader.readline()
    writer.close()
    return line.decode().strip()


async def test_idle_backends_take_turns() -> None:
    (one, first), (two, second) = await backend(echo("one")), await backend(echo("two"))
    balancer = await front(first, second)
    assert sorted([await ask(balancer) for _ in range(4)]) == ["one", "one", "two", "two"]
    await balancer.stop()
    one.close()
    two.close()


async def test_fewest_open_connections_win() -> None:
    hold = asyncio.Event()
    (one, first), (two, second) = await backend(echo("one", hold=hold)), await backend(echo("two"))
    balancer = await front(first, second)
    reader, writer = await asyncio.open_connection(balancer.host, balancer.port)
    writer.write(b"x\n")
    assert await reader.readline() == b"one\n"  # and stays open
    assert [await ask(balancer) for _ in range(3)] == ["two"] * 3
    hold.set()
    writer.close()
    await balancer.stop()
    one.close()
    two.close()


async def test_backend_that_refuses_is_skipped() -> None:
    one, first = await backend(echo("one"))
    balancer = await front(("127.0.0.1", free_port()), first)
    assert [await ask(balancer) for _ in range(3)] == ["one"] * 3
    await balancer.stop()
    one.close()


async def test_nothing_ready_is_said_in_the_apis_words() -> None:
    balancer = await front()
    reader, writer = await asyncio.open_connection(balancer.host, balancer.port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert json.loads(body)["error"]["message"] == "no decode pod is ready"
    writer.close()
    await balancer.stop()


async def test_client_that_leaves_takes_its_upstream_connection_along() -> None:
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        await reader.read()  # the end of the request's side
        gone.set()
        writer.close()

    server, address = await backend(serve)
    balancer = await front(address)
    _, writer = await asyncio.open_connection(balancer.host, balancer.port)
    writer.write(b"x\n")
    await writer.drain()
    await asyncio.sleep(0.1)
    writer.close()
    await asyncio.wait_for(gone.wait(), 5)
    await balancer.stop()
    server.close()


async def test_pieces_of_an_answer_are_passed_on_as_they_come() -> None:
    following = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"first\n")
        await following.wait()
        writer.write(b"second\n")
        writer.close()

    server, address = await backend(serve)
    balancer = await front(address)
    reader, writer = await asyncio.open_connection(balancer.host, balancer.port)
    writer.write(b"x\n")
    assert await asyncio.wait_for(reader.readline(), 5) == b"first\n"
    following.set()
    assert await asyncio.wait_for(reader.readline(), 5) == b"second\n"
    writer.close()
    await balancer.stop()
    server.close()


async def test_stop_ends_open_connections() -> None:
    server, address = await backend(echo("one", hold=asyncio.Event()))
    balancer = await front(address)
    reader, writer = await asyncio.open_connection(balancer.host, balancer.port)
    writer.write(b"x\n")
    await reader.readline()
    await balancer.stop()
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    server.close()


async def test_port_in_use_is_a_message() -> None:
    balancer = await front()
    other = Balancer(host="127.0.0.1", port=balancer.port, backends=list)
    with pytest.raises(MachineError, match=rf"port {balancer.port} of 127\.0\.0\.1 is in use"):
        await other.start()
    await balancer.stop()


def test_selector_and_target_port() -> None:
    workload = build_workload([front_service(), stateful_set("decode"), stateful_set("prefill")], new_token=lambda: "t")
    decode, prefill = workload.pods
    assert selected(workload.front, labels=decode.labels)
    assert not selected(workload.front, labels=prefill.labels)
    assert target_port(workload.front.spec.ports[0], pod=decode) == 8000
    assert target_port(ServicePort(port=80, target_port="9000"), pod=decode) == 9000
    assert target_port(ServicePort(port=80), pod=decode) == 80


def test_peers_file_exists_from_the_start_and_is_only_replaced_on_change(tmp_path: Path) -> None:
    peers = PeersFiles(tmp_path)
    path = Path(peers.source("fake-prefill", 8000).removeprefix("file://"))
    assert json.loads(path.read_text()) == []
    assert peers.update("fake-prefill", addresses=["127.0.0.3", "127.0.0.2"])
    assert json.loads(path.read_text()) == ["127.0.0.2:8000", "127.0.0.3:8000"]
    inode = path.stat().st_ino
    assert not peers.update("fake-prefill", addresses=["127.0.0.2", "127.0.0.3"])
    assert path.stat().st_ino == inode
    assert [entry.name for entry in tmp_path.iterdir()] == ["fake-prefill.json"]
