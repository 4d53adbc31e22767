"""``prebook logs``: the output of a model's pods, also after they ended."""

from __future__ import annotations

import argparse
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from prebook_operator.local.detached import find_run
from prebook_operator.local.errors import UserError
from prebook_operator.local.state import StateFolder

if TYPE_CHECKING:
    from prebook_operator.cli.main import Subparsers

_POLL = 0.3


def register(subparsers: Subparsers) -> None:
    """Adds `logs`."""
    parser = subparsers.add_parser(
        "logs",
        help="show the output of a model's pods",
        description="Show the output of the pods of a model that `prebook up` runs or ran.",
    )
    parser.add_argument("name", metavar="NAME", help="the model's name, or its file")
    parser.add_argument("pod", metavar="POD", nargs="?", help="one pod, for example decode-0 (default: all)")
    parser.add_argument("--follow", "-f", action="store_true", help="go on until the run ends or Ctrl-C")
    parser.add_argument("--tail", type=int, metavar="N", help="only the last N lines of each pod")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the log files. Raises UserError when there are none, or no such pod."""
    state = find_run(arguments.name)
    files = _files(state, pod=arguments.pod)
    prefixed = len(files) > 1
    opened = {name: path.open(encoding="utf-8", errors="replace") for name, path in files.items()}
    try:
        for name, stream in opened.items():
            _print(name if prefixed else "", lines=deque(stream, maxlen=arguments.tail))
        while arguments.follow:
            alive = state.running
            for name, stream in opened.items():
                _print(name if prefixed else "", lines=deque(_whole_lines(stream)))
            if not alive:
                break
            time.sleep(_POLL)
    finally:
        for stream in opened.values():
            stream.close()
    return 0


def _files(state: StateFolder, *, pod: str | None) -> dict[str, Path]:
    found = state.read()
    known = {row.short: state.logs / f"{row.name}.log" for row in found.pods} if found is not None else {}
    present = {name: path for name, path in known.items() if path.is_file()}
    if not present:
        raise UserError(f"there are no logs of {state.name}", remedy="`prebook ps` shows what runs")
    if pod is None:
        return present
    matching = {name: path for name, path in present.items() if pod in {name, path.stem}}
    if not matching:
        raise UserError(f"{state.name} has no pod {pod!r}", remedy=f"one of: {', '.join(present)}")
    return matching


def _whole_lines(stream: TextIO) -> list[str]:
    """Lines that were completed since the last call; a line that is still being written stays for the next."""
    lines: list[str] = []
    while True:
        position = stream.tell()
        line = stream.readline()
        if not line.endswith("\n"):
            stream.seek(position)
            return lines
        lines.append(line)


def _print(prefix: str, *, lines: deque[str]) -> None:
    for line in lines:
        print(f"{prefix} | {line}" if prefix else line, end="" if line.endswith("\n") else "\n", flush=True)
