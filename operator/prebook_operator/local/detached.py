"""Runs that other commands started: starting one in the background, finding it again, ending it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from prebook_operator.local.errors import LocalError, StartError, UserError
from prebook_operator.local.session import PAIR_TIMEOUT, Question, ask_and_tell
from prebook_operator.local.source import Source
from prebook_operator.local.state import RunState, StateFolder

_POLL = 0.2
# A run that was told to stop: seconds until it is killed. Above any grace period that the operator renders.
_STOP_TIMEOUT = 300.0
_KILL_TIMEOUT = 15.0


def start_detached(
    source: Source, *, state: StateFolder, arguments: Sequence[str], write: Callable[[str], None]
) -> RunState:
    """Starts a supervisor in the background and returns when all its pods are ready; ``write`` gets its progress lines.

    ``arguments`` are those of ``prebook up`` that make it a supervisor. Raises ``StartError`` when it ends before it
    is ready; an interrupt (Ctrl-C) ends it too.
    """
    state.path.mkdir(parents=True, exist_ok=True)
    log = state.supervisor_log
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "prebook_operator.cli.main", "up", str(source.path.absolute()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with log.open(encoding="utf-8", errors="replace") as lines:
            while True:
                ended = process.poll()
                write(lines.read())
                found = state.read()
                if ended is not None:
                    failure = StartError(f"{source.name} did not start", remedy=f"the whole output is in {log}")
                    failure.exit_code = ended or StartError.exit_code
                    raise failure
                if found is not None and found.pid == process.pid and found.phase == "ready":
                    return found
                time.sleep(_POLL)
    except KeyboardInterrupt:
        write("stopping\n")
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise


def reuse(source: Source, *, state: StateFolder, port: int | None, write: Callable[[str], None]) -> RunState:
    """The run of ``source`` that is up already, waited for until it is ready.

    Raises ``UserError`` when what runs under this name is another file, or listens on another port than the one
    asked for.
    """
    said = ""
    while True:
        if not state.running:
            raise StartError(
                f"{source.name} ended while it was waited for", remedy=f"`prebook logs {source.name}` shows why"
            )
        found = state.read()
        # Right after its start a run has not written its own state yet: what lies there is an older one's.
        if found is not None and found.pid == state.holder:
            _check_same(found, source=source, port=port)
            if found.phase == "ready":
                return found
            words = f"{source.name} is {found.phase}: " + ", ".join(f"{pod.short} {pod.phase}" for pod in found.pods)
            if words != said:
                write(words + "\n")
                said = words
        time.sleep(_POLL)


def ask_running(question: Question, *, state: StateFolder) -> None:
    """Asks a run of another process; raises ``AskError``."""

    def newest() -> RunState:
        found = state.read()
        if found is None:
            raise UserError(f"{state.name} has ended")
        return found

    _wait_paired(newest)
    asyncio.run(ask_and_tell(question, state=newest))


def _wait_paired(newest: Callable[[], RunState]) -> None:
    """A decode pod is ready before its pairs are, and would answer alone: gives them a moment."""
    deadline = time.monotonic() + PAIR_TIMEOUT
    while time.monotonic() < deadline:
        decodes = [pod for pod in newest().pods if pod.role == "decode"]
        if decodes and all(pod.pairs_possible and (pod.pairs_ready or 0) >= pod.pairs_possible for pod in decodes):
            return
        time.sleep(_POLL)


def end_run(state: StateFolder, *, now: bool, write: Callable[[str], None]) -> bool:
    """Ends a run and waits until nothing of it is left; ``now`` skips draining. False when it was not running."""
    holder = state.holder
    if holder is None:
        state.sweep()
        return False
    write(f"stopping {state.name}")
    os.kill(holder, signal.SIGTERM)
    if now:
        time.sleep(_POLL)  # two signals that arrive together would count as one
        _signal(holder, signal.SIGTERM)
    if not _wait_ended(state, seconds=_STOP_TIMEOUT):
        write(f"{state.name} did not end within {_STOP_TIMEOUT:.0f} s: killed")
        _signal(holder, signal.SIGKILL)
        if not _wait_ended(state, seconds=_KILL_TIMEOUT):
            raise LocalError(
                f"process {holder} of {state.name} does not end", remedy=f"look at it with: ps -fp {holder}"
            )
        state.sweep()
    return True


def find_run(word: str) -> StateFolder:
    """The state folder that ``word`` means: a model's name, or the file that holds it."""
    path = Path(word)
    if path.suffix in {".yaml", ".yml", ".json"} or path.is_file():
        from prebook_operator.local.source import read_source

        return StateFolder(read_source(path).name)
    return StateFolder(word)


def _check_same(found: RunState, *, source: Source, port: int | None) -> None:
    remedy = f"`prebook down {source.name}` ends it; then start this one"
    if found.digest != source.digest:
        raise UserError(
            f"{source.name} is running from another file or another version of it ({found.file})", remedy=remedy
        )
    if port is not None and port != found.port:
        raise UserError(f"{source.name} is running on port {found.port}, not {port}", remedy=remedy)


def _wait_ended(state: StateFolder, *, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while state.running:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL / 4)
    return True


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended meanwhile, which is what was wanted
