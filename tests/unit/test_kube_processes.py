"""Processes of the test clusters: found again from disk, ended with their children, and never mistaken for others."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.kube.processes import ProcessFailed, ProcessSet, start_ticks


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while start_ticks(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    return start_ticks(pid) is None


def test_whoever_finds_the_folder_can_end_what_runs_in_it(tmp_path: Path) -> None:
    running = ProcessSet(tmp_path).start("sleeper", ["sleep", "300"])
    assert running.alive()
    finder = ProcessSet(tmp_path)
    assert [found.pid for found in finder.all()] == [running.pid]
    finder.stop_all()
    assert not running.alive()
    assert finder.all() == []


def test_children_end_with_their_group(tmp_path: Path) -> None:
    processes = ProcessSet(tmp_path)
    script = "import subprocess, time; print(subprocess.Popen(['sleep', '300']).pid, flush=True); time.sleep(300)"
    processes.start("parent", [sys.executable, "-c", script])
    deadline = time.monotonic() + 20
    while not (line := processes.tail("parent")).strip() and time.monotonic() < deadline:
        time.sleep(0.02)
    child = int(line)
    assert start_ticks(child) is not None
    processes.stop("parent")
    assert wait_until_gone(child)


def test_a_stubborn_process_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.kube.processes.STOP_SECONDS", 0.3)
    processes = ProcessSet(tmp_path)
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(300)"
    )
    running = processes.start("deaf", [sys.executable, "-c", script])
    deadline = time.monotonic() + 20
    while "deaf" not in processes.tail("deaf") and time.monotonic() < deadline:
        time.sleep(0.02)
    processes.stop("deaf")
    assert not running.alive()


def test_a_reused_process_id_is_left_alone(tmp_path: Path) -> None:
    """The record names this process's id with another start time: a stranger, as far as the record goes."""
    processes = ProcessSet(tmp_path)
    ended = processes.start("ended", ["true"])
    stranger = dataclasses.replace(ended, pid=os.getpid(), start_ticks=1)
    (tmp_path / "run" / "ended.json").write_text(json.dumps(dataclasses.asdict(stranger)))
    assert not stranger.alive()
    processes.stop_all()
    assert processes.all() == []


def test_an_ended_process_is_reported_with_its_last_words(tmp_path: Path) -> None:
    processes = ProcessSet(tmp_path)
    running = processes.start("broken", ["sh", "-c", "echo no such flag >&2; exit 1"])
    assert wait_until_gone(running.pid)
    with pytest.raises(ProcessFailed, match="no such flag"):
        processes.require("broken")
