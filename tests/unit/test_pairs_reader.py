"""What pods say is read with care: bounded, with a time limit, and total for any answer."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from prebook_operator.pairs import ANSWER_LIMIT, MAX_PODS, HttpPairsReader, PodPairs, parse
from prebook_operator.records import PodRecord


def pod(name: str = "p", uid: str = "u", ip: str = "127.0.0.1") -> PodRecord:
    return PodRecord(name, uid, 1, "set", "decode", "r", ip, True, True, True, False, "", "", 0)


class Engine:
    """A pod's HTTP server."""

    def __init__(self) -> None:
        self.answer: web.Response | None = None
        self.delay = 0.0
        self.asked = 0
        self.port = 0

    async def __aenter__(self) -> Engine:
        app = web.Application()
        app.router.add_get("/prebook/v1/status", self._serve)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _serve(self, _: web.Request) -> web.Response:
        self.asked += 1
        await asyncio.sleep(self.delay)
        return self.answer or web.json_response({"pairs": {"ready": 1, "possible": 2}})


def test_an_answer() -> None:
    peers = [
        {"address": "b:8000", "state": "failed", "error": "other revision"},
        {"address": "a:8000", "state": "ready"},
    ]
    body = json.dumps({"pairs": {"ready": 1, "possible": 2, "peers": peers}}).encode()
    assert parse(body) == PodPairs(ready=1, possible=2, failure="b:8000: other revision")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"pairs": 1}',
        b'{"pairs": {"ready": -1, "possible": 1}}',
        b'{"pairs": {"ready": true, "possible": 1}}',
        b'{"pairs": {"ready": 3, "possible": 2}}',
        b"\xff\xfe",
        b"x" * (ANSWER_LIMIT + 1),
    ],
)
def test_nonsense_is_unknown_and_never_ready(body: bytes) -> None:
    found = parse(body)
    assert found.error
    assert found.ready == 0


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(
        lambda value: json.dumps({"pairs": {"ready": 0, "possible": 0, "peers": value}}).encode()
    )
)
def test_any_bytes_are_understood_as_far_as_they_go(body: bytes) -> None:
    found = parse(body)
    assert 0 <= found.ready <= found.possible or found.error


async def test_pods_are_asked_and_answers_reused_for_a_while() -> None:
    now = [0.0]
    async with Engine() as engine:
        reader = HttpPairsReader(port=engine.port, fresh=30, pending=3, clock=lambda: now[0])
        assert (await reader.read([pod()]))["p"] == PodPairs(ready=1, possible=2)
        await reader.read([pod()])
        assert engine.asked == 1
        now[0] = 4.0
        engine.answer = web.json_response({"pairs": {"ready": 2, "possible": 2}})
        assert (await reader.read([pod()]))["p"].ready == 2
        now[0] = 30.0
        await reader.read([pod()])
        assert engine.asked == 2, "a complete answer is kept longer"
        await reader.close()


async def test_a_silent_pod_costs_its_time_limit_and_no_more() -> None:
    async with Engine() as engine:
        engine.delay = 30.0
        reader = HttpPairsReader(port=engine.port, timeout=0.2)
        started = asyncio.get_running_loop().time()
        found = await reader.read([pod(f"p{index}", f"u{index}") for index in range(8)])
        assert asyncio.get_running_loop().time() - started < 2.0
        assert all(answer.error for answer in found.values())
        await reader.close()


async def test_redirects_errors_and_closed_doors_are_unknown() -> None:
    async with Engine() as engine:
        for answer in (
            web.Response(status=302, headers={"Location": "http://169.254.169.254/"}),
            web.Response(status=500, text="no"),
        ):
            engine.answer = answer
            reader = HttpPairsReader(port=engine.port)
            assert (await reader.read([pod()]))["p"].error.startswith("HTTP ")
            await reader.close()
    reader = HttpPairsReader(port=1)
    assert (await reader.read([pod()]))["p"].error
    await reader.close()


async def test_a_model_with_many_pods_is_sampled() -> None:
    async with Engine() as engine:
        reader = HttpPairsReader(port=engine.port)
        found = await reader.read([pod(f"p{index:03}", f"u{index}") for index in range(100)])
        assert len(found) == MAX_PODS
        await reader.close()
