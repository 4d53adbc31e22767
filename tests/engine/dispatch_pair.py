"""Engines with the dispatcher in front, for the tests of one decode pod and its prefill pods."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from prebook_operator.local.models import ensure_model
from tests.engine.pair import Engine, EngineSpec, engines, wait_for

CONNECTORS = {"prebook": "PrebookConnector", "nixl-push": "NixlPushConnector", "nixl-pull": "NixlConnector"}
MODEL = "tiny"


@dataclass
class Front:
    """A decode pod with its dispatcher, its prefill pods, and clients for them."""

    decode: Engine
    prefills: list[Engine]
    token: str

    def client(self) -> openai.OpenAI:
        """OpenAI's client on the decode pod, without its own retries, so that every error shows."""
        return openai.OpenAI(base_url=f"{self.decode.url}/v1", api_key="none", max_retries=0, timeout=120)

    def status(self) -> dict[str, Any]:
        """The decode pod's status document."""
        document: dict[str, Any] = self.decode.client.get("/prebook/v1/status").json()
        return document

    def at_rest(self, seconds: float = 30.0) -> dict[str, Any]:
        """The decode pod's status document once no request is under way there.

        For whatever is counted: a client has its last byte a moment before its request has been counted, so a status
        read right after an answer may still lack it, and so may one that a later count is compared with.
        """
        wait_for("a dispatcher at rest", lambda: self.status()["in_flight"]["requests"] == 0, seconds)
        return self.status()

    def wait_ready(self, count: int, seconds: float = 60.0) -> None:
        """Waits until that many pairs are ready."""
        wait_for(f"{count} pairs ready", lambda: self.status()["pairs"]["ready"] == count, seconds)

    def metric(self, name: str, **labels: str) -> float:
        """A metric of the decode pod, summed over the label sets that include ``labels``."""
        total = 0.0
        for line in self.decode.client.get("/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            plain = series.partition("{")[0]
            if plain == name and all(f'{key}="{want}"' in series for key, want in labels.items()):
                total += float(value)
        return total


def kv_usage(engine: Engine) -> float:
    """Share of the KV blocks in use, as the engine's scheduler says on its control socket."""
    folder = json.loads(engine.spec.env["PREBOOK_DISPATCH"])["control_dir"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(f"{folder}/scheduler-0.sock")
        connection.sendall(b'{"op":"status"}\n')
        return float(json.loads(connection.makefile("rb").readline())["kv_usage"])


def spec(role: str, mode: str, root: Path, *, peers: str, model: Path, timing: dict[str, float] | None = None,
         **dispatch: Any) -> EngineSpec:  # fmt: skip
    """One engine with the dispatcher loaded the way the operator loads it."""
    made = EngineSpec(role=role, model=model, connector=CONNECTORS[mode], dtype="float32",
                      args=["--middleware", "prebook_connector.dispatch.DispatchMiddleware",
                            "--no-enable-prefix-caching", "--max-num-batched-tokens", "512",
                            "--max-model-len", "4096"])  # fmt: skip
    if role == "decode" and dispatch.get("first_token") == "prefill":
        made.args = [*made.args, "--logits-processors", "prebook_connector.first_token:FirstTokenProcessor"]
    control = root / f"run-{made.host}"
    made.settings = {"control_dir": str(control)}
    # Log probabilities would be compiled with a C++ compiler at their first use, which takes minutes here.
    made.env = {"TORCHDYNAMO_DISABLE": "1", "PREBOOK_DISPATCH": json.dumps({
        "role": role, "mode": mode, "peers": peers, "token_file": str(root / "token"), "revision": "r1",
        "control_dir": str(control), "local_prefill_max_tokens": 16, "on_failure": "recompute", "lease_seconds": 20,
        "side_channel_host": made.host, "side_channel_port": 5600, "served_model": "m", "bind": f"{made.host}:8000",
        "timing": timing or {}, **dispatch,
    })}  # fmt: skip
    return made


@contextlib.contextmanager
def front(mode: str, root: Path, *, prefills: int = 1, **dispatch: Any) -> Iterator[Front]:
    """Starts one decode pod and some prefill pods that find each other through files."""
    model = ensure_model(MODEL)
    (root / "token").write_text(secrets.token_hex(16))
    sources = {role: root / f"{role}.json" for role in ("prefill", "decode")}
    ps = [spec("prefill", mode, root, peers=f"file://{sources['decode']}", model=model, **dispatch)
          for _ in range(prefills)]  # fmt: skip
    d = spec("decode", mode, root, peers=f"file://{sources['prefill']}", model=model, **dispatch)
    sources["prefill"].write_text(json.dumps([f"{p.host}:8000" for p in ps]))
    sources["decode"].write_text(json.dumps([f"{d.host}:8000"]))
    with engines(d, *ps) as started:
        pod = Front(started[0], started[1:], (root / "token").read_text())
        pod.wait_ready(prefills)
        yield pod


def stream(response: httpx.Response) -> Iterator[tuple[float, str]]:
    """Lines of a server-sent stream with the moment at which each arrived."""
    for line in response.iter_lines():
        if line:
            yield time.monotonic(), line
