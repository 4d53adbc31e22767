"""Processes in groups of their own, written down on disk, so that whoever finds the folder can end them.

A process is identified by its id *and* its start time, because ids are reused; nothing else on the machine is ever
signalled.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

STOP_SECONDS = 10.0  # kube-apiserver and containerd end well within this after SIGTERM


class ProcessFailed(RuntimeError):
    """A program ended, or did not become ready, while it was needed."""


@dataclass(frozen=True)
class Running:
    """A started program. `start_ticks` is its start time in clock ticks since boot (field 22 of /proc/PID/stat)."""

    name: str
    pid: int
    start_ticks: int
    order: int
    log: str

    def alive(self) -> bool:
        """Whether the very process that was started still runs (a zombie does not)."""
        return start_ticks(self.pid) == self.start_ticks


def start_ticks(pid: int) -> int | None:
    """Start time of a live process, or None when there is none or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


class ProcessSet:
    """The processes of one folder. Records lie in `folder/run`, logs in `folder/log`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "run").mkdir(parents=True, exist_ok=True)
        (folder / "log").mkdir(parents=True, exist_ok=True)

    def start(self, name: str, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None) -> Running:
        """Start a program in a session and process group of its own; its output is appended to its log."""
        log = self.folder / "log" / f"{name}.log"
        with log.open("ab") as output:
            child = subprocess.Popen(
                [str(word) for word in argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=None if env is None else dict(env),
                cwd=self.folder,
                start_new_session=True,
            )
        ticks = start_ticks(child.pid)
        running = Running(name, child.pid, -1 if ticks is None else ticks, time.monotonic_ns(), str(log))
        self._children[name] = child
        self._record(name).write_text(json.dumps(asdict(running)))
        return running

    def all(self) -> list[Running]:
        """Everything recorded in the folder, latest first."""
        records = [Running(**json.loads(path.read_text())) for path in (self.folder / "run").glob("*.json")]
        return sorted(records, key=lambda running: running.order, reverse=True)

    def get(self, name: str) -> Running:
        """The record of one program. Raises ProcessFailed when it was never started or has been stopped."""
        try:
            return Running(**json.loads(self._record(name).read_text()))
        except FileNotFoundError:
            raise ProcessFailed(f"{name} is not running") from None

    def require(self, name: str) -> None:
        """Raise ProcessFailed with the end of its log unless the program still runs."""
        running = self.get(name)
        if not running.alive():
            raise ProcessFailed(f"{name} has ended; the end of its log:\n{self.tail(name)}")

    def tail(self, name: str, *, lines: int = 15) -> str:
        """The last lines of a program's log."""
        path = self.folder / "log" / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else "(no log)"

    def stop(self, name: str, *, kill: bool = False) -> None:
        """End one program and its group: SIGTERM, then SIGKILL after STOP_SECONDS (at once with `kill`)."""
        self._stop([self.get(name)], kill=kill)

    def stop_all(self) -> None:
        """End everything, latest first, so that nothing loses what it depends on before it ends."""
        for running in self.all():
            self._stop([running], kill=False)

    def _stop(self, group: Sequence[Running], *, kill: bool) -> None:
        for running in group:
            if running.alive():
                _signal_group(running, signal.SIGKILL if kill else signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for running in group:
            while running.alive():
                if time.monotonic() > deadline:
                    _signal_group(running, signal.SIGKILL)
                time.sleep(0.02)
            child = self._children.pop(running.name, None)
            if child is not None:
                child.wait()
            self._record(running.name).unlink(missing_ok=True)

    def _record(self, name: str) -> Path:
        return self.folder / "run" / f"{name}.json"


def _signal_group(running: Running, number: signal.Signals) -> None:
    try:
        os.killpg(running.pid, number)
    except ProcessLookupError:
        return  # it ended by itself between the look and the signal


def start_reaper(folder: Path) -> subprocess.Popen[bytes]:
    """Start a watcher that cleans up `folder` when this process dies without doing so (SIGKILL, OOM).

    The watcher holds the reading end of a pipe; closing it after a word means all is well, end-of-file without one
    means death.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "tests.kube.reaper", str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,
        cwd=Path(__file__).resolve().parents[2],
    )


def dismiss(reaper: subprocess.Popen[bytes]) -> None:
    """Tell the watcher that its folder is clean, and wait for its end."""
    if reaper.stdin is not None:
        reaper.stdin.write(b"done\n")
        reaper.stdin.close()
    reaper.wait(timeout=STOP_SECONDS)
