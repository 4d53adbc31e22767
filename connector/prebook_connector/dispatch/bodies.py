"""What a request asks for, and the bodies of its two legs. Pure: bytes and dictionaries in, the same out.

Field names are those of vLLM 0.32's ``CompletionRequest`` and ``ChatCompletionRequest``
(``vllm/entrypoints/openai/{completion,chat_completion}/protocol.py``). Validation stays vLLM's: whatever looks odd here
is left for the engine to refuse in its own words.

How long a prompt is, is only estimated: exactly for token ids, else one token per four bytes of text plus four per
message. The estimate decides whether a short prompt is worth a transfer and weighs the load of peers; being wrong
costs a little time on either side, never a wrong answer, so it is not worth tokenizing the prompt twice.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from prebook_connector.dispatch.reasons import LocalReason

Body = dict[str, Any]

KV_PARAMS = "kv_transfer_params"
_BYTES_PER_TOKEN = 4
_TOKENS_PER_MESSAGE = 4
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "reasoning"})

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
DISPATCHED = frozenset({COMPLETIONS, CHAT})
"""Paths whose prompts can be prefilled elsewhere. Every other path is served by the pod's own engine."""


class TooDeep(ValueError):
    """The JSON document nests deeper than the parser follows."""


@dataclass(frozen=True)
class Facts:
    """What the dispatcher needs to know about one request.

    ``tokens`` is the estimated prompt length; ``local`` says why push mode cannot serve it, if so; ``stream`` whether
    the client wants server-sent events; ``opens`` whether prefill's first token may begin the stream; ``single``
    whether one token is all that is asked for.
    """

    tokens: int
    stream: bool
    local: LocalReason | None = None
    opens: bool = False
    single: bool = False


@dataclass(frozen=True)
class Parsed:
    """A body. ``odd``: only Python's lenient parser reads it (NaN, lone surrogates, UTF-16 ...).

    vLLM parses with Python's, so odd bodies are served, but locally: they are not worth a second way of writing legs.
    """

    body: Body
    odd: bool = False


def parse(raw: bytes) -> Parsed | None:
    """The body, or None when it is not an object. Raises :class:`TooDeep`.

    msgspec is some ten times faster than json, which counts: this runs on the API server's event loop, and a prompt of
    100 000 token ids is half a megabyte.
    """
    try:
        value, odd = msgspec.json.decode(raw), False
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        odd = True
        try:
            value = json.loads(raw)
        except RecursionError as error:
            raise TooDeep from error
        except ValueError:  # also UnicodeDecodeError
            return None
    return Parsed(value, odd) if isinstance(value, dict) else None


def dump(body: Body) -> bytes:
    """The bytes of a body that is not odd."""
    return msgspec.json.encode(body)


def dump_odd(body: Body) -> bytes:
    """The bytes of an odd body. ASCII only, so that vLLM sees lone surrogates as the client wrote them."""
    return json.dumps(body).encode()


def may_hold_params(raw: bytes) -> bool:
    """Whether ``raw`` could hold the key at all; cheap, and never wrong with "no".

    A key can be written with escapes, and JSON may arrive as UTF-16 or UTF-32 (which vLLM's parser detects): both
    count as "maybe".
    """
    return b"transfer_params" in raw or b"\\u" in raw or b"\x00" in raw


def strip(body: Body) -> tuple[Body, int]:
    """Removes every ``kv_transfer_params`` that would reach the engine; returns the rest and how many there were.

    Besides the field of that name, vLLM copies ``vllm_xargs`` and ``sampling_params.extra_args`` into the place where
    the connector looks for it. Values elsewhere (a message's text, a tool's schema) are the client's own business.
    """
    removed = 0
    result = dict(body)
    if KV_PARAMS in result:
        removed += result.pop(KV_PARAMS) is not None
    for holder in ("vllm_xargs", "extra_args"):
        result, found = _strip_in(result, holder)
        removed += found
    sampling = result.get("sampling_params")
    if isinstance(sampling, dict):
        inner, found = _strip_in(sampling, "extra_args")
        if found:
            result["sampling_params"] = inner
            removed += found
    return result, removed


def _strip_in(body: Body, holder: str) -> tuple[Body, int]:
    value = body.get(holder)
    if not isinstance(value, dict) or KV_PARAMS not in value:
        return body, 0
    return {**body, holder: {key: item for key, item in value.items() if key != KV_PARAMS}}, 1


def inspect(path: str, body: Body) -> Facts:
    """Looks at one request to ``path`` (a member of :data:`DISPATCHED`). Total: odd values make it local."""
    tokens = estimate_tokens(path, body)
    local = _common_reason(body) or (_chat_reason(body) if path == CHAT else _completion_reason(body))
    stream = body.get("stream") is True
    return Facts(
        tokens=tokens, stream=stream, local=local, opens=stream and _may_open(body), single=_limit(path, body) == 1
    )


_SHAPES_THE_ANSWER = (
    "stop",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "echo",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "return_token_ids",
    "return_prompt_text",
    "return_tokens_as_token_ids",
    "stream_interval",
    "tools",
    "functions",
)
"""With any of these set, decode's stream may begin with something else than the text of its first token."""


