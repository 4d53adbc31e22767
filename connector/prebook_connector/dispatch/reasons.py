"""Every word the dispatcher uses to say why: one enumeration per question, shared by metrics, logs, headers and status.

The values are stable label values; :func:`explain` gives the sentence for people.
"""

from __future__ import annotations

from enum import StrEnum


class LocalReason(StrEnum):
    """Why decode computes a prompt itself (header ``x-prebook-local``)."""

    SHORT_PROMPT = "short_prompt"
    SEVERAL_CHOICES = "several_choices"
    BEAM_SEARCH = "beam_search"
    PROMPT_LOGPROBS = "prompt_logprobs"
    ECHO = "echo"
    SEVERAL_PROMPTS = "several_prompts"
    PROMPT_EMBEDS = "prompt_embeds"
    MULTIMODAL = "multimodal"
    TRUNCATION = "truncation"
    NO_GENERATION = "no_generation"
    UNREADABLE = "unreadable"
    NO_READY_PEER = "no_ready_peer"
    DRAINING = "draining"
    EXTERNAL = "external"
    FAILED_OVER = "failed_over"


class Failure(StrEnum):
    """How a remote attempt went wrong before its answer began."""

    CLIENT_ERROR = "client_error"
    PREFILL_ERROR = "prefill_error"
    PREFILL_BUSY = "prefill_busy"
    PREFILL_FORBIDDEN = "prefill_forbidden"
    PREFILL_GARBAGE = "prefill_garbage"
    PREFILL_DEADLINE = "prefill_deadline"
    CONNECT = "connect"
    RESET = "reset"
    PEER_LOST = "peer_lost"
    PEER_REPLACED = "peer_replaced"
    QUARANTINED = "quarantined"
    TRANSFER_DEADLINE = "transfer_deadline"
    TRANSFER_FAILED = "transfer_failed"
    DECODE_ERROR = "decode_error"
    FIRST_TOKEN_SPLIT = "first_token_split"
    FIRST_BYTE_DEADLINE = "first_byte_deadline"

    @property
    def is_the_peers(self) -> bool:
        """Whether the prefill peer, or the way to it, may be at fault: then others are tried first for a while."""
        return self not in (Failure.CLIENT_ERROR, Failure.DECODE_ERROR, Failure.FIRST_TOKEN_SPLIT)


class Refusal(StrEnum):
    """Why a request is answered by the dispatcher itself."""

    NO_TOKEN = "no_token"
    WRONG_TOKEN = "wrong_token"
    NO_TOKEN_CONFIGURED = "no_token_configured"
    BAD_PARAMETERS = "bad_parameters"
    DRAINING = "draining"
    BODY_TOO_LARGE = "body_too_large"
    BODY_TIMEOUT = "body_timeout"
    TOO_DEEP = "too_deep"
    NO_READY_PEER = "no_ready_peer"
    PREFILL_FAILED = "prefill_failed"
    FIRST_BYTE_DEADLINE = "first_byte_deadline"
    FIRST_TOKEN_LOST = "first_token_lost"


# One table per enumeration: members of different ones with the same value would be one key.
_LOCAL: dict[StrEnum, str] = {
    LocalReason.SHORT_PROMPT: "the prompt fits under localPrefillMaxTokens",
    LocalReason.SEVERAL_CHOICES: "n or best_of is above one",
    LocalReason.BEAM_SEARCH: "beam search",
    LocalReason.PROMPT_LOGPROBS: "log probabilities of the prompt were asked for",
    LocalReason.ECHO: "the prompt is echoed",
    LocalReason.SEVERAL_PROMPTS: "several prompts in one request",
    LocalReason.PROMPT_EMBEDS: "the prompt is given as embeddings",
    LocalReason.MULTIMODAL: "the prompt holds images, audio or video",
    LocalReason.TRUNCATION: "prompt truncation depends on max_tokens, which differs between the legs",
    LocalReason.NO_GENERATION: "max_tokens is below one",
    LocalReason.UNREADABLE: "the body is not a request that the dispatcher understands; the engine answers",
    LocalReason.NO_READY_PEER: "no prefill peer is ready",
    LocalReason.DRAINING: "this pod is draining",
    LocalReason.EXTERNAL: "a trusted router drives the transfer",
    LocalReason.FAILED_OVER: "the prefill peer failed and decode took over",
}
_FAILURES: dict[StrEnum, str] = {
    Failure.CLIENT_ERROR: "prefill refused the request itself",
    Failure.PREFILL_ERROR: "the prefill engine failed",
    Failure.PREFILL_BUSY: "the prefill engine is draining or overloaded",
    Failure.PREFILL_FORBIDDEN: "the prefill pod did not accept the peer token",
    Failure.PREFILL_GARBAGE: "the prefill pod answered with something unreadable",
    Failure.PREFILL_DEADLINE: "the prefill leg did not end before its deadline",
    Failure.CONNECT: "no connection to the prefill pod",
    Failure.RESET: "the connection to the prefill pod broke",
    Failure.PEER_LOST: "the prefill pod stopped answering",
    Failure.PEER_REPLACED: "the prefill engine was restarted",
    Failure.QUARANTINED: "the connector lost contact with the prefill engine",
    Failure.TRANSFER_DEADLINE: "the KV cache did not arrive in time",
    Failure.TRANSFER_FAILED: "the connector gave the transfer up by itself",
    Failure.DECODE_ERROR: "the engine failed while it waited for the KV cache",
    Failure.FIRST_TOKEN_SPLIT: "some samplers of this pod had prefill's first token, others began with their own",
    Failure.FIRST_BYTE_DEADLINE: "no answer before the deadline",
}
_REFUSALS: dict[StrEnum, str] = {
    Refusal.NO_TOKEN: "kv_transfer_params are accepted only from this model's own decode pods",
    Refusal.WRONG_TOKEN: "the peer token is wrong",
    Refusal.NO_TOKEN_CONFIGURED: "this pod has no peer token and accepts no legs",
    Refusal.BAD_PARAMETERS: "kv_transfer_params do not describe a prefill leg",
    Refusal.DRAINING: "this pod is draining",
    Refusal.BODY_TOO_LARGE: "the request body is too large",
    Refusal.BODY_TIMEOUT: "the request body did not arrive in time",
    Refusal.TOO_DEEP: "the request body is nested too deeply",
    Refusal.NO_READY_PEER: "no prefill engine is ready",
    Refusal.PREFILL_FAILED: "prefill failed and onFailure is Fail",
    Refusal.FIRST_BYTE_DEADLINE: "no answer before the deadline",
    Refusal.FIRST_TOKEN_LOST: "decode did not continue from the token that prefill had sampled",
}


_SENTENCES: dict[type[StrEnum], dict[StrEnum, str]] = {
    LocalReason: _LOCAL,
    Failure: _FAILURES,
    Refusal: _REFUSALS,
}


def explain(reason: StrEnum) -> str:
    """The sentence for a reason; every member of every enumeration here has one."""
    return _SENTENCES[type(reason)][reason]
