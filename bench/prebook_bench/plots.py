"""Plots of a report as SVG text: cumulative distributions, lines, and filled lanes over one axis of time. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

from prebook_bench import svg

#: Small enough that a phone, which scales the whole picture to its width, leaves the text readable.
_WIDTH: Final = 480.0
_HEIGHT: Final = 320.0
_LEFT: Final = 58.0
_RIGHT: Final = 22.0
_TOP: Final = 78.0
_BOTTOM: Final = 44.0
_INSIDE: Final = _WIDTH - _LEFT - _RIGHT
_TALL: Final = _HEIGHT - _TOP - _BOTTOM
_LANE: Final = 56.0
_LANE_GAP: Final = 26.0
_LANES_TOP: Final = 56.0


@dataclasses.dataclass(frozen=True)
class Series:
    """One named set of values, or of points (x, y)."""

    name: str
    colour: str
    values: Sequence[float] = ()
    points: Sequence[tuple[float, float]] = ()


def cdf(title: str, series: Sequence[Series], *, unit: str) -> str:
    """Share of values at or below x, one step line per series; x from 0 to the largest value."""
    shown = [s for s in series if s.values]
    top = svg.nice_ticks(max((max(s.values) for s in shown), default=1.0))
    body = _frame(title, x_ticks=top, x_label=unit, y_ticks=[0, 0.25, 0.5, 0.75, 1], y_format="{:.0%}")
    for one in shown:
        ordered = sorted(one.values)
        points = [(_x(ordered[0], top[-1]), _y(0, 1))]
        for index, value in enumerate(ordered):
            points.append((_x(value, top[-1]), points[-1][1]))
            points.append((_x(value, top[-1]), _y((index + 1) / len(ordered), 1)))
        body.append(svg.polyline(points, stroke=one.colour))
    return svg.document([*body, *_legend(shown)], width=_WIDTH, height=_HEIGHT, label=title)


def lines(title: str, series: Sequence[Series], *, x_label: str, y_label: str) -> str:
    """Points joined by lines, in the order of x, each with a dot that tells its value."""
    shown = [s for s in series if s.points]
    x_top = svg.nice_ticks(max((x for s in shown for x, _ in s.points), default=1.0))
    values = [y for s in shown for _, y in s.points] or [1.0]
    y_ticks = _through_zero(svg.nice_ticks(max(*values, 0.0)), lowest=min(values))
    body = _frame(f"{title}, {y_label}", x_ticks=x_top, x_label=x_label, y_ticks=y_ticks, y_format="{:g}")
    for one in shown:
        points = [(_x(x, x_top[-1]), _y(y, y_ticks[-1], low=y_ticks[0])) for x, y in sorted(one.points)]
        body.append(svg.polyline(points, stroke=one.colour))
        for (x, y), (value_x, value_y) in zip(points, sorted(one.points), strict=True):
            body.append(svg.dot(x, y, fill=one.colour, title=f"{one.name}: {value_y:.4g} at {value_x:g}"))
    return svg.document([*body, *_legend(shown)], width=_WIDTH, height=_HEIGHT, label=title)


def lanes(title: str, series: Sequence[Series], *, x_label: str, y_label: str) -> str:
    """One lane per series, filled from 0 up to its points, all to the same scales: for curves that would hide each
    other."""
    shown = [s for s in series if s.points]
    x_ticks = svg.nice_ticks(max((x for s in shown for x, _ in s.points), default=1.0))
    y_top = svg.nice_ticks(max((y for s in shown for _, y in s.points), default=1.0))[-1]
    bottom = _LANES_TOP + len(shown) * (_LANE + _LANE_GAP) - _LANE_GAP
    body = [svg.text(12, 22, f"{title}, {y_label}", size=15, extra='font-weight="600"')]
    for index, one in enumerate(shown):
        base = _LANES_TOP + index * (_LANE + _LANE_GAP) + _LANE
        for tick in (0.0, y_top):
            y = base - _LANE * tick / y_top
            body.append(svg.line(_LEFT, y, _WIDTH - _RIGHT, y))
            body.append(svg.text(_LEFT - 8, y + 4, f"{tick:g}", size=13, anchor="end", fill=svg.FAINT))
        outline = [(_x(x, x_ticks[-1]), base - _LANE * y / y_top) for x, y in sorted(one.points)]
        body.append(svg.area([(outline[0][0], base), *outline, (outline[-1][0], base)], fill=one.colour))
        body.append(svg.text(_LEFT, base - _LANE - 6, one.name, size=13.5))
    body += _x_axis(x_ticks, x_label, y=bottom)
    return svg.document(body, width=_WIDTH, height=bottom + _BOTTOM, label=title)


def _frame(title: str, *, x_ticks: Sequence[float], x_label: str, y_ticks: Sequence[float], y_format: str) -> list[str]:
    body = [svg.text(12, 22, title, size=15, extra='font-weight="600"')]
    for tick in y_ticks:
        y = _y(tick, y_ticks[-1], low=y_ticks[0])
        body.append(svg.line(_LEFT, y, _WIDTH - _RIGHT, y))
        body.append(svg.text(_LEFT - 8, y + 4, y_format.format(tick), size=13, anchor="end", fill=svg.FAINT))
    for tick in x_ticks:
        x = _x(tick, x_ticks[-1])
        body.append(svg.line(x, _TOP, x, _TOP + _TALL))
    return body + _x_axis(x_ticks, x_label, y=_TOP + _TALL)


def _x_axis(ticks: Sequence[float], label: str, *, y: float) -> list[str]:
    """Values and the name of an axis whose line is at y."""
    body = [
        svg.text(_x(tick, ticks[-1]), y + 18, f"{tick:g}", size=13, anchor="middle", fill=svg.FAINT) for tick in ticks
    ]
    return [*body, svg.text(_WIDTH - _RIGHT, y + 36, label, size=13, anchor="end", fill=svg.FAINT)]


def _legend(series: Sequence[Series]) -> list[str]:
    """Coloured squares with names, in as many rows as they need (the frame leaves room for two)."""
    body = []
    x, y = 12.0, 34.0
    for one in series:
        width = 26 + 7.6 * len(one.name)
        if x + width > _WIDTH and x > 12:
            x, y = 12.0, y + 19
        body.append(svg.rect(x, y, 12, 12, fill=one.colour, extra='rx="2"'))
        body.append(svg.text(x + 17, y + 11, one.name, size=13.5))
        x += width + 6
    return body


def _x(value: float, top: float) -> float:
    return _LEFT + _INSIDE * value / top


def _y(value: float, top: float, *, low: float = 0.0) -> float:
    return _TOP + _TALL * (1 - (value - low) / (top - low))


def _through_zero(ticks: Sequence[float], *, lowest: float) -> list[float]:
    """Ticks from 0 upwards, continued downwards in the same steps as far as the lowest value: differences of two noisy
    medians can be negative."""
    step = ticks[1] - ticks[0]
    below = math.ceil(max(0.0, -lowest) / step)
    return [*(-step * n for n in range(below, 0, -1)), *ticks]
