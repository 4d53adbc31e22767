"""The dispatcher and Prebook's own connector, real engines: two prefill pods and one decode pod."""

from __future__ import annotations

import concurrent.futures
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.engine.dispatch_pair import Front, front, kv_usage
from tests.engine.pair import Engine, wait_for

SAMPLING: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "model": "m"}
TIMING = {"lost_after": 3.0, "poll_timeout": 1.0}


def prompt(seed: int, length: int = 700) -> list[int]:
    """Token ids that no other prompt begins with."""
    return [20 + (seed * 37 + index * (seed % 5 + 1)) % 400 for index in range(length)]


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front("prebook", tmp_path_factory.mktemp("prebook"), prefills=2, timing=TIMING) as started:
        yield started


def alone(engine: Engine, ids: list[int]) -> str:
    """The answer of one engine, asked without any transfer."""
    response = engine.client.post("/v1/completions", json={**SAMPLING, "prompt": ids})
    response.raise_for_status()
    return str(response.json()["choices"][0]["text"])


def ask(pod: Front, ids: list[int], **body: Any) -> httpx.Response:
    return httpx.post(
        f"{pod.decode.url}/v1/completions", json={**SAMPLING, "prompt": ids, **body}, timeout=120)  # fmt: skip


def test_answers_are_those_of_one_engine(pod: Front) -> None:
    for seed, length in enumerate((17, 511, 512, 513, 1030)):
        ids = prompt(seed, length)
        response = ask(pod, ids)
        assert response.status_code == 200, response.text
        assert "x-prebook-transfer" in response.headers, dict(response.headers)
        assert response.json()["choices"][0]["text"] == alone(pod.prefills[0], ids)
    account = pod.at_rest()["last_transfers"][-1]
    assert account["state"] == "committed"
    assert account["bytes"] > 0
    assert account["tokens"] == 1030
    assert account["lead_s"] > 0, "decode had booked before prefill finished"


def test_both_prefill_pods_are_used(pod: Front) -> None:
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda seed: ask(pod, prompt(seed)), range(10, 16)))
    assert [answer.status_code for answer in answers] == [200] * 6
    peers = {account["peer"] for account in pod.at_rest()["last_transfers"][-6:]}
    assert len(peers) == 2


def test_transfer_account_by_id(pod: Front) -> None:
    response = ask(pod, prompt(20))
    pod.at_rest()
    account = pod.decode.client.get(f"/prebook/v1/transfers/{response.headers['x-prebook-transfer']}").json()
    assert account["state"] == "committed"


def test_clients_that_leave_free_everything(pod: Front) -> None:
    for index, delay in enumerate((0.005, 0.05, 0.15, 0.4)):
        long = {**SAMPLING, "prompt": prompt(30 + index, 1500), "max_tokens": 500, "ignore_eos": True}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{pod.decode.url}/v1/completions", timeout=httpx.Timeout(10, read=delay), json=long)
    pod.at_rest(20)
    wait_for("no transfers", lambda: pod.status()["transfers"]["booked"] == 0, 40)
    wait_for("no KV block in use", lambda: kv_usage(pod.decode) == 0 == kv_usage(pod.prefills[0]), 40)
    assert ask(pod, prompt(39)).status_code == 200


def test_stopped_prefill_is_not_waited_for(pod: Front) -> None:
    stopped = pod.prefills[0]
    host = f"{stopped.spec.host}:8000"
    expected = alone(pod.prefills[1], prompt(50))
    stopped.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        answer = httpx.post(f"{pod.decode.url}/v1/completions", json={**SAMPLING, "prompt": prompt(50)}, timeout=60,
                            headers={"x-prefiller-host-port": host})  # fmt: skip
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"] == expected
        assert time.monotonic() - began < 30
    finally:
        stopped.signal(signal.SIGCONT)
    pod.wait_ready(2, 60)
    assert ask(pod, prompt(51)).status_code == 200


def test_killed_prefill_costs_no_client_an_error(pod: Front) -> None:
    """Last but one: a stream of requests, one of two prefill engines dies in the middle of it."""
    expected = {seed: alone(pod.prefills[1], prompt(seed)) for seed in range(60, 72)}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = {seed: pool.submit(ask, pod, prompt(seed)) for seed in expected}
        time.sleep(0.6)
        pod.prefills[0].stop()
        for seed, future in futures.items():
            answer = future.result()
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == expected[seed], seed
    pod.wait_ready(1)
    assert pod.decode.client.get("/health").status_code == 200


def test_drain_of_the_last_prefill(pod: Front) -> None:
    """Last: it drains the remaining prefill pod."""
    response = pod.prefills[1].client.post("/prebook/v1/drain?timeout=60", headers={"x-prebook-token": pod.token})
    assert response.json()["drained"] is True, response.text
    assert pod.prefills[1].client.get("/prebook/v1/ready").status_code == 503
    wait_for("draining seen", lambda: pod.status()["pairs"]["ready"] == 0, 15)
    answer = ask(pod, prompt(80))
    assert answer.headers["x-prebook-local"] == "no_ready_peer"
    assert answer.json()["choices"][0]["text"] == alone(pod.prefills[1], prompt(80))
