"""Command line and environment of an engine: everything that vLLM, the connector and dispatch are told."""

from __future__ import annotations

import json
from typing import Any, Final

from prebook_operator.api import derived
from prebook_operator.api.owned import flag_key
from prebook_operator.api.pod_template import EnvVar
from prebook_operator.api.resources import DisaggregatedModel
from prebook_operator.api.spec import Connector, FirstToken, Role
from prebook_operator.api.validation import bytes_of
from prebook_operator.render.context import RenderContext
from prebook_operator.render.names import (
    CACHE_DIR,
    CONTROL_DIR,
    HOME_DIR,
    HTTP_PORT,
    LIB_DIR,
    MODEL_DIR,
    SIDE_CHANNEL_PORT,
    TOKEN_DIR,
    TOKEN_KEY,
    workload_name,
)
from prebook_operator.render.types import Manifest

COMMAND: Final = ["python3", "-m", "vllm.entrypoints.openai.api_server"]
MIDDLEWARE: Final = "prebook_connector.dispatch.DispatchMiddleware"
FIRST_TOKEN_PROCESSOR: Final = "prebook_connector.first_token:FirstTokenProcessor"
GPU_BLOCK_SIZE: Final = 128
"""Tokens per KV block on GPUs: posting a transfer costs time per descriptor, and larger blocks need fewer of them."""

_KV_ROLE: Final = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}
_MODE: Final = {Connector.PREBOOK: "prebook", Connector.NIXL_PUSH: "nixl-push", Connector.NIXL_PULL: "nixl-pull"}
_STOCK_CLASS: Final = {Connector.NIXL_PUSH: "NixlPushConnector", Connector.NIXL_PULL: "NixlConnector"}


def compact(value: Any) -> str:
    """JSON on one line, keys in the order given."""
    return json.dumps(value, separators=(",", ":"))


def model_path(model: DisaggregatedModel) -> str:
    """What vLLM is given as `--model`."""
    scheme, _, rest = model.spec.model.uri.partition("://")
    if scheme == "hf":
        return rest
    if scheme == "pvc":
        _, _, path = rest.partition("/")
        return f"{MODEL_DIR}/{path}".rstrip("/")
    return rest if scheme == "file" else model.spec.model.uri


# Asked every few seconds by probes, scrapers and peers; requests would drown among them in the log.
POLLED_PATHS = ("/health", "/metrics", "/prebook/v1/identity", "/prebook/v1/ready", "/prebook/v1/status")


def engine_args(model: DisaggregatedModel, ctx: RenderContext, role: Role, rev8: str) -> list[str]:
    """Arguments of the API server: Prebook's own first, then the user's."""
    spec = model.spec
    given = {flag_key(argument) for argument in spec.engine.args}
    args = [
        f"--model={model_path(model)}",
        f"--served-model-name={model.served_name}",
        f"--host={ctx.bind_host}",
        f"--port={HTTP_PORT}",
        f"--tensor-parallel-size={spec.role(role).tensor_parallel_size}",
        f"--kv-transfer-config={compact(kv_transfer_config(model, ctx, role, rev8))}",
        f"--middleware={MIDDLEWARE}",
        f"--shutdown-timeout={spec.engine.shutdown_seconds}",
    ]
    if role is Role.DECODE and spec.transfer.first_token is FirstToken.PREFILL:
        args.append(f"--logits-processors={FIRST_TOKEN_PROCESSOR}")
    if "--disable-access-log-for-endpoints" not in given:
        args.append(f"--disable-access-log-for-endpoints={','.join(POLLED_PATHS)}")
    if spec.model.revision is not None and spec.model.uri.startswith("hf://"):
        args.append(f"--revision={spec.model.revision}")
    if spec.model.uri.startswith("s3://") and "--load-format" not in given:
        args.append("--load-format=runai_streamer")
    if derived.gpus(spec, role) > 0 and "--block-size" not in given:
        args.append(f"--block-size={GPU_BLOCK_SIZE}")
    return [*args, *spec.engine.args]


def kv_transfer_config(model: DisaggregatedModel, ctx: RenderContext, role: Role, rev8: str) -> Manifest:
    """Value of `--kv-transfer-config` (vllm/config/kv_transfer.py)."""
    spec, transfer = model.spec, model.spec.transfer
    extra: Manifest = {"backends": [derived.backend(spec).value]}
    config: Manifest = {"kv_role": _KV_ROLE[role], "kv_load_failure_policy": transfer.on_failure.value.lower()}
    if transfer.connector is Connector.PREBOOK:
        config = {
            "kv_connector": "PrebookConnector",
            "kv_connector_module_path": "prebook_connector.connector",
            **config,
        }
        extra["prebook"] = _connector_settings(model, ctx, rev8)
    else:
        config = {"kv_connector": _STOCK_CLASS[transfer.connector], **config}
    if derived.gpus(spec, role) == 0:
        config["kv_buffer_device"] = "cpu"
    return {**config, "kv_connector_extra_config": extra}


