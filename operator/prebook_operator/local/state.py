"""What a run leaves on disk for other commands: one folder per model below ``$XDG_STATE_HOME/prebook``.

``lock`` is held (flock) for as long as the run lives, so "is it running" is the kernel's answer and not a guess
about process ids. ``state.json`` is replaced atomically. ``logs/`` holds one file per pod and stays after the run.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from prebook_operator.local.errors import UserError

RunPhase = Literal["starting", "ready", "stopping", "failed", "ended"]
RUN_FOLDER_PREFIX = "pb-"
_NAME = re.compile(r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")


class PodRow(BaseModel):
    """One pod as ``prebook ps`` and the live table show it. ``age`` in seconds since the phase began."""

    model_config = ConfigDict(frozen=True)

    name: str
    short: str
    role: str
    ip: str
    port: int
    phase: str
    reason: str = ""
    restarts: int = 0
    age: float = 0.0
    waiting_for: str = ""
    last_line: str = ""
    pid: int | None = None
    engine_id: str = ""
    pairs_ready: int | None = None
    pairs_possible: int | None = None
    requests: int | None = None


class RunState(BaseModel):
    """One run. ``digest`` identifies file and options, so that the same ``up`` finds its own run."""

    model_config = ConfigDict(frozen=True)

    name: str
    pid: int
    digest: str
    file: str
    host: str
    port: int
    phase: RunPhase
    error: str = ""
    run_folder: str
    started_at: float
    pods: tuple[PodRow, ...] = ()

    @property
    def endpoint(self) -> str:
        """Where clients go."""
        return f"http://{self.host}:{self.port}"


def state_root() -> Path:
    """``$XDG_STATE_HOME/prebook``, by default ``~/.local/state/prebook``."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "prebook"


def claims_root() -> Path:
    """Folders of persistent volume claims: ``$XDG_DATA_HOME/prebook/volumes``, by default below ``~/.local/share``."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "prebook" / "volumes"


class StateFolder:
    """The folder of one model's run."""

    def __init__(self, name: str, *, root: Path | None = None) -> None:
        if not _NAME.match(name):
            raise UserError(f"{name!r} is not a model's name")
        self.name = name
        self.path = (root or state_root()) / name
        self._lock: IO[bytes] | None = None

    @property
    def logs(self) -> Path:
        """Where the pods' log files are."""
        return self.path / "logs"

    @property
    def supervisor_log(self) -> Path:
        """Output of a detached run's supervisor."""
        return self.path / "supervisor.log"

    def read(self) -> RunState | None:
        """The last state written, or None when there is none (or one of another version)."""
        try:
            return RunState.model_validate_json((self.path / "state.json").read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def write(self, state: RunState) -> None:
        """Replaces the state atomically."""
        fresh = self.path / f".state.{os.getpid()}.tmp"
        fresh.write_text(state.model_dump_json())
        os.replace(fresh, self.path / "state.json")

    @property
    def running(self) -> bool:
        """Whether a run holds the lock."""
        try:
            with (self.path / "lock").open("rb") as handle:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def acquire(self) -> bool:
        """Takes the lock for this process and removes what a killed run left behind; False when another run holds
        it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        handle = (self.path / "lock").open("a+b")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.close()
            return False
        handle.truncate(0)
        handle.write(str(os.getpid()).encode())
        handle.flush()
        self._lock = handle
        self.sweep()
        return True

    @property
    def holder(self) -> int | None:
        """Process id of the run that holds the lock, or None."""
        if not self.running:
            return None
        text = (self.path / "lock").read_text()
        return int(text) if text.isdigit() else None

    def release(self) -> None:
        """Gives the lock back; may be called twice."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def sweep(self) -> None:
        """Removes the run folder that the last state names. Only to be called when no run holds the lock."""
        state = self.read()
        if state is not None and Path(state.run_folder).name.startswith(RUN_FOLDER_PREFIX):
            shutil.rmtree(state.run_folder, ignore_errors=True)


def known_runs(*, root: Path | None = None) -> Sequence[StateFolder]:
    """Every model that has a state folder, by name."""
    base = root or state_root()
    if not base.is_dir():
        return []
    return [StateFolder(path.name, root=base) for path in sorted(base.iterdir()) if (path / "state.json").is_file()]
