"""Chrome's trace-event format (JSON object form), which Perfetto opens. Pure.

Format: "Trace Event Format" by the Chromium project: complete events ``X``, instants ``i``, flows ``s``/``f``,
metadata ``M``; times in microseconds. Here a process is a transfer and its threads are the lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prebook_bench.trace.spans import LANES, Lane, Story


def chrome_trace(stories: Sequence[Story]) -> dict[str, Any]:
    """The trace of all transfers, times counted from the first event."""
    zero = min((story.start for story in stories), default=0.0)
    events: list[dict[str, Any]] = []
    for process, story in enumerate(stories, start=1):
        events += _process(story, process=process, zero=zero)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(story: Story, *, process: int, zero: float) -> list[dict[str, Any]]:
    def micros(at: float) -> float:
        return round((at - zero) * 1e6, 1)

    def place(lane: Lane) -> dict[str, int]:
        return {"pid": process, "tid": LANES.index(lane)}

    title = f"transfer {story.transfer_id[:8]}" + (f", {story.tokens} tokens" if story.tokens else "")
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}}]
    for lane in LANES:
        events.append({"ph": "M", "name": "thread_name", **place(lane), "args": {"name": lane}})
        events.append(
            {"ph": "M", "name": "thread_sort_index", **place(lane), "args": {"sort_index": LANES.index(lane)}}
        )
    for span in story.spans:
        events.append(
            {"ph": "X", "name": span.name, "cat": span.kind, **place(span.lane), "ts": micros(span.start),
             "dur": round((span.end - span.start) * 1e6, 1)}
        )  # fmt: skip
    for mark in story.marks:
        events.append(
            {"ph": "i", "s": "t", "name": mark.name, "cat": mark.kind, **place(mark.lane), "ts": micros(mark.at)}
        )
    for number, message in enumerate(story.messages):
        flow = {"name": message.name, "cat": "message", "id": process * 100 + number}
        events.append({"ph": "s", **flow, **place(message.source), "ts": micros(message.sent)})
        events.append({"ph": "f", "bp": "e", **flow, **place(message.target), "ts": micros(message.received)})
        events.append(
            {"ph": "i", "s": "t", "name": f"{message.name} received", "cat": "message", **place(message.target),
             "ts": micros(message.received)}
        )  # fmt: skip
    return events
