"""The small parent of one container process (run as a script, standard library only).

A container ends with its first process, and everything in it ends too; and nothing of a pod may outlive the runner,
not even when the runner is killed with SIGKILL. So the runner starts this shim instead of the command itself:

- it becomes the *subreaper*: descendants whose parent dies become its children, also those that made a session of
  their own;
- it starts the command in a new session, with a parent-death signal;
- it reads orders from its standard input: ``T`` sends SIGTERM to the command, ``K`` kills every descendant, end of
  file (the runner is gone) does too;
- when the command ends, it kills what the command left behind and exits with the command's status (128 + signal
  number when a signal ended it).
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
NOT_FOUND = 127


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def _descendants() -> list[int]:
    """Process ids of all living descendants, read from /proc (zombies are left out: they only wait for their
    parent).
    """
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as stat:
                state, parent = stat.read().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while the folder was read
        if state not in {"Z", "X"}:
            children.setdefault(int(parent), []).append(int(entry))
    found: list[int] = []
    queue = [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found.extend(below)
        queue.extend(below)
    return found


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # already gone, which is what was wanted


def _reap(main: int) -> int | None:
    """Collects every child that ended; returns the wait status of ``main`` when it was among them."""
    status_of_main = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status_of_main
        if pid == 0:
            return status_of_main
        if pid == main:
            status_of_main = status


def _kill_all(main: int) -> None:
    """Kills descendants until there are none; new ones that appear meanwhile are found by the next round."""
    while True:
        alive = _descendants()
        if not alive:
            break
        for pid in alive:
            _kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        _reap(main)


def _start(argv: list[str]) -> int:
    shim = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != shim:
            os._exit(128 + signal.SIGKILL)  # the shim ended between fork and prctl
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        os.write(2, f"cannot start {argv[0]!r}: {os.strerror(error.errno or errno.EIO)}\n".encode())
    finally:
        os._exit(NOT_FOUND)


def main(argv: list[str]) -> int:
    """Runs ``argv`` to its end; returns the exit status for the shim itself."""
    # Orders come over standard input only: a terminal's Ctrl-C is the runner's business.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe()
    for end in (wake_read, wake_write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    command = _start(argv)
    while True:
        ready, _, _ = select.select([0, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            status = _reap(command)
            if status is not None:
                _kill_all(command)
                return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        if 0 in ready:
            orders = os.read(0, 64)
            if not orders or b"K" in orders:
                _kill_all(command)
                return 128 + signal.SIGKILL
            if b"T" in orders:
                _kill(command, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