def _connector_settings(model: DisaggregatedModel, ctx: RenderContext, rev8: str) -> Manifest:
    transfer = model.spec.transfer
    return {
        "control_dir": CONTROL_DIR,
        "lease_seconds": transfer.lease_seconds,
        "progressive": transfer.progressive.enabled,
        "min_bytes": bytes_of(transfer.progressive.min_bytes),
        "max_in_flight": transfer.progressive.max_in_flight,
        "verify": transfer.verify.value.lower(),
        # The whole revision, and not only that of the weights: a second fence beside discovery.
        "model_revision": rev8,
        "timeline_dir": ctx.timeline_dir,
    }


def dispatch_settings(model: DisaggregatedModel, ctx: RenderContext, role: Role, rev8: str) -> Manifest:
    """Value of PREBOOK_DISPATCH: what the middleware of one pod is told."""
    spec = model.spec
    return {
        "role": role.value,
        "mode": _MODE[spec.transfer.connector],
        "peers": ctx.peer_source(workload_name(model, role.other, rev8), HTTP_PORT),
        "token_file": f"{TOKEN_DIR}/{TOKEN_KEY}",
        "revision": rev8,
        "control_dir": CONTROL_DIR,
        "local_prefill_max_tokens": spec.routing.local_prefill_max_tokens,
        "policy": spec.routing.policy.value,
        "on_failure": spec.transfer.on_failure.value.lower(),
        "first_token": spec.transfer.first_token.value.lower(),
        "lease_seconds": spec.transfer.lease_seconds,
        "side_channel_host": "$(POD_IP)",
        "side_channel_port": SIDE_CHANNEL_PORT,
        "tp_size": spec.role(role).tensor_parallel_size,
        "pp_size": 1,
        "dp_size": 1,
        "served_model": model.served_name,
        "bind": f"$(POD_IP):{HTTP_PORT}",
    }


def engine_env(model: DisaggregatedModel, ctx: RenderContext, role: Role, rev8: str) -> list[Manifest]:
    """Environment of the engine container, each name once.

    POD_IP comes first, because `$(POD_IP)` is expanded only after its definition. The role's template overrides
    `spec.engine.env`, which overrides Prebook's suggestions; names that Prebook owns were refused before.
    """
    user = {**_by_name(model.spec.engine.env), **_by_name(model.spec.role(role).template.engine.env)}
    owned = _owned_env(model, ctx, role, rev8)
    suggested = {name: {"name": name, "value": value} for name, value in _suggested_env(model, role).items()}
    return list({**owned, **suggested, **_hf_token(model), **user}.values())


def _by_name(variables: list[EnvVar]) -> dict[str, Manifest]:
    return {variable.name: variable.to_wire() for variable in variables}


def _owned_env(model: DisaggregatedModel, ctx: RenderContext, role: Role, rev8: str) -> dict[str, Manifest]:
    values = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "$(POD_IP)",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_CHANNEL_PORT),
        "PREBOOK_DISPATCH": compact(dispatch_settings(model, ctx, role, rev8)),
        "PYTHONPATH": LIB_DIR,
    }
    pod_ip = {"name": "POD_IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}}
    return {"POD_IP": pod_ip, **{name: {"name": name, "value": value} for name, value in values.items()}}


def _hf_token(model: DisaggregatedModel) -> dict[str, Manifest]:
    ref = model.spec.model.hf_token_secret_ref
    if ref is None:
        return {}
    return {"HF_TOKEN": {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": ref.name, "key": ref.key}}}}


def _suggested_env(model: DisaggregatedModel, role: Role) -> dict[str, str]:
    """Variables that a user may override: a home that any user id can write to, caches, and EFA's settings."""
    env = {
        "HOME": HOME_DIR,
        "USER": "prebook",  # PyTorch names its cache folder after the user, and an arbitrary id has no entry in passwd
        "HF_HOME": f"{CACHE_DIR}/huggingface",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if derived.efa_devices(model.spec, role) > 0:
        env |= {
            "FI_PROVIDER": "efa",
            "FI_EFA_USE_DEVICE_RDMA": "1",
            "FI_EFA_ENABLE_SHM_TRANSFER": "0",
            "NCCL_SOCKET_IFNAME": "^lo,docker,veth",
        }
    return env
