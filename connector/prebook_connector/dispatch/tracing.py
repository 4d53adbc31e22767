"""OpenTelemetry spans of one request, when vLLM's own tracing is on (``--otlp-traces-endpoint``).

vLLM sets the process's tracer provider (``vllm/tracing/otel.py``); without one the API's tracer does nothing. Both legs
carry the ``traceparent`` of our spans, so the spans of the two engines hang below them::

    prebook.request                 the client's request on the decode pod
    ├── prebook.prefill_leg         one HTTP request to a prefill pod
    │   └── llm_request             vLLM's, on prefill
    ├── llm_request                 vLLM's, on decode
    └── prebook.transfer            from booking to commit, on decode's clock
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.propagate import extract, inject
from opentelemetry.trace import SpanKind

from prebook_connector.dispatch.types import Scope, replaced

_TRACER = trace.get_tracer("prebook.dispatch")
_CONTEXT_HEADERS = (b"traceparent", b"tracestate")
_NANOSECONDS = 1_000_000_000


@contextlib.contextmanager
def request(scope: Scope) -> Iterator[Scope]:
    """The span of a request; gives the scope whose headers make what follows its children."""
    carried = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"] if _is_context(key)}
    with _TRACER.start_as_current_span("prebook.request", extract(carried), SpanKind.SERVER):
        yield {**scope, "headers": replaced(list(scope["headers"]), **_injected())}


@contextlib.contextmanager
def prefill_leg(headers: dict[str, str], peer: str) -> Iterator[dict[str, str]]:
    """The span of a prefill leg; gives ``headers`` with its context. An exception ends it as an error."""
    with _TRACER.start_as_current_span("prebook.prefill_leg", kind=SpanKind.CLIENT, attributes={"prebook.peer": peer}):
        yield headers | _injected()


def note(**facts: str | int | float | bool) -> None:
    """Adds attributes to the span of the request that is being served."""
    trace.get_current_span().set_attributes({f"prebook.{key}": value for key, value in facts.items()})


def first_token(source: str) -> None:
    """Marks the moment at which the client was given its first token, and whose it is."""
    trace.get_current_span().add_event("first token", {"prebook.source": source})


def transfer(account: Mapping[str, Any]) -> None:
    """The span of a transfer that is over, from decode's ``account`` of it. To be called in the request's context."""
    parent = trace.get_current_span()
    began, ended = account.get("booked_at"), account.get("ended_at")
    if not parent.get_span_context().is_valid or not isinstance(began, float) or not isinstance(ended, float):
        return
    attributes = {f"prebook.{key}": value for key, value in account.items() if isinstance(value, str | int | float)}
    _TRACER.start_span(
        "prebook.transfer",
        trace.set_span_in_context(parent),
        attributes=attributes,
        start_time=int(began * _NANOSECONDS),
    ).end(int(ended * _NANOSECONDS))


def _is_context(key: bytes) -> bool:
    return key in _CONTEXT_HEADERS


def _injected() -> dict[str, str]:
    carrier: dict[str, str] = {}
    inject(carrier)
    return carrier
