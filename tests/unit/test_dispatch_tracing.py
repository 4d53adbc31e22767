"""Spans of one request, with OpenTelemetry's own SDK and an exporter in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from prebook_connector.dispatch import tracing
from tests.unit.dispatch_rig import request, rig, until

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_TRACER", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def named(exporter: InMemorySpanExporter, name: str) -> ReadableSpan:
    return next(span for span in exporter.get_finished_spans() if span.name == name)


def header(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"


async def test_both_legs_hang_below_the_clients_trace(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    async with rig(tmp_path) as pod:
        assert pod.connector is not None
        pod.connector.account = {"booked_at": 100.0, "ended_at": 100.5, "bytes": 4096, "lead_s": 0.5}
        call = await pod.call(request(stream=True), headers={"traceparent": CLIENT}).finish()
        await until(lambda: len(spans.get_finished_spans()) == 3)
        served, leg, transfer = (named(spans, f"prebook.{name}") for name in ("request", "prefill_leg", "transfer"))
        assert served.parent is not None
        assert f"{served.parent.span_id:016x}" == CLIENT.split("-")[2]
        for child in (leg, transfer):
            assert child.parent is not None
            assert served.context is not None
            assert child.parent.span_id == served.context.span_id
        assert pod.engine.legs[0].headers["traceparent"] == header(served)
        assert pod.peers[0].headers[0]["traceparent"] == header(leg)
        assert served.attributes is not None
        assert served.attributes["prebook.transfer_id"] == call.headers["x-prebook-transfer"]
        assert [event.name for event in served.events] == ["first token"]
        assert (transfer.start_time, transfer.end_time) == (100_000_000_000, 100_500_000_000)
        assert transfer.attributes is not None
        assert transfer.attributes["prebook.bytes"] == 4096


async def test_a_failed_leg_is_an_error_and_the_request_says_what_followed(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    async with rig(tmp_path) as pod:
        await pod.peers[0].stop()
        await pod.call(request()).finish()
        leg, served = named(spans, "prebook.prefill_leg"), named(spans, "prebook.request")
        assert not leg.status.is_ok
        assert served.attributes is not None
        assert (served.attributes["prebook.path"], served.attributes["prebook.reason"]) == ("local", "failed_over")


async def test_without_tracing_the_clients_context_goes_through(tmp_path: Path) -> None:
    async with rig(tmp_path) as pod:
        await pod.call(request(), headers={"traceparent": CLIENT}).finish()
        assert pod.engine.legs[0].headers["traceparent"] == CLIENT
        assert pod.peers[0].headers[0]["traceparent"] == CLIENT
