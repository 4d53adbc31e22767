"""The ways of moving KV that are compared, as vLLM's own command-line flags. Pure values."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any, Final

_SIDE_CHANNEL_PORT: Final = 5600
_HTTP_PORT: Final = 8000


class Mode(enum.StrEnum):
    """What connects prefill and decode."""

    PULL = "pull"
    PUSH = "push"
    PREBOOK = "prebook"
    #: Two engines without any connector: the baseline of the idle measurement.
    NONE = "none"
    #: One engine that does both on the cores of both: the baseline of the A/B.
    AGGREGATED = "aggregated"
    #: Prebook whose clients get prefill's first token while the KV is still in flight.
    PREBOOK_FIRST = "prebook-first"

    @property
    def transfers(self) -> bool:
        """Whether KV moves between two engines in this mode."""
        return self in _CONNECTORS

    @property
    def ours(self) -> bool:
        """Whether the engines load Prebook's connector."""
        return self in (Mode.PREBOOK, Mode.PREBOOK_FIRST)

    @property
    def engines(self) -> int:
        """How many engines a pair of this mode is."""
        return 1 if self is Mode.AGGREGATED else 2


class FrontKind(enum.StrEnum):
    """Who drives the legs of a request."""

    #: The benchmark's own client, nothing between it and the engines.
    DIRECT = "direct"
    #: Prebook's dispatch middleware in the decode engine, in the mode that fits the connector.
    DISPATCH = "dispatch"
    #: vLLM's own router process (PyPI: vllm-router), for the stock connectors.
    ROUTER = "router"
    #: One engine that does everything.
    PLAIN = "plain"


def front_kind(mode: Mode, *, asked: FrontKind) -> FrontKind:
    """Who drives the legs in a mode when the run asked for `asked`: vllm-router knows nothing of Prebook, and no client
    but the dispatcher can make decode go on from prefill's token."""
    if not mode.transfers:
        return FrontKind.PLAIN
    if mode is Mode.PREBOOK_FIRST or (mode.ours and asked is FrontKind.ROUTER):
        return FrontKind.DISPATCH
    return asked


class Role(enum.StrEnum):
    """Which half of the work an engine does."""

    PREFILL = "prefill"
    DECODE = "decode"


_CONNECTORS: Final = {
    Mode.PULL: "NixlConnector",
    Mode.PUSH: "NixlPushConnector",
    Mode.PREBOOK: "PrebookConnector",
    Mode.PREBOOK_FIRST: "PrebookConnector",
}
#: The same modes in the dispatch middleware's words.
_DISPATCH_MODES: Final = {
    Mode.PULL: "nixl-pull",
    Mode.PUSH: "nixl-push",
    Mode.PREBOOK: "prebook",
    Mode.PREBOOK_FIRST: "prebook",
}
#: Makes decode sample the token that prefill sampled already.
_FIRST_TOKEN_PROCESSOR: Final = "prebook_connector.first_token:FirstTokenProcessor"
#: As vLLM runs one rank on a GPU (docs/adr/0024). By its class: the short name is overruled on a CPU.
_ONE_PROCESS: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


@dataclasses.dataclass(frozen=True)
class EngineIdentity:
    """One engine of a pair, as its peer and a client see it."""

    mode: Mode
    role: Role
    address: str

    @property
    def engine_id(self) -> str:
        """Given to vLLM, so that a client that drives both legs itself knows it."""
        return f"bench-{self.mode}-{self.role}"

    @property
    def http_port(self) -> int:
        """Port of the API server. Every mode has its own, so that pairs of all modes can be up at once."""
        return _HTTP_PORT + 10 * list(Mode).index(self.mode)

    @property
    def side_channel_port(self) -> int:
        """Port on which the connector hands out its metadata."""
        return _SIDE_CHANNEL_PORT + 10 * list(Mode).index(self.mode)

    @property
    def base_url(self) -> str:
        """Root of the engine's HTTP API."""
        return f"http://{self.address}:{self.http_port}"


@dataclasses.dataclass(frozen=True)
class PrebookOptions:
    """Settings of the Prebook connector in a measurement; the defaults are the connector's own."""

    progressive: bool = True
    min_bytes: int = 4 * 1024 * 1024
    max_in_flight: int = 2
    verify: str = "off"
    lease_seconds: int = 30


