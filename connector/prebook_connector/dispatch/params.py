"""kv_transfer_params of both legs, for each of the three connectors. Pure.

What the stock schedulers read is in ``vllm/distributed/kv_transfer/kv_connector/v1/nixl`` (0.32.0):
``push_scheduler.py:update_state_after_alloc`` and ``metadata.py:add_new_req_to_recv`` index their keys without a
check, so an incomplete dictionary would kill the engine core: everything is built or validated here.
"""

from __future__ import annotations

from typing import Any

from prebook_connector.dispatch.bodies import CHAT
from prebook_connector.dispatch.identity import Identity

Params = dict[str, Any]


def prefill_params(transfer_id: str) -> Params:
    """The prefill leg's, in every mode (the stock connectors ignore ``transfer_id``)."""
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}


def prebook_params(transfer_id: str, identity: Identity, rank: int, *, opens: bool) -> Params:
    """The decode leg's for Prebook's connector: where prefill's handshake listener is, and the shared transfer id.

    ``opens``: prefill's first token may be offered to the sampler under this id (``prebook_connector.first_token``).
    """
    return {
        **({"first_token": True} if opens else {}),
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_engine_id": identity.rank_engine_id(rank),
        "remote_host": identity.side_channel.host,
        "remote_port": identity.side_channel.port + rank,
        "tp_size": identity.tp_size,
        "pp_size": identity.pp_size,
        "dp_rank": rank,
    }


def begun_params(token: int) -> Params:
    """A local leg's whose client has seen prefill's first token already: it must begin with that one."""
    return {"first_token_id": token}


def push_params(path: str, request_id: str, identity: Identity, rank: int) -> Params:
    """The decode leg's for stock push, whose two legs find each other by the X-Request-Id that both carry."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": identity.rank_engine_id(rank),
        "remote_request_id": engine_request_id(path, request_id),
        "remote_host": identity.side_channel.host,
        "remote_port": identity.side_channel.port + rank,
        "tp_size": identity.tp_size,
        "pp_size": identity.pp_size,
    }


def engine_request_id(path: str, request_id: str) -> str:
    """The id that vLLM derives from X-Request-Id, without the random suffix of the engine."""
    return f"chatcmpl-{request_id}" if path == CHAT else f"cmpl-{request_id}-0"


_PULL_KEYS = frozenset(
    {
        "do_remote_prefill",
        "do_remote_decode",
        "remote_block_ids",
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
        "tp_size",
        "dcp_size",
        "pp_size",
        "remote_num_tokens",
        "remote_blocks_expiry_time",
        "transfer_mode",
    }
)


def pull_params(answer: Params | None, identity: Identity, rank: int, *, cached_tokens: int | None) -> Params | None:
    """The decode leg's for stock pull: prefill's own answer, when it is complete and about the engine that was asked.

    Returns None for anything else, so that a broken or foreign answer costs a local prefill and never the engine.
    """
    if not isinstance(answer, dict) or answer.get("do_remote_prefill") is not True:
        return None
    expected = {
        "remote_engine_id": identity.rank_engine_id(rank),
        "remote_host": identity.side_channel.host,
        "remote_port": identity.side_channel.port + rank,
    }
    if any(answer.get(key) != value for key, value in expected.items()):
        return None
    if not isinstance(answer.get("remote_request_id"), str) or not _are_blocks(answer.get("remote_block_ids")):
        return None
    sizes = [answer.get(key, 1) for key in ("tp_size", "dcp_size", "pp_size")]
    if not all(isinstance(size, int) and 0 < size <= 1024 for size in sizes):
        return None
    result = {key: value for key, value in answer.items() if key in _PULL_KEYS}
    result["do_remote_decode"] = False
    if cached_tokens is not None:
        result["remote_prefill_cached_tokens"] = cached_tokens
    return result


def _are_blocks(value: object) -> bool:
    """Block ids per KV cache group: a non-empty list of lists of non-negative integers."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(group, list) and all(type(block) is int and block >= 0 for block in group) for group in value
        )
    )
