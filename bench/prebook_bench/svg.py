"""The few SVG elements that pictures and plots here are made of. Every text goes through escaping. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
#: Colours that stay apart for colour-blind readers too (Okabe and Ito 2008), in the order in which series take them.
PALETTE: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK: Final = "#1f2933"
FAINT: Final = "#8795a1"
GRID: Final = "#e1e7ec"


def number(value: float) -> str:
    """A coordinate: two decimals at most, no trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def rect(x: float, y: float, width: float, height: float, *, fill: str, title: str = "", extra: str = "") -> str:
    """A rectangle; `title` is shown by browsers when the pointer rests on it."""
    head = f'<rect x="{number(x)}" y="{number(y)}" width="{number(max(width, 0.75))}" height="{number(height)}"'
    inner = f"<title>{escape(title)}</title>" if title else ""
    return f'{head} fill="{fill}" {extra}>{inner}</rect>'


def text(
    x: float, y: float, content: str, *, size: float = 12, anchor: str = "start", fill: str = INK, extra: str = ""
) -> str:
    """One line of text with its baseline at y."""
    return (
        f'<text x="{number(x)}" y="{number(y)}" font-size="{number(size)}" text-anchor="{anchor}" fill="{fill}" '
        f"{extra}>{escape(content)}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float, *, stroke: str = GRID, width: float = 1, extra: str = "") -> str:
    """A straight line."""
    return (
        f'<line x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}" stroke="{stroke}" '
        f'stroke-width="{number(width)}" {extra}/>'
    )


def polyline(points: Sequence[tuple[float, float]], *, stroke: str, width: float = 2) -> str:
    """An open line through points."""
    path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{number(width)}"/>'


def area(points: Sequence[tuple[float, float]], *, fill: str) -> str:
    """A filled shape, closed from the last point to the first."""
    path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return f'<polygon points="{path}" fill="{fill}"/>'


def dot(x: float, y: float, *, fill: str, radius: float = 3.5, title: str = "") -> str:
    """A filled circle."""
    inner = f"<title>{escape(title)}</title>" if title else ""
    return f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" fill="{fill}">{inner}</circle>'


def document(body: Sequence[str], *, width: float, height: float, label: str) -> str:
    """A whole SVG on a white background that scales with its container. `label` is read out by screen readers."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {number(width)} {number(height)}" '
        f'width="100%" style="max-width:{number(width)}px" role="img" aria-label="{escape(label)}" '
        f'font-family="{escape(FONT)}">\n'
        f'<rect width="{number(width)}" height="{number(height)}" rx="8" fill="#ffffff"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def nice_ticks(top: float, *, about: int = 5) -> list[float]:
    """Round tick values from 0 to at least `top`: steps of 1, 2 or 5 times a power of ten."""
    if top <= 0:
        return [0.0, 1.0]
    raw = top / about
    power = 1.0
    while power > raw:
        power /= 10
    while power * 10 <= raw:
        power *= 10
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    count = 1
    while count * step < top * (1 - 1e-9):
        count += 1
    return [round(index * step, 12) for index in range(count + 1)]
