"""Helpers of the local runner's tests: manifests of fake engines, and the command line in a sandbox of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ENGINE = Path(__file__).with_name("runner_engine.py")


def stateful_set(
    role: str,
    *,
    replicas: int = 1,
    args: Sequence[str] = (),
    container: dict[str, Any] | None = None,
    spec: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A StatefulSet of fake engines called ``fake-<role>``."""
    field = {
        name: {"valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in (("POD_IP", "status.podIP"), ("POD_NAME", "metadata.name"))
    }
    env: list[dict[str, Any]] = [{"name": name, **source} for name, source in field.items()]
    env += [{"name": "ROLE", "value": role}, {"name": "PREFILL_ENGINE", "value": "engine-of-fake-prefill-0"}]
    engine = {
        "name": "engine",
        "command": ["python3", str(ENGINE)],
        "args": list(args),
        "ports": [{"name": "http", "containerPort": 8000}],
        "env": env,
        "startupProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 0.1, "failureThreshold": 200},
        "readinessProbe": {"httpGet": {"path": "/prebook/v1/ready", "port": "http"}, "periodSeconds": 0.1},
        **(container or {}),
    }
    pod = {"containers": [engine], "terminationGracePeriodSeconds": 5, **(spec or {})}
    template = {"metadata": {"labels": {"prebook.dev/role": role}}, "spec": pod}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": f"fake-{role}"},
        "spec": {"replicas": replicas, "serviceName": f"fake-{role}", "template": template},
    }


def front_service() -> dict[str, Any]:
    """The Service that selects decode pods."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "fake"},
        "spec": {"selector": {"prebook.dev/role": "decode"}, "ports": [{"port": 8000, "targetPort": "http"}]},
    }


def free_port() -> int:
    """A port of 127.0.0.1 that nobody holds now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], bool], *, seconds: float = 20.0, what: str = "condition") -> None:
    """Polls ``condition``; fails the test when it stays false."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not become true within {seconds:g} s")
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return False


@dataclass
class Sandbox:
    """``prebook`` with state, data and temporary folders below ``folder``; ``mark`` is in the environment of
    everything that it starts.
    """

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        """Environment of the command."""
        (self.folder / "tmp").mkdir(exist_ok=True)
        return {
            **os.environ,
            "XDG_STATE_HOME": str(self.folder / "state"),
            "XDG_DATA_HOME": str(self.folder / "data"),
            # TMPDIR is passed on to pods, so it also marks every process of this sandbox.
            "TMPDIR": str(self.folder / "tmp"),
        }

    def write(self, *documents: dict[str, Any], name: str = "model.yaml") -> Path:
        """A file with ``documents``."""
        path = self.folder / name
        path.write_text(yaml.safe_dump_all(documents))
        return path

    def argv(self, *arguments: object) -> list[str]:
        """The command's argv."""
        return [sys.executable, "-m", "prebook_operator.cli.main", *(str(argument) for argument in arguments)]

    def run(self, *arguments: object, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Runs ``prebook`` to its end."""
        return subprocess.run(
            self.argv(*arguments), env=self.env, capture_output=True, text=True, timeout=timeout, check=False
        )

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Starts ``prebook``; its output goes to a pipe."""
        return subprocess.Popen(
            self.argv(*arguments), env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def processes(self) -> list[int]:
        """Process ids of everything that was started in this sandbox and lives."""
        mark = f"TMPDIR={self.folder / 'tmp'}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0") and alive(int(entry.name)):
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it ended, or is not ours
        return found

    def leftovers(self) -> list[Path]:
        """Run folders that were not removed."""
        return list((self.folder / "tmp").glob("pb-*"))
