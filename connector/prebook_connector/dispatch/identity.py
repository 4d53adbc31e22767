"""What a pod says about itself at ``/prebook/v1/identity``, and what this pod makes of it. Pure."""

from __future__ import annotations

import ipaddress

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prebook_connector.dispatch.settings import Mode, Role

VERSION = 1
_ANY_HOST = frozenset({"0.0.0.0", "::", "*"})


class SideChannel(BaseModel):
    """Where the connector's handshake listener of DP rank 0 is reached; rank r listens on ``port`` + r."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    host: str = Field(min_length=1, max_length=255)
    port: int = Field(ge=1, le=65535)


class Load(BaseModel):
    """Work that a pod has at hand: prompts that it computes, for a leg or as a whole request, and their tokens."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    legs: int = Field(default=0, ge=0)
    tokens: int = Field(default=0, ge=0)


class Identity(BaseModel):
    """One engine. ``engine_id`` is new in every start, which is how a restart is told from a slow answer."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int
    role: Role
    engine_id: str = Field(min_length=1, max_length=256)
    side_channel: SideChannel
    tp_size: int = Field(ge=1, le=1024)
    pp_size: int = Field(ge=1, le=1024)
    dp_size: int = Field(ge=1, le=1024)
    revision: str = Field(default="", max_length=256)
    compat_hash: str | None = Field(default=None, max_length=256)
    mode: Mode
    vllm_version: str = Field(default="", max_length=128)
    served_model: str = Field(default="", max_length=1024)
    draining: bool = False
    load: Load = Load()

    def rank_engine_id(self, rank: int) -> str:
        """Engine id of one data-parallel rank; vLLM appends the rank in ``EngineCoreProc.run_engine_core``."""
        return self.engine_id if self.dp_size == 1 else f"{self.engine_id}_dp{rank}"


class NotAnIdentity(ValueError):
    """The answer is not an identity; the message names the field, never the foreign bytes."""


def read(raw: bytes) -> Identity:
    """Parses an answer. Raises :class:`NotAnIdentity`."""
    try:
        identity = Identity.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        raise NotAnIdentity(f"{where}: {first['type']}") from None
    if identity.version != VERSION:
        raise NotAnIdentity(f"version {identity.version}, expected {VERSION}")
    return identity


def mismatch(identity: Identity, *, own: Identity, address: str, mla: bool) -> str | None:
    """Why the pod described by ``own`` must not pair with ``identity`` found at ``address``, or None.

    ``mla``: the model uses multi-head latent attention, for which NIXL allows prefill TP above decode TP.
    """
    host = identity.side_channel.host
    peer_is_local = is_loopback(address.rpartition(":")[0])
    hashes = (own.compat_hash, identity.compat_hash)
    checks = [
        (identity.role is own.role.other, f"role is {identity.role}, expected {own.role.other}"),
        (identity.mode is own.mode, f"connector mode is {identity.mode}, here it is {own.mode}"),
        (identity.revision == own.revision, f"revision is {identity.revision!r}, here it is {own.revision!r}"),
        (identity.served_model == own.served_model, "another model is served there"),
        (
            identity.vllm_version == own.vllm_version,
            f"vLLM is {identity.vllm_version!r} there and {own.vllm_version!r} here",
        ),
        (host not in _ANY_HOST, f"its side channel says {host}, which is no address to connect to"),
        (peer_is_local or not is_loopback(host), f"its side channel says {host}, which is another machine's loopback"),
        (
            None in hashes or hashes[0] == hashes[1],
            "compatibility hash differs (another vLLM version, model, dtype or attention backend)",
        ),
        (_tp_fits(identity, own, mla=mla), "prefill TP is above decode TP, which NIXL supports only for MLA models"),
    ]
    return next((sentence for fine, sentence in checks if not fine), None)


def _tp_fits(identity: Identity, own: Identity, *, mla: bool) -> bool:
    prefill, decode = identity.tp_size, own.tp_size
    if own.role is Role.PREFILL:
        prefill, decode = decode, prefill
    return mla or prefill <= decode


def is_loopback(host: str) -> bool:
    """Whether ``host`` names this machine's loopback."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
