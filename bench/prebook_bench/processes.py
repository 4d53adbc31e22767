"""Process trees as /proc shows them: who belongs to an engine, how much CPU it has used, freezing and thawing it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterable
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class ProcessStat:
    """What this package needs of one line of /proc/PID/stat. `cpu_ticks` is user plus system time."""

    pid: int
    parent: int
    session: int
    cpu_ticks: int


def parse_stat(line: str) -> ProcessStat:
    """Parses a line of /proc/PID/stat (proc(5)). The name in parentheses may itself hold spaces and parentheses."""
    head, _, tail = line.rpartition(")")
    fields = tail.split()
    return ProcessStat(
        pid=int(head.split(" ", maxsplit=1)[0]),
        parent=int(fields[1]),
        session=int(fields[3]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
    )


def snapshot(proc: Path = Path("/proc")) -> list[ProcessStat]:
    """All processes of this machine; those that end while being read are left out."""
    found = []
    for entry in proc.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found.append(parse_stat((entry / "stat").read_text()))
    return found


def tree(root: int, processes: list[ProcessStat]) -> list[ProcessStat]:
    """`root`, all its descendants, and everything else in the session that it leads."""
    members = {root}
    grown = True
    while grown:
        fresh = {
            process.pid
            for process in processes
            if process.pid not in members and (process.parent in members or process.session == root)
        }
        members |= fresh
        grown = bool(fresh)
    return [process for process in processes if process.pid in members]


def cpu_seconds(root: int) -> float:
    """CPU seconds that the live processes of the tree have used so far."""
    return sum(process.cpu_ticks for process in tree(root, snapshot())) / os.sysconf("SC_CLK_TCK")


def pin(root: int, cores: Iterable[int]) -> None:
    """Binds every thread of the tree to `cores`."""
    wanted = set(cores)
    for process in tree(root, snapshot()):
        with contextlib.suppress(OSError):  # the process, or one of its threads, has ended
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), wanted)


def send(root: int, number: signal.Signals) -> None:
    """Sends a signal to every process of the tree."""
    for process in tree(root, snapshot()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