def kv_transfer_config(
    engine: EngineIdentity, *, control_dir: str, timeline_dir: str | None, options: PrebookOptions
) -> dict[str, Any] | None:
    """vLLM's ``--kv-transfer-config`` for one engine of a CPU pair, None where the mode has no connector."""
    if not engine.mode.transfers:
        return None
    config: dict[str, Any] = {
        "kv_connector": _CONNECTORS[engine.mode],
        "kv_role": "kv_producer" if engine.role is Role.PREFILL else "kv_consumer",
        "engine_id": engine.engine_id,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"backends": ["UCX"]},
    }
    if engine.mode.ours:
        config["kv_connector_module_path"] = "prebook_connector.connector"
        config["kv_connector_extra_config"]["prebook"] = {
            "control_dir": control_dir,
            "timeline_dir": timeline_dir,
            "model_revision": "bench",
            **dataclasses.asdict(options),
        }
    return config


def dispatch_environment(
    engine: EngineIdentity,
    *,
    peer: EngineIdentity,
    token_file: str,
    control_dir: str,
    model: str,
    local_prefill_max_tokens: int,
) -> dict[str, str]:
    """Environment of the dispatch middleware for one engine of a pair."""
    value: dict[str, Any] = {
        "role": engine.role.value,
        "mode": _DISPATCH_MODES[engine.mode],
        "peers": f"static:///{peer.address}:{peer.http_port}",
        "token_file": token_file,
        "revision": "bench",
        "control_dir": control_dir,
        "local_prefill_max_tokens": local_prefill_max_tokens,
        "policy": "LeastLoaded",
        "on_failure": "recompute",
        "lease_seconds": 30,
        "side_channel_host": engine.address,
        "side_channel_port": engine.side_channel_port,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "served_model": model,
        "bind": f"{engine.address}:{engine.http_port}",
    }
    if engine.mode.ours:
        value["first_token"] = "prefill" if engine.mode is Mode.PREBOOK_FIRST else "decode"
    return {"PREBOOK_DISPATCH": json.dumps(value, separators=(",", ":"))}


@dataclasses.dataclass(frozen=True)
class EngineShape:
    """Engine settings that both halves of every mode share, so that only the connector differs."""

    model: str
    served_name: str = "bench"
    max_model_len: int = 8704
    chunk_tokens: int = 512
    block_size: int | None = None
    kv_cache_bytes: int = 512 * 1024 * 1024
    max_num_seqs: int = 16
    prefix_caching: bool = False


def engine_arguments(
    engine: EngineIdentity, *, shape: EngineShape, dtype: str, transfer: dict[str, Any] | None, dispatch: bool
) -> list[str]:
    """Arguments after ``python -m vllm.entrypoints.openai.api_server``. `dtype` is the model's own: vLLM's "auto" would
    make bfloat16 of float32.
    """
    arguments = [
        f"--model={shape.model}",
        f"--dtype={dtype}",
        f"--served-model-name={shape.served_name}",
        f"--host={engine.address}",
        f"--port={engine.http_port}",
        "--enforce-eager",
        f"--distributed-executor-backend={_ONE_PROCESS}",
        f"--max-model-len={shape.max_model_len}",
        f"--max-num-batched-tokens={shape.chunk_tokens}",
        f"--max-num-seqs={shape.max_num_seqs}",
        f"--kv-cache-memory-bytes={shape.kv_cache_bytes}",
        "--enable-prefix-caching" if shape.prefix_caching else "--no-enable-prefix-caching",
    ]
    if shape.block_size is not None:
        arguments.append(f"--block-size={shape.block_size}")
    if transfer is not None:
        arguments.append(f"--kv-transfer-config={json.dumps(transfer, separators=(',', ':'))}")
    if dispatch:
        arguments.append("--middleware=prebook_connector.dispatch.DispatchMiddleware")
    if engine.mode is Mode.PREBOOK_FIRST and engine.role is Role.DECODE:
        arguments.append(f"--logits-processors={_FIRST_TOKEN_PROCESSOR}")
    return arguments
