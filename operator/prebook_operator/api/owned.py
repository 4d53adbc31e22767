"""Engine flags and environment variables that Prebook decides itself.

A user's value for one of these would break pairing, routing or security without an error message, so it is refused by
name. vLLM's parser accepts underscores for dashes, dotted keys of JSON options (`--kv-transfer-config.kv_role`) and
unambiguous abbreviations (`--middlew`), hence the comparison by prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_RENDERED: Final = "Remove it: Prebook sets it from the spec"

OWNED_FLAGS: Final[Mapping[str, str]] = {
    "--kv-transfer-config": "Remove it and use spec.transfer",
    "--middleware": "Remove it: Prebook's dispatch is the middleware of every engine",
    "--host": "Remove it: the engine always listens on the pod's own address",
    "--port": "Remove it: the engine always listens on port 8000",
    "--uds": "Remove it: the engine must listen on TCP",
    "--config": "Remove it and list its options in spec.engine.args",
    "--model": "Remove it and use spec.model.uri",
    "--revision": "Remove it and use spec.model.revision",
    "--served-model-name": "Remove it and use spec.model.servedName",
    "--hf-token": "Remove it and use spec.model.hfTokenSecretRef",
    "--api-key": "Remove it and give VLLM_API_KEY in spec.engine.env with valueFrom.secretKeyRef",
    "--tensor-parallel-size": "Remove it and use spec.prefill.tensorParallelSize and spec.decode.tensorParallelSize",
    "-tp": "Remove it and use spec.prefill.tensorParallelSize and spec.decode.tensorParallelSize",
    "--pipeline-parallel-size": "Remove it: a pod holds a whole engine; use tensorParallelSize",
    "-pp": "Remove it: a pod holds a whole engine; use tensorParallelSize",
    "--api-server-count": "Remove it: dispatch keeps its view of the peers in one API server process",
    "-asc": "Remove it: dispatch keeps its view of the peers in one API server process",
    "--headless": "Remove it: every pod serves HTTP",
    "--grpc": "Remove it: dispatch serves HTTP",
    "--nnodes": "Remove it: a pod holds a whole engine",
    "-n": "Remove it: a pod holds a whole engine",
    "--node-rank": "Remove it: a pod holds a whole engine",
    "-r": "Remove it: a pod holds a whole engine",
    "--master-addr": "Remove it: a pod holds a whole engine",
    "--master-port": "Remove it: a pod holds a whole engine",
    "--root-path": "Remove it: probes and peers use the root path",
    "--ssl-keyfile": "Remove it and terminate TLS in front of the Service",
    "--ssl-certfile": "Remove it and terminate TLS in front of the Service",
    "--ssl-ca-certs": "Remove it and terminate TLS in front of the Service",
    "--shutdown-timeout": "Remove it and use spec.engine.shutdownSeconds",
    "--kv-offloading-size": "Remove it: it replaces the transfer connector",
    "--kv-offloading-backend": "Remove it: it replaces the transfer connector",
    "--data-parallel-size": "Remove it and raise replicas: each pod is one engine",
    "-dp": "Remove it and raise replicas: each pod is one engine",
}
"""Flag → remedy."""

OWNED_FLAG_FAMILIES: Final[Mapping[str, str]] = {"--data-parallel-": "--data-parallel-size", "-dp": "-dp"}
"""Prefix of a whole family of flags → the member of OWNED_FLAGS that speaks for it."""

SAMPLER_FLAGS: Final = ("--spec", "-sc", "--logits-p")
"""Beginnings of the flags that cannot be combined with `firstToken: Prefill`: vLLM takes no logits processors of ours
with speculative decoding, and a second `--logits-processors` replaces the first."""

OWNED_ENV: Final[Mapping[str, str]] = {
    "POD_IP": _RENDERED,
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "Remove it: the side channel always listens on the pod's own address",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "Remove it: the side channel always uses port 5600",
    "VLLM_PORT": "Remove it: the engine always listens on port 8000",
    "PYTHONPATH": "Remove it: it carries the connector; put packages of your own into the image",
}
"""Environment variable → remedy."""

OWNED_ENV_PREFIX: Final = "PREBOOK_"
SECRET_ENV: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
"""Variables that hold credentials: accepted only with valueFrom.secretKeyRef."""

OWNED_RESOURCES: Final = ("nvidia.com/gpu", "vpc.amazonaws.com/efa")
OWNED_VOLUME_PREFIX: Final = "prebook-"
OWNED_MOUNTS: Final = ("/prebook", "/run/prebook", "/etc/prebook", "/dev/shm", "/var/cache/prebook", "/model")
OWNED_LABEL_DOMAIN: Final = "prebook.dev/"


def flag_key(argument: str) -> str:
    """The option that an argument names, in vLLM's canonical spelling; empty for a value."""
    if not argument.startswith("-"):
        return ""
    return argument.split("=", 1)[0].split(".", 1)[0].replace("_", "-")


def owned_flag(argument: str) -> str | None:
    """The refused flag that `argument` is, abbreviates or may abbreviate; None when it is the user's to give."""
    key = flag_key(argument)
    if not key:
        return None
    if key in OWNED_FLAGS:
        return key
    family = next((member for prefix, member in OWNED_FLAG_FAMILIES.items() if key.startswith(prefix)), None)
    if family is not None:
        return family
    return next((flag for flag in OWNED_FLAGS if flag.startswith(key)), None)
