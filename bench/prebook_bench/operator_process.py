"""A controller as a process of its own, and what /proc and its own endpoints say about it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from prebook_bench import machine


def until(what: str, check: Callable[[], bool], *, timeout: float, interval: float = 0.25) -> float:
    """Seconds until `check` holds. Raises TimeoutError."""
    started = time.monotonic()
    while not check():
        if time.monotonic() - started > timeout:
            raise TimeoutError(f"{what}: not within {timeout:.0f} s")
        time.sleep(interval)
    return time.monotonic() - started


class ControllerProcess:
    """A controller whose readiness is `/readyz` on port `health` of the loopback address."""

    def __init__(self, command: Sequence[str], *, health: int, log: Path, env: Mapping[str, str] | None = None) -> None:
        self.health = health
        self._log = open(log, "wb")  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, start_new_session=True, env={**os.environ, **(env or {})}
        )
        self.started = time.monotonic()

    def ready(self) -> bool:
        """Whether /readyz says so. Raises RuntimeError when the process has ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"the controller ended with {self.process.returncode}: see {self._log.name}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health}/readyz", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def memory(self) -> dict[str, int]:
        """Resident bytes now and at the highest."""
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        found = machine.meminfo(text)
        return {"now": found["VmRSS"], "peak": found["VmHWM"]}

    def cpu_seconds(self) -> float:
        """User and system time."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> float:
        """SIGTERM; seconds until the end."""
        started = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(timeout=30)
        self._log.close()
        return time.monotonic() - started


class OperatorProcess(ControllerProcess):
    """`prebook operator`."""

    def __init__(self, kubeconfig: Path) -> None:
        health, self.metrics = free_port(), free_port()
        super().__init__(
            [
                *(sys.executable, "-m", "prebook_operator.cli.main", "operator", "--all-namespaces"),
                *("--image", "localhost/prebook:bench", "--kubeconfig", str(kubeconfig), "--bind", "127.0.0.1"),
                *("--health-port", str(health), "--metrics-port", str(self.metrics), "--log-level", "warning"),
            ],
            health=health,
            log=kubeconfig.parent / f"operator-{health}.log",
        )

    def queue_depth(self) -> float:
        """Models that wait for a worker."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=10) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith("prebook_queue_depth "):
                    return float(line.split()[1])
        return 0.0


def free_port() -> int:
    """A port of the loopback address that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
