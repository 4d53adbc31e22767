"""One container process under its shim: start, orders, output, end. Exec probes and hooks run here too.

The output goes line by line to a callback and, unchanged, to the pod's log file.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prebook_operator.local import shim

_SHIM = str(Path(shim.__file__))
_LOOK_SECONDS = 0.5
LineSink = Callable[[str], None]


@dataclass(frozen=True)
class Command:
    """What to run: argv, the whole environment, and where."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str | None = None


class Process:
    """A running container process; made by ``start``."""

    def __init__(self, process: asyncio.subprocess.Process, output: asyncio.Task[None]) -> None:
        self._process = process
        self._output = output
        self._sessions: set[int] = set()  # the shim's children lead sessions of their own

    @property
    def pid(self) -> int:
        """Process id of the shim (the command is its child)."""
        return self._process.pid

    @classmethod
    async def start(cls, command: Command, *, on_line: LineSink) -> Process:
        """Starts ``command``; a command that cannot be executed ends at once with status 127 and says so in its
        output.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            "-B",
            _SHIM,
            *command.argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(command.env),
            cwd=command.cwd,
            start_new_session=True,
        )
        output = asyncio.create_task(_pump(process.stdout, on_line=on_line))
        return cls(process, output)

    async def wait(self) -> int:
        """Waits for the end and for the last of the output; returns the exit status (128 + signal)."""
        self._sessions |= _children(self._process.pid)
        waiting = asyncio.ensure_future(self._process.wait())
        try:
            while not (await asyncio.wait({waiting}, timeout=_LOOK_SECONDS))[0]:
                # The shim kills every descendant before it ends; unless it was killed itself (by hand, or for memory).
                # Then its command died with it, but what that left behind in its session holds its ports, and the pipe
                # that asyncio waits for, so that it is ended here.
                if (self._process.returncode or 0) < 0:
                    _end_sessions(self._sessions)
                else:
                    self._sessions |= _children(self._process.pid)
        finally:
            waiting.cancel()
        status = waiting.result()
        await self._output
        if self._process.stdin is not None:
            self._process.stdin.close()
        return status

    def terminate(self) -> None:
        """Sends SIGTERM to the command (not to its children), as a kubelet does."""
        self._order(b"T")

    def kill(self) -> None:
        """Ends the command and everything below it now."""
        self._order(b"K")

    def _order(self, order: bytes) -> None:
        if (
            self._process.returncode is None
            and self._process.stdin is not None
            and not self._process.stdin.is_closing()
        ):
            self._process.stdin.write(order)


def _children(pid: int) -> set[int]:
    try:
        return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    except OSError:
        return set()


def _end_sessions(leaders: set[int]) -> None:
    """Kills every process of these sessions; a session's id stays taken while it has members."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int(stat.read_text().rpartition(")")[2].split()[3]) in leaders:
                os.kill(int(stat.parent.name), signal.SIGKILL)


async def run_to_end(command: Command, *, within: float | None, on_line: LineSink) -> int | None:
    """Runs ``command``; returns its exit status, or None when it was killed because ``within`` seconds passed."""
    process = await Process.start(command, on_line=on_line)
    try:
        return await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(process.wait())), within)
    except TimeoutError:
        return None
    finally:
        process.kill()
        with contextlib.suppress(asyncio.CancelledError):
            await process.wait()


async def _pump(stream: asyncio.StreamReader | None, *, on_line: LineSink) -> None:
    if stream is None:
        return
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    rest = ""
    while chunk := await stream.read(65536):
        *lines, rest = (rest + decoder.decode(chunk)).split("\n")
        for line in lines:
            on_line(line.rstrip("\r"))
    rest += decoder.decode(b"", final=True)
    if rest:
        on_line(rest.rstrip("\r"))
