"""Validation of ``kv_transfer_params``: the only thing about a transfer that comes in with a request. Pure.

Upstream indexes the dict and a missing key kills the EngineCore. Here every request gets one of three answers: no
transfer, a valid intent, or a reason why not; the caller then computes locally and counts the reason.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prebook_connector.ports import PeerSpec

MAX_ID_LENGTH = 256
MAX_RANKS = 1024


class BadParamsError(ValueError):
    """The parameters cannot be used; ``reason`` is the label of the counter."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True)
class PrefillIntent:
    """This engine computes the prompt and pushes its KV."""

    transfer_id: str


@dataclass(frozen=True)
class DecodeIntent:
    """This engine expects the prompt's KV from ``prefill``."""

    transfer_id: str
    prefill: PeerSpec


Intent = PrefillIntent | DecodeIntent


def parse(params: Any, *, base_request_id: str) -> Intent | None:
    """The intent in ``params``; None when they ask for nothing.

    ``base_request_id`` identifies the transfer for routers that know no ``transfer_id`` (both legs share the id that
    the client's X-Request-Id leads to). Raises :class:`BadParamsError`.
    """
    if params is None:
        return None
    if not isinstance(params, Mapping):
        raise BadParamsError("not_an_object", type(params).__name__)
    pull = _flag(params, "do_remote_prefill")
    push = _flag(params, "do_remote_decode")
    if not pull and not push:
        return None
    if pull and push:
        raise BadParamsError("both_roles", "do_remote_prefill and do_remote_decode")
    transfer_id = _text(params, "transfer_id", default=f"request:{base_request_id}")
    if push:
        return PrefillIntent(transfer_id)
    spec = PeerSpec(
        engine_id=_text(params, "remote_engine_id"),
        host=_text(params, "remote_host"),
        port=_number(params, "remote_port", 1, 65535),
        tp_size=_number(params, "tp_size", 1, MAX_RANKS, default=1),
        pp_size=_number(params, "pp_size", 1, MAX_RANKS, default=1),
        dp_rank=_number(params, "dp_rank", 0, MAX_RANKS, default=0),
    )
    return DecodeIntent(transfer_id, spec)


def digest(token_ids: Sequence[int]) -> bytes:
    """8 bytes that identify a prompt: a pair that disagrees on it must not exchange KV."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).digest()


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name, False)
    if not isinstance(value, bool):
        raise BadParamsError("bad_flag", f"{name}={value!r:.40}")
    return value


def _text(params: Mapping[str, Any], name: str, *, default: str | None = None) -> str:
    value = params.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_LENGTH or not value.isprintable():
        raise BadParamsError("bad_text" if name in params else "missing", name)
    return value


def _number(params: Mapping[str, Any], name: str, low: int, high: int, *, default: int | None = None) -> int:
    value = params.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadParamsError("bad_number" if name in params else "missing", f"{name}={value!r:.40}")
    return value
