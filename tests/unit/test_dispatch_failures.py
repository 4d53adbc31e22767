"""What goes wrong with a prefill peer, and that the client gets an answer anyway, once, and soon."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.dispatch_engine import Call
from tests.unit.dispatch_peers import FakePeer
from tests.unit.dispatch_rig import Rig, request, rig, until


async def answered(pod: Rig, call: Call, seconds: float = 4.0) -> Call:
    """The request ended well, and nothing of it is left anywhere."""
    await call.finish(seconds)
    assert call.status == 200, call.content
    assert b"hello" in call.content or b'{"t":2}' in call.content
    await until(lambda: all(leg.answered or leg.aborted for leg in pod.engine.legs))
    assert (await pod.status())["in_flight"]["requests"] == 0
    return call


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 404, 401, 403, 429, 500, 503, 302])
async def test_prefill_that_answers_with_an_error_is_recomputed_in_place(
    tmp_path: Path, status: int, stream: bool
) -> None:
    async with rig(tmp_path) as pod:
        pod.peers[0].answering(status)
        call = await answered(pod, pod.call(request(stream=stream)))
        assert pod.connector is not None
        assert pod.connector.failed[0][0] == call.headers["x-prebook-transfer"]
        assert len(pod.engine.legs) == 1, "the decode leg that waited has answered"
        totals = (await pod.status())["requests"]
        assert totals["failed_over"] == (0 if status in (400, 404) else 1)
        assert totals["retried"] == 0


@pytest.mark.parametrize("body", [b"", b"not json", b"[]", b'{"choices":1}', b"[" * 100_000])
async def test_garbage_from_a_peer_is_a_failure_like_any_other(tmp_path: Path, body: bytes) -> None:
    async with rig(tmp_path) as pod:
        pod.peers[0].answering(200, body)
        await answered(pod, pod.call(request()))
        assert pod.connector is not None
        assert pod.connector.failed[0][1] == "prefill_garbage"


@pytest.mark.parametrize("stream", [False, True])
async def test_broken_connection_starts_a_fresh_local_leg(tmp_path: Path, stream: bool) -> None:
    async with rig(tmp_path) as pod:
        pod.peers[0].act = FakePeer.reset
        call = await answered(pod, pod.call(request(stream=stream)))
        assert call.headers["x-prebook-local"] == "failed_over"
        first, second = pod.engine.legs
        assert first.aborted
        assert second.params is None
        assert pod.connector is not None
        assert pod.connector.failed[0][1] == "reset"


async def test_refused_connection_fails_over_before_any_poll(tmp_path: Path) -> None:
    async with rig(tmp_path, timing={"poll": 30.0, "poll_steady": 30.0}) as pod:
        await pod.peers[0].stop()
        began = time.monotonic()
        call = await answered(pod, pod.call(request()))
        assert call.headers["x-prebook-local"] == "failed_over"
        assert time.monotonic() - began < 1.0


@pytest.mark.parametrize("mode", ["prebook", "nixl-push", "nixl-pull"])
@pytest.mark.parametrize("fault", ["reset", "error", "gone"])
async def test_another_peer_is_tried_first(tmp_path: Path, mode: str, fault: str) -> None:
    async with rig(tmp_path, peers=2, mode=mode) as pod:
        bad, good = pod.peers
        if fault == "reset":
            bad.act = FakePeer.reset
        elif fault == "error":
            bad.answering(500)
        else:
            pod.middleware._discovery._timing = pod.settings.timing.model_copy(update={"poll": 30, "poll_steady": 30})
            await asyncio.sleep(0.1)
            await bad.stop()
        call = await answered(pod, pod.call(request(), headers={"x-prefiller-host-port": bad.address}))
        assert "x-prebook-transfer" in call.headers
        assert len(good.legs) == 1
        totals = (await pod.status())["requests"]
        assert (totals["retried"], totals["remote"]) == (1, 1)
        ids = [leg.params["transfer_id"] for leg in pod.engine.legs if leg.params and mode == "prebook"]
        assert len(set(ids)) == len(ids)
        again = await answered(pod, pod.call(request()))
        assert "x-prebook-transfer" in again.headers
        assert len(good.legs) == 2, "a peer that just failed is avoided for a while"


async def test_both_peers_fail(tmp_path: Path) -> None:
    async with rig(tmp_path, peers=3, max_retries=1) as pod:
        for peer in pod.peers:
            peer.act = FakePeer.reset
        call = await answered(pod, pod.call(request()))
        assert call.headers["x-prebook-local"] == "failed_over"
        assert sum(len(peer.legs) for peer in pod.peers) == 2, "retries are bounded"


async def test_silent_peer_is_not_waited_for(tmp_path: Path) -> None:
    """As after SIGSTOP: connections stay open, nothing answers."""
    async with rig(tmp_path) as pod:
        pod.peers[0].act = FakePeer.hang
        call = pod.call(request(stream=True))
        await until(lambda: bool(pod.peers[0].legs))
        pod.peers[0].silent = True
        await answered(pod, call)
        assert call.headers["x-prebook-local"] == "failed_over"
        assert pod.engine.legs[0].aborted
        pod.peers[0].silent = False
        pod.peers[0].act = FakePeer.compute
        await pod.wait_pairs(1)
        await asyncio.sleep(0.1)


async def test_slow_peer_that_answers_polls_is_waited_for(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        pod.peers[0].seconds = 1.5
        call = await answered(pod, pod.call(request()))
        assert "x-prebook-transfer" in call.headers
        assert len(pod.engine.legs) == 1


async def test_restarted_engine_at_the_same_address(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        pod.peers[0].act = FakePeer.hang
        call = pod.call(request())
        await until(lambda: bool(pod.peers[0].legs))
        pod.peers[0].engine_id = "engine-new"
        await answered(pod, call)
        assert call.headers["x-prebook-local"] == "failed_over"
        pod.peers[0].act = FakePeer.compute
        assert pod.connector is not None
        connector = pod.connector
        await until(lambda: [peer["engine_id"] for peer in connector.peers] == ["engine-new"])
        await pod.wait_pairs(1)
        after = await answered(pod, pod.call(request()))
        assert "x-prebook-transfer" in after.headers
        assert (pod.engine.legs[-1].params or {})["remote_engine_id"] == "engine-new"


async def test_peer_lost_after_everything_arrived_changes_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        gate = asyncio.Event()

        async def late(leg: Any, send: Any) -> None:
            await gate.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"hello", "more_body": False})

        pod.engine.answer = late
        call = pod.call(request())
        await until(lambda: bool(pod.engine.arrived) and all(event.is_set() for event in pod.engine.arrived.values()))
        await pod.peers[0].stop()
        await pod.wait_pairs(0)
        await asyncio.sleep(0.2)
        gate.set()
        await answered(pod, call)
        assert len(pod.engine.legs) == 1
        assert "x-prebook-transfer" in call.headers


async def test_quarantined_transfer_is_not_waited_for(tmp_path: Path) -> None:
    """The peer's API server lives, its engine does not: only the connector knows."""
    async with rig(tmp_path) as pod:
        pod.peers[0].act = FakePeer.forget
        call = pod.call(request())
        await until(lambda: bool(pod.engine.legs))
        assert pod.connector is not None
        pod.connector.states[(pod.engine.legs[0].params or {})["transfer_id"]] = "quarantined"
        await answered(pod, call)
        assert call.headers["x-prebook-local"] == "failed_over"


