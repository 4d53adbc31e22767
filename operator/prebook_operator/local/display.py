"""What a person sees of a run: a live table on a terminal, plain lines elsewhere, and the pods' logs with a coloured
prefix.

Both displays get the same calls. On a terminal the table is the last thing on the screen: it is taken away before a
line is printed and drawn again after it. Elsewhere (a pipe, CI) a line appears when a pod's phase changes, and every
few seconds for a pod that is still awaited.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TextIO

from prebook_operator.local.state import PodRow, RunState

_COLOURS = ("36", "35", "33", "32", "34", "96", "95", "93")
_HEARTBEAT = 10.0
_REDRAW = 0.25


class Display(Protocol):
    """Where a run tells what happens."""

    def line(self, text: str) -> None:
        """One line of the runner itself."""

    def log(self, pod: str, line: str) -> None:
        """One line of a pod's output."""

    def state(self, state: RunState) -> None:
        """The newest state."""

    def pause(self) -> None:
        """Somebody else writes to the terminal now: no table and no pod output from here on."""


def make_display(stream: TextIO, *, logs: bool) -> Display:
    """The display that fits ``stream``; ``logs`` says whether the pods' output is shown."""
    return TerminalDisplay(stream, logs=logs) if stream.isatty() else PlainDisplay(stream, logs=logs)


class PlainDisplay:
    """Lines only."""

    def __init__(self, stream: TextIO, *, logs: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._logs = logs
        self._clock = clock
        self._phases: dict[str, str] = {}
        self._said: dict[str, float] = {}
        self._paused = False

    def line(self, text: str) -> None:
        """Prints one line."""
        print(text, file=self._stream, flush=True)

    def log(self, pod: str, line: str) -> None:
        """Prints a pod's line when logs are shown."""
        if self._logs and not self._paused:
            self.line(f"{pod} | {line}")

    def state(self, state: RunState) -> None:
        """Prints what changed, and what is still awaited."""
        now = self._clock()
        for pod in state.pods:
            changed = self._phases.get(pod.short) != pod.phase
            awaited = bool(pod.waiting_for) and state.phase == "starting"
            if changed or (awaited and now - self._said[pod.short] >= _HEARTBEAT):
                self._phases[pod.short] = pod.phase
                self._said[pod.short] = now
                self.line(describe(pod, heartbeat=not changed))

    def pause(self) -> None:
        """Keeps the pods' output out of what follows."""
        self._paused = True


class TerminalDisplay:
    """A live table below scrolling lines."""

    def __init__(self, stream: TextIO, *, logs: bool) -> None:
        self._stream = stream
        self._logs = logs
        self._rows: list[str] = []
        self._drawn = 0
        self._last_draw = 0.0
        self._paused = False

    def line(self, text: str) -> None:
        """Prints one line above the table."""
        self._clear()
        self._stream.write(text + "\n")
        self._draw()

    def log(self, pod: str, line: str) -> None:
        """Prints a pod's line when logs are shown."""
        if self._logs and not self._paused:
            colour = _COLOURS[sum(pod.encode()) % len(_COLOURS)]
            self.line(f"\x1b[{colour}m{pod} |\x1b[0m {line}")

    def state(self, state: RunState) -> None:
        """Draws the table again when it changed or a second passed."""
        if self._paused:
            return
        width = shutil.get_terminal_size().columns
        footer = f"  {state.endpoint}  {state.phase}  (Ctrl-C ends it)"
        rows = [row[:width] for row in (*table(state.pods), footer)]
        since = time.monotonic() - self._last_draw
        if since < _REDRAW or (rows == self._rows and since < 1):
            return
        self._clear()
        self._rows = rows
        self._draw()

    def pause(self) -> None:
        """Takes the table away for good."""
        self._clear()
        self._rows = []
        self._paused = True
        self._stream.flush()

    def _clear(self) -> None:
        if self._drawn:
            self._stream.write(f"\x1b[{self._drawn}F\x1b[J")
            self._drawn = 0

    def _draw(self) -> None:
        if self._rows:
            self._stream.write("\n".join(self._rows) + "\n")
            self._drawn = len(self._rows)
        self._last_draw = time.monotonic()
        self._stream.flush()


def describe(pod: PodRow, *, heartbeat: bool) -> str:
    """One plain line about a pod: its phase, or what it is waited for."""
    if not pod.waiting_for:
        return f"{pod.short}: {pod.phase}"
    if not heartbeat:
        return f"{pod.short}: {pod.phase}: {pod.waiting_for}"
    last = f" | {pod.last_line}" if pod.last_line else ""
    return f"waiting for {pod.short}: {pod.waiting_for}… ({pod.age:.0f} s){last}"


def table(pods: Sequence[PodRow]) -> list[str]:
    """Header and one line per pod: pod, state, age, pairs, requests, restarts, address, and what it waits for."""
    rows = [("POD", "STATE", "AGE", "PAIRS", "REQUESTS", "RESTARTS", "ADDRESS", "")]
    for pod in pods:
        pairs = "-" if pod.pairs_ready is None else f"{pod.pairs_ready}/{pod.pairs_possible}"
        requests = "-" if pod.requests is None else str(pod.requests)
        address = f"{pod.ip}:{pod.port}"
        state = (pod.short, pod.phase, age(pod.age))
        rows.append((*state, pairs, requests, str(pod.restarts), address, pod.waiting_for))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def age(seconds: float) -> str:
    """A duration as kubectl prints it: 42s, 3m10s, 2h5m."""
    whole = int(seconds)
    if whole < 120:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60}s"
    return f"{whole // 3600}h{whole % 3600 // 60}m"
