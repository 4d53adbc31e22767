"""What happened in a transfer as spans and marks on lanes: the model behind the Chrome trace and the picture. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final, Literal

from prebook_bench.trace.events import Event, Transfer

Lane = Literal["client", "prefill", "link", "decode"]
LANES: Final[tuple[Lane, ...]] = ("client", "prefill", "link", "decode")


@dataclasses.dataclass(frozen=True)
class Span:
    """Something that took time on a lane. Seconds on prefill's clock."""

    lane: Lane
    kind: str
    name: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Mark:
    """A moment on a lane."""

    lane: Lane
    kind: str
    name: str
    at: float


@dataclasses.dataclass(frozen=True)
class Message:
    """Something one engine told the other."""

    name: str
    source: Lane
    sent: float
    target: Lane
    received: float


@dataclasses.dataclass(frozen=True)
class Story:
    """One transfer, ready to be drawn."""

    transfer_id: str
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...]
    messages: tuple[Message, ...]
    start: float
    end: float
    tokens: int | None
    pushed_bytes: int
    lead: float | None
    exposed: float | None


def tell(transfer: Transfer) -> Story:
    """Turns the events of a transfer into spans, marks and messages."""
    spans = [*_prefill_spans(transfer), *_write_spans(transfer), *_decode_spans(transfer), *_client_spans(transfer)]
    started = transfer.first("prefill_started")
    booked = transfer.first("booked")
    tokens = next((int(e.data["tokens"]) for e in (started, booked) if e and "tokens" in e.data), None)
    writes = transfer.all("write_done")
    finished = transfer.first("prefill_finished")
    registered = transfer.first("reg_received")
    committed = transfer.first("committed")
    settled = transfer.all("chunk_settled")
    last = max((e.at for e in (*settled, *([finished] if finished else []))), default=None)
    times = [transfer.start, transfer.end, *(span.end for span in spans)]
    return Story(
        transfer_id=transfer.transfer_id,
        spans=tuple(spans),
        marks=tuple(_marks(transfer)),
        messages=tuple(_messages(transfer)),
        start=min(times),
        end=max(times),
        tokens=tokens,
        pushed_bytes=sum(int(e.data.get("bytes", 0)) for e in writes),
        lead=finished.at - registered.at if finished and registered else None,
        exposed=committed.at - last if committed and last is not None else None,
    )


def _prefill_spans(transfer: Transfer) -> list[Span]:
    """One span per chunk: from the end of the one before (or the start of prefill) until its KV has settled."""
    started = transfer.first("prefill_started") or transfer.first("queued")
    if started is None:
        return []
    spans = []
    at, tokens = started.at, 0
    for event in transfer.all("chunk_settled"):
        upto = int(event.data.get("tokens", tokens))
        if upto > tokens:
            spans.append(Span("prefill", "chunk", f"prefill tokens {tokens}-{upto}", at, event.at))
            at, tokens = event.at, upto
    finished = transfer.first("prefill_finished")
    if finished and finished.at > at and not spans:
        spans.append(Span("prefill", "chunk", "prefill", at, finished.at))
    return spans


def _write_spans(transfer: Transfer) -> list[Span]:
    """WRITEs from posting to completion, matched by rank and block range in order (a range can be sent again)."""
    waiting: dict[tuple[object, ...], list[Event]] = {}
    spans = []
    for event in transfer.events:
        key = (event.engine, event.rank, event.data.get("start"), event.data.get("stop"))
        if event.name == "write_posted":
            waiting.setdefault(key, []).append(event)
        elif event.name == "write_done" and waiting.get(key):
            posted = waiting[key].pop(0)
            size = int(event.data.get("bytes", 0))
            name = f"WRITE blocks {key[2]}-{key[3]}, {size / 1e6:.1f} MB"
            spans.append(Span("link", "write", name, posted.at, event.at))
    return spans


def _decode_spans(transfer: Transfer) -> list[Span]:
    booked = transfer.first("booked")
    end = transfer.first("committed") or transfer.first("ended")
    if booked is None or end is None:
        return []
    blocks = booked.data.get("blocks")
    return [Span("decode", "booked", f"{blocks} blocks booked", booked.at, end.at)]


def _client_spans(transfer: Transfer) -> list[Span]:
    sent, token = transfer.first("request_sent", role="client"), transfer.first("first_token", role="client")
    if sent is None or token is None:
        return []
    return [Span("client", "wait", f"TTFT {1e3 * (token.at - sent.at):.0f} ms", sent.at, token.at)]


_MARKS: Final[Sequence[tuple[str, Lane, str]]] = (
    ("prefill_finished", "prefill", "prefill finished"),
    ("preempted", "prefill", "preempted"),
    ("post_failed", "link", "post failed"),
    ("write_landed", "decode", "landed"),
    ("failed", "prefill", "failed"),
    ("ended", "decode", "ended"),
    ("first_token", "client", "first token"),
)


def _marks(transfer: Transfer) -> list[Mark]:
    return [Mark(lane, event, name, e.at) for event, lane, name in _MARKS for e in transfer.all(event)]


def _messages(transfer: Transfer) -> list[Message]:
    wanted: Sequence[tuple[str, Lane, str, Lane, str]] = (
        ("REG", "decode", "reg_sent", "prefill", "reg_received"),
        ("COMMIT", "prefill", "commit_sent", "decode", "committed"),
    )
    found = []
    for name, source, sent_name, target, received_name in wanted:
        sent, received = transfer.first(sent_name), transfer.first(received_name)
        if sent and received:
            found.append(Message(name, source, sent.at, target, received.at))
    return found
