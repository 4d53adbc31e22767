"""Starts real engines for the tests and talks to them: without the dispatcher, so that a test controls both legs."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

START_SECONDS = 420.0
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_addresses = itertools.count(20 + os.getpid() % 100)


@dataclass
class EngineSpec:
    """How to start one engine. ``role``: prefill, decode or single (no connector)."""

    role: str
    model: Path
    settings: dict[str, Any] = field(default_factory=dict)
    args: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict)
    tp: int = 1
    connector: str = "PrebookConnector"
    host: str = ""
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self.host:
            self.host = f"127.0.{3 + os.getpid() % 200}.{next(_addresses) % 250 + 2}"


class Engine:
    """One vLLM API server on a loopback address of its own."""

    def __init__(self, spec: EngineSpec, folder: Path) -> None:
        self.spec = spec
        self.folder = folder
        self.url = f"http://{spec.host}:8000"
        self.port = 5600
        self.process: subprocess.Popen[bytes] | None = None
        self.client = httpx.Client(base_url=self.url, timeout=300.0)

    def start(self) -> Engine:
        """Starts the process; see :meth:`wait`."""
        spec = self.spec
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(spec.model),
            "--served-model-name", "m", "--host", spec.host, "--port", "8000", "--enforce-eager", "--dtype", spec.dtype,
            "--tensor-parallel-size", str(spec.tp), "--no-enable-log-requests", *spec.args,
        ]  # fmt: skip
        if spec.tp == 1:
            # One process less to start. By its name "uni", the CPU platform would make "mp" of it.
            command += ["--distributed-executor-backend", UNIPROC]
        if spec.role != "single":
            extra: dict[str, Any] = {"backends": ["UCX"]}
            if spec.connector == "PrebookConnector":
                extra["prebook"] = {"control_dir": str(self.folder / "run"), "min_bytes": 0, **spec.settings}
            config = {
                "kv_connector": spec.connector,
                "kv_role": "kv_producer" if spec.role == "prefill" else "kv_consumer",
                "kv_buffer_device": "cpu",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            }
            if spec.connector == "PrebookConnector":
                config["kv_connector_module_path"] = "prebook_connector.connector"
            command += ["--kv-transfer-config", json.dumps(config)]
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "UCX_TLS": "tcp,self",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": spec.host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.port),
            "VLLM_SERVER_DEV_MODE": "1",
            **spec.env,
        }
        self.log = self.folder / "log.txt"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        return self

    def wait(self) -> Engine:
        """Waits until it serves; raises with the end of the log when it does not."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                break
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/health").status_code == 200:
                    return self
            time.sleep(0.5)
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-120:])
        self.stop()
        raise RuntimeError(f"{self.spec.role} engine did not start:\n{tail}")

    def signal(self, number: int) -> None:
        """Sends a signal to the whole process group."""
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def stop(self) -> None:
        """Ends the process group."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
        self.process.wait()
        self.process = None

    def control(self, request: dict[str, Any], name: str = "worker-0-0-0.sock") -> dict[str, Any]:
        """One exchange over a control socket."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(10)
            connection.connect(str(self.folder / "run" / name))
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer: dict[str, Any] = json.loads(connection.makefile("rb").readline())
            return answer

    def status(self) -> dict[str, Any]:
        """The worker's status."""
        return self.control({"op": "status"})

    @property
    def engine_id(self) -> str:
        """vLLM's id of this run of the engine."""
        return str(self.status()["engine_id"])

    def kv_usage(self) -> float:
        """Share of the KV blocks that are in use (prefix cache that nobody holds does not count)."""
        return float(self.control({"op": "status"}, "scheduler-0.sock")["kv_usage"])

    def peer(self) -> dict[str, Any]:
        """This engine as the dispatcher would list it."""
        return {"engine_id": self.engine_id, "host": self.spec.host, "port": self.port, "tp_size": self.spec.tp}

    def complete(
        self, prompt: Sequence[int], *, max_tokens: int, params: dict[str, Any] | None = None, **body: Any
    ) -> httpx.Response:
        """One greedy completion of token ids; the answer carries token ids back."""
        payload = {
            "model": "m", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **body,
        }  # fmt: skip
        if params is not None:
            payload["kv_transfer_params"] = params
        return self.client.post("/v1/completions", json=payload)


def tokens_of(response: httpx.Response) -> list[int]:
    """The generated token ids."""
    response.raise_for_status()
    return list(response.json()["choices"][0]["token_ids"])


class Pair:
    """One prefill and one decode engine."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill = prefill
        self.decode = decode

    def warm(self, seconds: float = 30.0) -> None:
        """Tells both about each other and waits for the handshake."""
        self.prefill.control({"op": "peers", "peers": [self.decode.peer()]})
        self.decode.control({"op": "peers", "peers": [self.prefill.peer()]})
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pairs = self.decode.status()["pairs"].get(self.prefill.engine_id, {})
            if pairs.get("state") == "ready":
                return
            time.sleep(0.05)
        raise RuntimeError(f"pair not ready: {self.decode.status()} {self.prefill.status()}")

    def decode_params(self, transfer_id: str) -> dict[str, Any]:
        """kv_transfer_params of the decode leg."""
        peer = self.prefill.peer()
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer_id,
            "remote_engine_id": peer["engine_id"], "remote_host": peer["host"], "remote_port": peer["port"],
            "tp_size": peer["tp_size"],
        }  # fmt: skip

    @staticmethod
    def prefill_params(transfer_id: str) -> dict[str, Any]:
        """kv_transfer_params of the prefill leg."""
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}

    def account(self, transfer_id: str) -> dict[str, Any]:
        """Decode's account of a transfer."""
        return self.decode.control({"op": "transfer", "transfer_id": transfer_id})


def new_id() -> str:
    """A transfer id."""
    return uuid.uuid4().hex


def wait_for(what: str, condition: Any, seconds: float = 30.0) -> None:
    """Polls until ``condition()`` is true; raises with ``what`` otherwise."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(f"still not after {seconds:.0f} s: {what}")


@contextlib.contextmanager
def engines(*specs: EngineSpec) -> Iterator[list[Engine]]:
    """Starts engines side by side and stops them at the end."""
    with tempfile.TemporaryDirectory(prefix="prebook-engines-") as root:
        started = [Engine(spec, Path(root) / f"{index}-{spec.role}") for index, spec in enumerate(specs)]
        try:
            for engine in started:
                engine.start()
            for engine in started:
                engine.wait()
            yield started
        finally:
            for engine in started:
                engine.stop()
