"""vllm-router (PyPI), the front that vLLM's own project offers for its stock connectors, as a process of ours.

One router for one pair. It drives both connectors the way pull needs it: the prefill leg first, then the decode leg
with what prefill answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, Self

import aiohttp

from prebook_bench.modes import EngineIdentity
from prebook_bench.rig import RigError

_START_TIMEOUT_S: Final = 30.0
_FIRST_PORT: Final = 8400


class RouterError(RuntimeError):
    """The router did not start or ended; the message carries the end of its log."""


def find() -> Path:
    """The `vllm-router` program: beside this Python, or on PATH. Raises RigError with what to install."""
    beside = Path(sys.executable).with_name("vllm-router")
    if beside.exists():
        return beside
    found = shutil.which("vllm-router")
    if found is None:
        raise RigError(
            "`vllm-router` was not found: install it (pip install vllm-router, in an environment of its own if you "
            "like) and have it on PATH, or use --front dispatch"
        )
    return Path(found)


def version() -> str:
    """Version of the router's package, asked of the Python that its program names. Raises what :func:`find` raises."""
    with find().open("rb") as program:
        first = program.readline().decode(errors="replace").strip()
    python = first.removeprefix("#!") if first.startswith("#!") else sys.executable
    code = "import importlib.metadata as m; print(m.version('vllm-router'))"
    said = subprocess.run([*python.split(), "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return said.stdout.strip() or "unknown"


def arguments(*, prefill: EngineIdentity, decode: EngineIdentity, host: str, port: int) -> list[str]:
    """The command line after the program. Pure."""
    return [
        "--vllm-pd-disaggregation",
        "--kv-connector=nixl",
        "--prefill",
        prefill.base_url,
        "--decode",
        decode.base_url,
        "--policy=round_robin",
        f"--host={host}",
        f"--port={port}",
        f"--prometheus-port={port + 1}",
        # A request that fails is counted here, not sent again behind our back.
        "--disable-retries",
        "--disable-circuit-breaker",
        "--log-level=warning",
    ]


class Router:
    """One running router."""

    def __init__(self, process: subprocess.Popen[bytes], *, base_url: str, log: Path) -> None:
        self.base_url = base_url
        self._process = process
        self._log = log

    @classmethod
    async def start(cls, *, prefill: EngineIdentity, decode: EngineIdentity, host: str, log: Path) -> Self:
        """Starts a router for a healthy pair and waits until it answers. Raises RouterError and RigError."""
        port = _FIRST_PORT + prefill.http_port % 1000
        command = [str(find()), *arguments(prefill=prefill, decode=decode, host=host, port=port)]
        router = cls(_spawn(command, log=log), base_url=f"http://{host}:{port}", log=log)
        try:
            await router._wait_healthy()
        except BaseException:
            router.stop()
            raise
        return router

    async def _wait_healthy(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while time.monotonic() < deadline:
                self.check_alive()
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"{self.base_url}/health") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.2)
        raise RouterError(f"vllm-router was not healthy after {_START_TIMEOUT_S:.0f} s\n{self._tail()}")

    def check_alive(self) -> None:
        """Raises RouterError when the router is gone."""
        if self._process.poll() is not None:
            raise RouterError(f"vllm-router ended with {self._process.returncode}\n{self._tail()}")

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the router, which is one process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def stop(self) -> None:
        """Ends it; kills it when it does not end in time."""
        self.send(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tail(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([f"--- end of {self._log}", *lines[-15:]])


def _spawn(command: list[str], *, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
