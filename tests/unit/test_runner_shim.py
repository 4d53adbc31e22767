"""The parent of a container process: status, orders, and nothing left behind. Real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prebook_operator.local import shim
from prebook_operator.local.process import Command, Process
from tests.unit.runner_support import alive, wait_until

SHIM = [sys.executable, "-I", "-S", str(Path(shim.__file__))]


def start(*argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*SHIM, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def order(process: subprocess.Popen[str], word: str) -> None:
    """Gives an order and leaves standard input open: its end would be an order too."""
    assert process.stdin is not None
    process.stdin.write(word)
    process.stdin.flush()


def child_of(process: subprocess.Popen[str]) -> int:
    """The process id that the command prints as its first word."""
    assert process.stdout is not None
    return int(process.stdout.readline().split()[0])


@pytest.mark.parametrize(
    ("script", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -15 $$", 143)]
)
def test_status_of_the_command_is_passed_on(script: str, status: int) -> None:
    process = start("sh", "-c", script)
    assert process.wait(10) == status


def test_command_that_does_not_exist_is_named() -> None:
    process = start("no-such-program")
    assert process.wait(10) == shim.NOT_FOUND
    assert process.stdout is not None
    assert "cannot start 'no-such-program'" in process.stdout.read()


def test_t_asks_the_command_and_k_does_not_ask() -> None:
    polite = start("sh", "-c", "trap 'echo bye; exit 3' TERM; echo $$; while :; do sleep 0.05; done")
    child_of(polite)
    order(polite, "T")
    assert polite.wait(10) == 3
    assert polite.stdout is not None
    assert polite.stdout.read() == "bye\n"
    deaf = start("sh", "-c", "trap '' TERM; echo $$; while :; do sleep 0.05; done")
    pid = child_of(deaf)
    order(deaf, "T")
    time.sleep(0.3)
    assert alive(pid)
    order(deaf, "K")
    assert deaf.wait(10) == 137
    assert not alive(pid)


def test_descendants_that_left_the_session_end_with_the_command() -> None:
    process = start("sh", "-c", "setsid sleep 300 & echo $!; exit 5")
    orphan = child_of(process)
    assert process.wait(10) == 5
    assert not alive(orphan)


def test_end_of_input_means_that_the_runner_is_gone() -> None:
    process = start("sh", "-c", "(setsid sh -c 'trap \"\" TERM; sleep 300' &) ; echo $$; sleep 300")
    pid = child_of(process)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(10) == 137
    assert not alive(pid)


def test_command_does_not_outlive_a_killed_shim() -> None:
    process = start("sh", "-c", "echo $$; exec sleep 300")
    pid = child_of(process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    wait_until(lambda: not alive(pid), what="death of the command")


def test_a_terminals_interrupt_is_not_the_commands_business() -> None:
    process = start("sh", "-c", "echo $$; exec sleep 300")
    pid = child_of(process)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.2)
    assert alive(pid)
    order(process, "K")
    assert process.wait(10) == 137


async def test_a_killed_shim_takes_the_whole_session_with_it(tmp_path: Path) -> None:
    """An engine's children outlive its API server; they would hold its ports, and the output pipe, for ever."""
    note = tmp_path / "pid"
    script = f"sh -c 'echo $$ > {note}; while :; do sleep 1; done' & wait"
    process = await Process.start(Command(["sh", "-c", script], env=dict(os.environ)), on_line=lambda line: None)
    await asyncio.to_thread(wait_until, lambda: note.exists() and note.read_text().strip(), what="the grandchild")
    grandchild = int(note.read_text())
    ended = asyncio.create_task(process.wait())
    await asyncio.sleep(0)  # the runner waits from the start on
    os.kill(process.pid, signal.SIGKILL)
    assert await asyncio.wait_for(ended, 10) < 0
    wait_until(lambda: not alive(grandchild), what="the end of the grandchild")
