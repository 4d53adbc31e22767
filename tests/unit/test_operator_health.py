"""Health endpoints, metrics and logs."""

from __future__ import annotations

import json
import logging

import aiohttp

from prebook_operator.cache import Cache
from prebook_operator.health import HealthServer
from prebook_operator.kube.progress import Scope, WatchProgress
from prebook_operator.logs import JsonFormatter, TextFormatter
from prebook_operator.metrics import Metrics
from prebook_operator.records import Key, ModelRecord


async def fetch(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
        return answer.status, await answer.text()


async def test_probes_say_what_is_wrong() -> None:
    wrong = {"live": "", "ready": "waiting for the first lists"}
    server = HealthServer(live=lambda: wrong["live"], ready=lambda: wrong["ready"], metrics=Metrics())
    await server.start(bind="127.0.0.1", health_port=0, metrics_port=0)
    try:
        assert await fetch(server.ports["health"], "/healthz") == (200, "ok")
        assert await fetch(server.ports["health"], "/readyz") == (503, "waiting for the first lists")
        wrong.update(live="no sign of life", ready="")
        assert (await fetch(server.ports["health"], "/healthz"))[0] == 503
        assert (await fetch(server.ports["health"], "/readyz"))[0] == 200
        assert (await fetch(server.ports["metrics"], "/metrics"))[0] == 200
    finally:
        await server.stop()


def test_metrics_count_requests_and_models() -> None:
    metrics, cache = Metrics(), Cache()
    metrics.watch_state(cache, lambda: 7)
    metrics.observe_request("apply", "services", "201", 0.01)
    key = Key("ns", "demo")
    status = json.dumps({"conditions": [{"type": "Ready", "status": "False", "reason": "Starting"}]}).encode()
    cache.put("disaggregatedmodels", key, ModelRecord(key, "u", 1, 1, False, b"{}", status))
    text = metrics.text().decode()
    assert 'prebook_api_requests_total{code="201",resource="services",verb="apply"} 1.0' in text
    assert 'prebook_models{ready="False",reason="Starting"} 1.0' in text
    assert "prebook_queue_depth 7.0" in text
    assert "prebook_cached_objects 1.0" in text


def test_a_watch_that_says_nothing_is_noticed() -> None:
    now = [0.0]
    progress = WatchProgress(frozenset({"pods"}), on_list=lambda _: None, on_watch=lambda _: None, clock=lambda: now[0])
    progress.expect([Scope("pods", None)])
    assert progress.silent(180) == []
    now[0] = 181.0
    assert progress.silent(180) == [Scope("pods", None)]


def test_log_lines_carry_their_fields() -> None:
    record = logging.LogRecord("prebook", logging.INFO, "f", 1, "will try %s", ("again",), None)
    record.model = "ns/demo"
    entry = json.loads(JsonFormatter().format(record))
    assert (entry["message"], entry["model"], entry["level"]) == ("will try again", "ns/demo", "info")
    assert TextFormatter().format(record).endswith("will try again model=ns/demo")