def _may_open(body: Body) -> bool:
    if any(body.get(key) not in (None, False, [], "") for key in _SHAPES_THE_ANSWER):
        return False
    form, options = body.get("response_format"), body.get("stream_options")
    if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
        return False
    return not (isinstance(options, dict) and options.get("continuous_usage_stats"))


def _limit(path: str, body: Body) -> object:
    """The most tokens that the client wants, as vLLM reads it; None without a limit."""
    newer = body.get("max_completion_tokens") if path == CHAT else None
    return body.get("max_tokens") if newer is None else newer


def _above_one(value: object) -> bool:
    return value is not None and value != 1


def _common_reason(body: Body) -> LocalReason | None:
    if body.get("use_beam_search"):
        return LocalReason.BEAM_SEARCH
    if _above_one(body.get("n")) or _above_one(body.get("best_of")):
        return LocalReason.SEVERAL_CHOICES
    if body.get("prompt_logprobs") is not None:
        return LocalReason.PROMPT_LOGPROBS
    if body.get("truncate_prompt_tokens") is not None:
        return LocalReason.TRUNCATION
    limits = [body[key] for key in ("max_tokens", "max_completion_tokens") if body.get(key) is not None]
    if any(not isinstance(limit, int) or limit < 1 for limit in limits):
        return LocalReason.NO_GENERATION
    return None


def _completion_reason(body: Body) -> LocalReason | None:
    if body.get("prompt_embeds") is not None:
        return LocalReason.PROMPT_EMBEDS
    if body.get("echo"):
        return LocalReason.ECHO
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return None
    if not isinstance(prompt, list) or not prompt:
        return LocalReason.UNREADABLE
    if _are_ids(prompt):
        return None
    return LocalReason.SEVERAL_PROMPTS if len(prompt) > 1 else None


def _chat_reason(body: Body) -> LocalReason | None:
    if body.get("mm_processor_kwargs") is not None or body.get("media_io_kwargs") is not None:
        return LocalReason.MULTIMODAL
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return LocalReason.UNREADABLE
    for message in messages:
        if isinstance(message, list):
            return LocalReason.SEVERAL_PROMPTS
        if not isinstance(message, dict):
            return LocalReason.UNREADABLE
        content = message.get("content")
        if isinstance(content, list) and not all(_is_text_part(part) for part in content):
            return LocalReason.MULTIMODAL
    return None


def _is_text_part(part: object) -> bool:
    if isinstance(part, str):
        return True
    return isinstance(part, dict) and part.get("type", "text") in _TEXT_PARTS


def estimate_tokens(path: str, body: Body) -> int:
    """Estimated prompt length in tokens (see the module's docstring); never negative, never raises."""
    if path == CHAT:
        messages = body.get("messages")
        count = len(messages) if isinstance(messages, list) else 0
        extra = _text_bytes(body.get("tools")) + _text_bytes(body.get("documents"))
        return count * _TOKENS_PER_MESSAGE + -(-(_text_bytes(messages) + extra) // _BYTES_PER_TOKEN)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    if isinstance(prompt, list) and _are_ids(prompt):
        return len(prompt)
    return -(-_text_bytes(prompt) // _BYTES_PER_TOKEN)


def _are_ids(prompt: list[Any]) -> bool:
    return set(map(type, prompt)) == {int}


def _text_bytes(value: object) -> int:
    """UTF-8 bytes of all strings below ``value``; iterative, so that depth does not matter."""
    total = 0
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            total += len(item.encode("utf-8", "surrogatepass"))
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
    return total


_PREFILL_DROPS = (
    KV_PARAMS,
    "stream_options",
    "stream_interval",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
    "n",
    "best_of",
    "stop",
    "request_id",
    "return_token_ids",
    "return_prompt_text",
    "return_tokens_as_token_ids",
    "min_tokens",
)


def prefill_body(path: str, body: Body, params: Body) -> Body:
    """The prefill leg's body: the same prompt and sampling, exactly one token, not streamed.

    What shapes the prompt (messages, tools, templates, special tokens, cache salt, model) stays as it is, because both
    engines must render the very same tokens. What only shapes the answer goes. ``min_tokens`` shrinks to one instead
    of going: it forbids an end-of-sequence token in the first place, and that token may be handed on.
    """
    result = {key: value for key, value in body.items() if key not in _PREFILL_DROPS}
    result["max_tokens"] = 1
    if path == CHAT:
        result["max_completion_tokens"] = 1
    if isinstance(body.get("min_tokens"), int) and body["min_tokens"] > 0:
        result["min_tokens"] = 1
    result["stream"] = False
    result[KV_PARAMS] = params
    return result


def decode_body(body: Body, params: Body) -> Body:
    """The decode leg's body: the client's own request, plus where its KV cache comes from."""
    return {**body, KV_PARAMS: params}


def is_prefill_params(value: object) -> bool:
    """Whether ``kv_transfer_params`` from a token holder describe a prefill leg (any of the three modes)."""
    if not isinstance(value, dict) or value.get("do_remote_decode") is not True:
        return False
    if value.get("do_remote_prefill") not in (None, False):
        return False
    transfer_id = value.get("transfer_id")
    return transfer_id is None or (isinstance(transfer_id, str) and 0 < len(transfer_id) <= 128)
