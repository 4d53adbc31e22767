"""Reads timeline files and groups their events by transfer, with the clocks of the engines aligned.

A line is ``{"t": wall clock (s), "mono": monotonic (s), "engine", "role", "rank", "transfer_id", "event", "data"}``.
The connector's transfer thread writes them (prefill, decode), and the load generator (client). Order and durations
within a writer come from the monotonic clock; `t` only places the writers against each other.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prebook_bench.stats import median


class TraceError(ValueError):
    """Timelines cannot be read or hold nothing to show; the message says which file and why."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One line of a timeline; `at` is in seconds on prefill's clock once aligned, `mono` on the writer's own."""

    at: float
    mono: float
    role: str
    engine: str
    rank: int
    transfer_id: str
    name: str
    data: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Transfer:
    """All events of one transfer, in order of time, and how the clocks were aligned (seconds, by role)."""

    transfer_id: str
    events: tuple[Event, ...]
    offsets: Mapping[str, float]

    def all(self, name: str, *, role: str | None = None) -> list[Event]:
        """Events called `name`."""
        return [e for e in self.events if e.name == name and role in (None, e.role)]

    def first(self, name: str, *, role: str | None = None) -> Event | None:
        """The first event called `name`."""
        return next(iter(self.all(name, role=role)), None)

    @property
    def start(self) -> float:
        """Time of the first event."""
        return self.events[0].at

    @property
    def end(self) -> float:
        """Time of the last event."""
        return self.events[-1].at


def parse_line(text: str) -> Event:
    """One line of a timeline file. Raises TraceError when it is not one."""
    try:
        raw = json.loads(text)
        return Event(
            at=float(raw["t"]),
            mono=float(raw["mono"]),
            role=str(raw["role"]),
            engine=str(raw["engine"]),
            rank=int(raw.get("rank", 0)),
            transfer_id=str(raw["transfer_id"]),
            name=str(raw["event"]),
            data=dict(raw.get("data") or {}),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"not a timeline line ({error!r}): {text[:120]!r}") from error


def read_folder(folder: Path) -> list[Event]:
    """Events of all ``*.jsonl`` files of a folder. A last line that was cut off by a kill is left out."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise TraceError(f"no timelines in {folder}: set transfer timelines (timeline_dir) and send a request")
    events: list[Event] = []
    for path in files:
        content = path.read_text(encoding="utf-8", errors="replace")
        lines = content.splitlines()
        for number, line in enumerate(lines, start=1):
            if not line.strip() or (number == len(lines) and not content.endswith("\n")):
                continue
            try:
                events.append(parse_line(line))
            except TraceError as error:
                raise TraceError(f"{path}, line {number}: {error}") from error
    return events


def group(events: Iterable[Event]) -> list[Transfer]:
    """Transfers in the order in which they began, each with aligned clocks."""
    by_id: dict[str, list[Event]] = {}
    for event in _steady(list(events)):
        if event.transfer_id:
            by_id.setdefault(event.transfer_id, []).append(event)
    transfers = [_aligned(transfer_id, found) for transfer_id, found in by_id.items()]
    return sorted(transfers, key=lambda transfer: transfer.start)


def _steady(events: list[Event]) -> list[Event]:
    """Times rebuilt from each writer's monotonic clock, so that a step of the wall clock cannot reorder them."""
    differences: dict[tuple[str, str, int], list[float]] = {}
    for event in events:
        differences.setdefault((event.role, event.engine, event.rank), []).append(event.at - event.mono)
    base = {writer: median(found) for writer, found in differences.items()}
    return [dataclasses.replace(e, at=e.mono + base[e.role, e.engine, e.rank]) for e in events]


#: Messages between the engines: (sender, event) is always before (receiver, event).
_DECODE_TO_PREFILL = (("reg_sent", "reg_received"),)
_PREFILL_TO_DECODE = (("commit_sent", "committed"),)
_SLACK_S = 0.05


def clock_offset(events: Iterable[Event]) -> float:
    """Seconds to add to decode's times to have them on prefill's clock; 0 when the clocks agree as far as one can tell.

    A message cannot arrive before it was sent. A registration (decode to prefill) therefore bounds the offset from
    above, a commit (prefill to decode) from below, as in NTP; between the bounds zero is kept when it is possible.
    A sender notes a message just after it has sent it, hence the slack: engines of one machine share their clock.
    """
    found = list(events)
    upper = _bounds(found, pairs=_DECODE_TO_PREFILL, sender="decode", receiver="prefill")
    lower = [-bound for bound in _bounds(found, pairs=_PREFILL_TO_DECODE, sender="prefill", receiver="decode")]
    low, high = max(lower, default=None), min(upper, default=None)
    if (low is None or low <= _SLACK_S) and (high is None or high >= -_SLACK_S):
        return 0.0
    if low is None or high is None:
        return high if low is None and high is not None else (low or 0.0)
    return (low + high) / 2


def _bounds(events: list[Event], *, pairs: tuple[tuple[str, str], ...], sender: str, receiver: str) -> list[float]:
    """Receiver's time minus sender's time of every message that both sides noted."""
    bounds = []
    for sent_name, received_name in pairs:
        sent = [e.at for e in events if e.role == sender and e.name == sent_name]
        received = [e.at for e in events if e.role == receiver and e.name == received_name]
        if sent and received:
            bounds.append(min(received) - min(sent))
    return bounds


def _aligned(transfer_id: str, events: list[Event]) -> Transfer:
    offset = clock_offset(events)
    moved = [dataclasses.replace(e, at=e.at + offset) if e.role == "decode" else e for e in events]
    return Transfer(
        transfer_id=transfer_id,
        events=tuple(sorted(moved, key=lambda event: event.at)),
        offsets={"decode": offset},
    )