async def test_transfer_that_never_commits_has_a_deadline(tmp_path: Path) -> None:
    async with rig(tmp_path, lease_seconds=0.4) as pod:
        pod.peers[0].act = FakePeer.forget
        call = await answered(pod, pod.call(request()))
        assert call.headers["x-prebook-local"] == "failed_over"


async def test_decode_that_waits_in_its_own_queue_is_not_hurried(tmp_path: Path) -> None:
    """Long after prefill's end, but nothing was booked yet: a second leg would only queue behind the first."""
    async with rig(tmp_path, lease_seconds=0.2) as pod:
        pod.engine.queued = 2.5
        pod.peers[0].act = FakePeer.forget
        call = pod.call(request())
        await asyncio.sleep(2.3)
        assert len(pod.engine.legs) == 1
        await until(lambda: bool(pod.engine.arrived))
        for event in pod.engine.arrived.values():
            event.set()
        await answered(pod, call)
        assert "x-prebook-transfer" in call.headers


async def test_failure_that_comes_before_the_booking_is_told_again(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        pod.engine.queued = 0.4
        pod.peers[0].seconds = 0.0
        pod.peers[0].answering(500)
        call = await answered(pod, pod.call(request()), 2)
        assert pod.connector is not None
        assert len(pod.connector.failed) >= 2
        assert len(pod.engine.legs) == 1
        assert "x-prebook-transfer" in call.headers


async def test_transfer_that_the_connector_gave_up_is_counted(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        pod.peers[0].act = FakePeer.forget
        call = pod.call(request())
        await until(lambda: bool(pod.engine.arrived))
        (transfer_id, event), = pod.engine.arrived.items()  # fmt: skip
        assert pod.connector is not None
        pod.connector.states[transfer_id] = "failed"
        await asyncio.sleep(1.2)
        await pod.peers[0].stop()
        await pod.wait_pairs(0)
        assert len(pod.engine.legs) == 1, "decode computes by itself; the peer is not needed any more"
        event.set()
        await answered(pod, call)
        await until(lambda: bool(pod.middleware._accounts))
        assert (await pod.status())["requests"]["failed_over"] == 1


@pytest.mark.parametrize("mode", ["nixl-push", "nixl-pull"])
async def test_stock_transfer_that_never_matches_has_a_deadline(tmp_path: Path, mode: str) -> None:
    async with rig(tmp_path, mode=mode, lease_seconds=0.4) as pod:
        pod.peers[0].act = FakePeer.forget
        call = await answered(pod, pod.call(request()))
        assert call.headers["x-prebook-local"] == "failed_over"
        assert pod.engine.legs[0].aborted


async def test_connector_that_cannot_be_told_costs_a_fresh_leg(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        assert pod.connector is not None
        pod.connector.refuses_fail = True
        pod.peers[0].answering(500)
        call = await answered(pod, pod.call(request()))
        assert call.headers["x-prebook-local"] == "failed_over"


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_leg_that_breaks_before_its_first_byte_runs_again(tmp_path: Path, stream: bool) -> None:
    async with rig(tmp_path) as pod:

        async def spoils(peer: FakePeer, req: Any, body: Any) -> Any:
            pod.engine.broken.add(body["kv_transfer_params"]["transfer_id"])
            return await peer.compute(req, body)

        pod.peers[0].act = spoils
        call = await answered(pod, pod.call(request(stream=stream)))
        assert call.headers["x-prebook-local"] == "failed_over"
        assert b"error" not in call.content


async def test_stream_goes_on_after_a_keep_alive_comment(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        pod.engine.comment_first = True
        pod.peers[0].act = FakePeer.reset
        pod.peers[0].seconds = 0.2
        call = await answered(pod, pod.call(request(stream=True)))
        assert call.content.startswith(b": keep-alive\n\n")
        assert call.content.count(b"[DONE]") == 1


async def test_error_after_a_keep_alive_comment_comes_as_an_event(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        pod.engine.comment_first = True
        pod.engine.refuse_local = '{"error":{"code":503}}'
        pod.peers[0].act = FakePeer.reset
        pod.peers[0].seconds = 0.2
        call = await pod.call(request(stream=True)).finish()
        assert call.status == 200
        assert call.content == b': keep-alive\n\ndata: {"error":{"code":503}}\n\ndata: [DONE]\n\n'


async def test_unknown_exceptions_of_the_http_client_are_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path) as pod:
        client = pod.middleware._client
        assert client is not None

        def burst(*_: Any, **__: Any) -> Any:
            raise ZeroDivisionError

        monkeypatch.setattr(client._session, "post", burst)
        await answered(pod, pod.call(request()))
        assert pod.connector is not None
        assert pod.connector.failed[0][1] == "prefill_garbage"


@pytest.mark.parametrize(("fault", "status"), [("reset", 502), ("stock", 502), ("none", 503)])
async def test_on_failure_fail_gives_an_openai_error(tmp_path: Path, fault: str, status: int) -> None:
    mode = "nixl-push" if fault == "stock" else "prebook"
    async with rig(tmp_path, on_failure="fail", mode=mode) as pod:
        if fault == "none":
            await pod.peers[0].stop()
            await pod.wait_pairs(0)
            assert (await pod.get("/prebook/v1/ready")).status == 503
        pod.peers[0].act = FakePeer.reset
        call = await pod.call(request()).finish(3)
        assert call.status == status
        error = call.json()["error"]
        assert error["code"] == status
        assert set(error) == {"message", "type", "param", "code"}
        short = await pod.call(request(prompt=[1, 2])).finish()
        assert short.status == 200


async def test_first_byte_has_a_deadline(tmp_path: Path) -> None:
    async with rig(tmp_path, timing={"first_byte": 0.5}) as pod:
        pod.peers[0].act = FakePeer.hang
        call = await pod.call(request()).finish(3)
        assert (call.status, call.json()["error"]["type"]) == (504, "GatewayTimeoutError")
        await until(lambda: pod.peers[0].aborted == 1 and pod.engine.legs[0].aborted)


async def test_prefill_leg_has_a_deadline(tmp_path: Path) -> None:
    async with rig(tmp_path, timing={"prefill": 0.3}) as pod:
        pod.peers[0].act = FakePeer.hang
        call = await answered(pod, pod.call(request()))
        assert call.headers["x-prebook-local"] == "failed_over"


async def test_huge_answer_of_a_peer_is_not_read_to_its_end(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        sent = 0

        async def flood(peer: FakePeer, req: Any, body: Any) -> Any:
            from aiohttp import web

            nonlocal sent
            response = web.StreamResponse()
            await response.prepare(req)
            for _ in range(1024):
                await response.write(b" " * (1 << 20))
                sent += 1
            return response

        pod.peers[0].act = flood
        await answered(pod, pod.call(request()))
        assert sent < 200


async def test_no_peer_is_ready(tmp_path: Path) -> None:
    async with rig(tmp_path, ready=False) as pod:
        assert pod.connector is not None
        pod.connector.pair_state = "connecting"
        await pod.wait_pairs(0)
        call = await answered(pod, pod.call(request()))
        assert call.headers["x-prebook-local"] == "no_ready_peer"


async def test_pair_that_the_connector_lost(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        pod.peers[0].act = FakePeer.hang
        call = pod.call(request())
        await until(lambda: bool(pod.peers[0].legs))
        assert pod.connector is not None
        pod.connector.overrides["engine-0"] = {"state": "failed", "error": "no heartbeat"}
        await answered(pod, call)
        assert call.headers["x-prebook-local"] == "failed_over"
        peers = (await pod.status())["pairs"]["peers"]
        assert (peers[0]["state"], peers[0]["error"]) == ("failed", "no heartbeat")


async def test_many_requests_while_a_peer_dies(tmp_path: Path) -> None:
    """No client sees an error, whatever moment its request was in."""
    async with rig(tmp_path, peers=2) as pod:
        for peer in pod.peers:
            peer.seconds = 0.15
        calls = []
        for index in range(40):
            calls.append(pod.call(request(stream=index % 2 == 0)))
            await asyncio.sleep(0.01)
            if index == 20:
                await pod.peers[0].stop()
        for call in calls:
            await call.finish(5)
        assert [call.status for call in calls] == [200] * 40
        assert all(b"error" not in call.content for call in calls)
        assert (await pod.status())["in_flight"]["requests"] == 0


async def test_no_task_is_left_behind(tmp_path: Path) -> None:
    """After a crowd of requests with every kind of end, only the background loops and the rig itself still run."""
    async with rig(tmp_path, peers=2) as pod:
        before = {task.get_name() for task in asyncio.all_tasks() if "prebook" in task.get_name()}
        turn = random.Random(7)
        acts = [FakePeer.compute, FakePeer.reset, FakePeer.hang, FakePeer.forget]
        calls = []
        for index in range(80):
            for peer in pod.peers:
                peer.act = turn.choice(acts)
            call = pod.call(request(stream=turn.random() < 0.5, n=1 if turn.random() < 0.9 else 2))
            calls.append(call)
            await asyncio.sleep(0.01)
            if index % 3 == 0:
                turn.choice(calls).left.set()
        for peer in pod.peers:
            peer.act = FakePeer.compute
        await asyncio.sleep(0.3)
        for call in calls:
            call.left.set()
        await asyncio.gather(*(call.finish(5) for call in calls))
        await asyncio.sleep(pod.settings.timing.abandoned + 0.2)
        await until(lambda: pod.middleware._work.requests == 0)
        after = {task.get_name() for task in asyncio.all_tasks() if "prebook" in task.get_name()}
        assert after <= before
        assert pod.middleware._tasks == set()
        assert all(leg.answered or leg.aborted for leg in pod.engine.legs)
        peers = pod.middleware._discovery.table.peers()
        assert [(peer.in_flight, peer.in_flight_tokens) for peer in peers] == [(0, 0), (0, 0)]
        assert pod.middleware._discovery._watchers == {}
