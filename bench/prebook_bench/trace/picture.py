"""One transfer as an SVG picture: lanes for client, prefill, link and decode over a time axis. Pure."""

from __future__ import annotations

from typing import Final

from prebook_bench import svg
from prebook_bench.trace.spans import LANES, Lane, Story

_WIDTH: Final = 900.0
_LEFT: Final = 96.0
_RIGHT: Final = 28.0
_TOP: Final = 64.0
_LANE: Final = 62.0
_BAR: Final = 26.0
_COLOURS: Final = {"wait": "#cbd2d9", "chunk": svg.PALETTE[0], "write": svg.PALETTE[1], "booked": svg.PALETTE[2]}
#: Bold text on a white outline, so that lines below it do not cross it out.
_HALO: Final = 'font-weight="600" paint-order="stroke" stroke="#ffffff" stroke-width="4"'
_LABELS: Final[dict[Lane, tuple[str, str]]] = {
    "client": ("client", "waits"),
    "prefill": ("prefill", "computes"),
    "link": ("link", "KV WRITEs"),
    "decode": ("decode", "blocks booked"),
}


class _Scale:
    """Seconds to x."""

    def __init__(self, story: Story) -> None:
        self.zero = story.start
        length = max((story.end - story.start) * 1e3, 1e-3)
        self.ticks = [tick for tick in svg.nice_ticks(length, about=8) if tick <= length]
        self._per_ms = (_WIDTH - _LEFT - _RIGHT) / length

    def x(self, at: float) -> float:
        """x of a time."""
        return _LEFT + (at - self.zero) * 1e3 * self._per_ms


def picture(story: Story) -> str:
    """The SVG text."""
    lanes = [lane for lane in LANES if any(span.lane == lane for span in story.spans)]
    rows = {lane: _TOP + index * _LANE for index, lane in enumerate(lanes)}
    bottom = _TOP + len(lanes) * _LANE
    scale = _Scale(story)
    body = [_heading(story), *_axis(scale, bottom=bottom)]
    for lane in lanes:
        body += _lane(lane, story=story, y=rows[lane], scale=scale)
    body += _messages(story, rows=rows, scale=scale)
    body += _verdict(story, rows=rows, scale=scale, bottom=bottom)
    return svg.document(body, width=_WIDTH, height=bottom + 62, label=_summary(story))


def _summary(story: Story) -> str:
    parts = [f"One request, {story.tokens} prompt tokens" if story.tokens else "One request"]
    if story.pushed_bytes:
        parts.append(f"{story.pushed_bytes / 1e6:.1f} MB of KV pushed")
    return ", ".join(parts)


def _heading(story: Story) -> str:
    return svg.text(_LEFT, 26, _summary(story), size=14, extra='font-weight="600"')


def _axis(scale: _Scale, *, bottom: float) -> list[str]:
    body = []
    for tick in scale.ticks:
        x = scale.x(scale.zero + tick / 1e3)
        body.append(svg.line(x, _TOP - 14, x, bottom))
        body.append(svg.text(x, bottom + 16, f"{tick:g}", size=11, anchor="middle", fill=svg.FAINT))
    body.append(svg.text(_WIDTH - _RIGHT, bottom + 32, "milliseconds", size=11, anchor="end", fill=svg.FAINT))
    return body


def _lane(lane: Lane, *, story: Story, y: float, scale: _Scale) -> list[str]:
    title, subtitle = _LABELS[lane]
    body = [
        svg.text(14, y + 13, title, size=13, extra='font-weight="600"'),
        svg.text(14, y + 28, subtitle, size=11, fill=svg.FAINT),
    ]
    spans = [span for span in story.spans if span.lane == lane]
    for number, span in enumerate(spans):
        # WRITEs that overlap are drawn half a bar apart, so that both can be seen.
        half = lane == "link"
        offset = (number % 2) * _BAR / 2 if half else 0
        x, width = scale.x(span.start), scale.x(span.end) - scale.x(span.start)
        colour = _COLOURS.get(span.kind, svg.FAINT)
        # A white edge keeps neighbours apart; a sliver would vanish under it.
        edge = 'stroke="#ffffff" stroke-width="1" rx="2"' if width > 4 else ""
        height = _BAR / 2 if half else _BAR
        body.append(svg.rect(x, y + offset, max(width, 1.5), height, fill=colour, title=span.name, extra=edge))
        if span.kind in ("wait", "booked") and width > 90:
            fill = svg.INK if span.kind == "wait" else "#ffffff"
            body.append(svg.text(x + 8, y + _BAR / 2 + 4, span.name, size=12, fill=fill))
    for mark in story.marks:
        if mark.lane == lane and mark.kind == "write_landed":
            x = scale.x(mark.at)
            body.append(svg.line(x, y + _BAR - 7, x, y + _BAR, stroke="#ffffff", width=1.5))
    return body


def _messages(story: Story, *, rows: dict[Lane, float], scale: _Scale) -> list[str]:
    body = []
    for message in story.messages:
        if message.source not in rows or message.target not in rows:
            continue
        down = rows[message.target] > rows[message.source]
        y1 = rows[message.source] + (_BAR if down else 0)
        y2 = rows[message.target] + (0 if down else _BAR)
        x1, x2 = scale.x(message.sent), scale.x(message.received)
        body.append(svg.line(x1, y1, x2, y2, stroke=svg.INK, width=1.4, extra='stroke-dasharray="4 3"'))
        body.append(svg.dot(x2, y2, fill=svg.INK, radius=3, title=f"{message.name} received"))
        near_end = max(x1, x2) > _WIDTH - 140
        anchor, label_x = ("end", min(x1, x2) - 7) if near_end else ("start", max(x1, x2) + 7)
        label_y = (rows["link"] if "link" in rows else (y1 + y2) / 2) + _BAR + 20
        body.append(svg.text(label_x, label_y, message.name, size=11, anchor=anchor, extra=_HALO))
    return body


def _verdict(story: Story, *, rows: dict[Lane, float], scale: _Scale, bottom: float) -> list[str]:
    """What the picture shows, in words with the figures of this very request."""
    body = []
    finished = next((mark for mark in story.marks if mark.kind == "prefill_finished"), None)
    if finished and "prefill" in rows:
        x = scale.x(finished.at)
        body.append(svg.line(x, rows["prefill"] - 6, x, bottom, stroke=svg.PALETTE[0], extra='stroke-dasharray="2 3"'))
        body.append(
            svg.text(x - 5, rows["prefill"] - 9, "prefill finished", size=11, anchor="end", fill=svg.PALETTE[0])
        )
    words = []
    if story.lead is not None:
        when = "before" if story.lead >= 0 else "after"
        words.append(f"booked {abs(story.lead) * 1e3:.0f} ms {when} prefill finished")
    if story.exposed is not None:
        words.append(f"KV complete {story.exposed * 1e3:.0f} ms after its last chunk settled")
    if words:
        body.append(svg.text(_LEFT, bottom + 50, "; ".join(words), size=12))
    return body
