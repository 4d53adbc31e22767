"""Makes decode sample the first token that prefill has sampled already (``firstToken: Prefill``).

Loaded by ``--logits-processors prebook_connector.first_token:FirstTokenProcessor`` on decode engines. vLLM 0.32 has two
model runners with an interface each for such processors (``vllm/v1/sample/logits_processor/interface.py`` and
``vllm/v1/worker/gpu/sample/logits_processor/interface.py``) and picks one by itself
(``VllmConfig.use_v2_model_runner``), so the one class that can be named on the command line serves both.

Only the logits of a request's first token are touched, after grammar and penalties: everything but prefill's token
becomes impossible, so it is sampled whatever the temperature. A random generator of the request's own is drawn from as
in any step, so what follows is what one engine would have sampled. Log probabilities are taken before (vLLM's default
``--logprobs-mode raw_logprobs``), so they are the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as RunnerV2Processor

from prebook_connector.token_store import TOKENS

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

Wanted = Callable[[], int | None]
"""The token that a request must begin with, asked at the moment of sampling."""


def wanted(params: SamplingParams) -> Wanted | None:
    """What the dispatcher asked for one request, None for nothing.

    Two keys of ``kv_transfer_params``, which clients cannot set: ``first_token`` (true: it may be offered under this
    transfer id until it is sampled) and ``first_token_id`` (it is known already).
    """
    asked = (params.extra_args or {}).get("kv_transfer_params")
    if not isinstance(asked, dict):
        return None
    token, transfer_id = asked.get("first_token_id"), asked.get("transfer_id")
    if type(token) is int and token >= 0:
        return lambda: token
    if asked.get("first_token") is True and isinstance(transfer_id, str):
        return partial(TOKENS.take, transfer_id)
    return None


class FirstTokenProcessor(AdapterLogitsProcessor, RunnerV2Processor):  # type: ignore[misc]
    """See the module's text. Rows of other requests are never touched."""

    def __init__(self, vllm_config: VllmConfig, device_or_states: Any, is_pin_memory: bool | None = None) -> None:
        if is_pin_memory is None:
            self._prompt_len = device_or_states.prompt_len
        else:
            AdapterLogitsProcessor.__init__(self, vllm_config, device_or_states, is_pin_memory)
        self._slots: dict[int, Wanted] = {}

    def is_argmax_invariant(self) -> bool:
        """It decides the argmax."""
        return False

    # -- the first model runner: a batch row at a time

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[[list[int], torch.Tensor], Any] | None:
        """The processor of one request, None for almost all."""
        want = wanted(params)
        if want is None:
            return None

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            # vLLM also calls this for a part of a prompt and throws the sample away; that does no harm.
            token = want() if not output_ids else None
            if token is None or token >= logits.shape[-1]:
                return logits
            logits.fill_(float("-inf"))
            logits[token] = 0.0
            return logits

        return force

    # -- the second: slots that requests are given, rows that change every step

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """A request enters slot ``req_idx``, perhaps after another."""
        self._slots.pop(req_idx, None)
        want = wanted(sampling_params)
        if want is not None:
            self._slots[req_idx] = want
        return want is not None

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        """``logits``: (rows, vocabulary), changed in place. ``ctx`` comes from the second model runner only."""
        if ctx is None:
            return AdapterLogitsProcessor.apply(self, logits)
        for position, slot in enumerate(ctx.idx_mapping_np.tolist()) if self._slots else ():
            want = self._slots.get(slot)
            # As many tokens in sight as the prompt has: the next one is the first. (Exact without speculation.)
            if want is None or ctx.seq_lens_upper_bound_np[position] != self._prompt_len.np[slot]:
                continue
            token = want()
            if token is not None and token < logits.shape[-1]:
                rows = ctx.expanded_idx_mapping == slot
                logits.masked_fill_(rows.unsqueeze(1), float("-inf"))
                logits[:, token].masked_fill_(rows, 0.0)
        return logits
