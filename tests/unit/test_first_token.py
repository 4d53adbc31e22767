"""``firstToken: Prefill``, its pure parts: the store of tokens, the sampler that takes them, a stream's beginning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate

from prebook_connector.dispatch import bodies
from prebook_connector.dispatch.bodies import CHAT, COMPLETIONS
from prebook_connector.dispatch.opening import Continuation, Diverged, opening
from prebook_connector.first_token import FirstTokenProcessor
from prebook_connector.token_store import TOKENS, TokenStore
from tests.unit.dispatch_engine import Json
from tests.unit.dispatch_rig import request
from tests.unit.stream_events import HEAD, chat, completion, texts

PARIS = 700


# -- the store


def test_a_token_that_was_offered_in_time_is_taken_every_time() -> None:
    store = TokenStore()
    assert store.offer("t", 5)
    assert [store.take("t"), store.take("t")] == [5, 5]
    assert store.offer("t", 5)


def test_an_offer_after_the_sampler_has_looked_is_refused() -> None:
    store = TokenStore()
    assert store.take("t") is None
    assert not store.offer("t", 5)
    assert store.take("t") is None


def test_the_store_forgets_the_oldest() -> None:
    store = TokenStore(kept=2)
    assert all(store.offer(str(index), index) for index in range(3))
    assert [store.take("0"), store.take("2")] == [None, 2]


# -- the sampler


def params(transfer_id: str | None = None, **asked: Any) -> SamplingParams:
    if transfer_id is not None:
        asked |= {"first_token": True, "transfer_id": transfer_id}
    return SamplingParams(extra_args={"kv_transfer_params": asked})


def first_runner(*requests: tuple[SamplingParams, list[int]]) -> FirstTokenProcessor:
    processor = FirstTokenProcessor(None, torch.device("cpu"), False)
    added = [(index, sampling, [1, 2], output) for index, (sampling, output) in enumerate(requests)]
    processor.update_state(BatchUpdate(batch_size=len(added), removed=[], added=added, moved=[]))
    return processor


def test_the_first_token_and_only_that_is_forced() -> None:
    assert TOKENS.offer("forced", 3)
    outputs: list[list[int]] = [[], [], [], []]
    samplings = [params("forced"), params("nobody-offered"), SamplingParams(), params(first_token_id=4)]
    processor = first_runner(*zip(samplings, outputs, strict=True))
    logits = torch.arange(32, dtype=torch.float32).reshape(4, 8)
    kept = logits[1:3].clone()
    changed = processor.apply(logits)
    assert changed.argmax(dim=1).tolist() == [3, 7, 7, 4]
    assert torch.isneginf(changed[0]).sum() == 7
    assert torch.equal(changed[1:3], kept)
    outputs[0].append(3)
    outputs[3].append(4)
    again = processor.apply(torch.arange(32, dtype=torch.float32).reshape(4, 8))
    assert again.argmax(dim=1).tolist() == [7, 7, 7, 7]
    assert not TOKENS.offer("nobody-offered", 1), "decode has begun with a token of its own"


@pytest.mark.parametrize("asked", [{}, {"first_token_id": True}, {"first_token_id": -1}, {"first_token": True}])
def test_other_requests_cost_nothing(asked: dict[str, Any]) -> None:
    assert first_runner((params(**asked), [])).req_info == {}


def test_a_token_outside_of_the_vocabulary_is_left_alone() -> None:
    logits = first_runner((params(first_token_id=8), [])).apply(torch.zeros(1, 8))
    assert not torch.isneginf(logits).any()


def test_the_second_model_runner_forces_the_same() -> None:
    """Its interface as in vllm/v1/worker/gpu/sample/logits_processor/interface.py; it needs a GPU to run whole."""
    assert TOKENS.offer("slot-2", 5)
    states = SimpleNamespace(prompt_len=SimpleNamespace(np=np.array([9, 9, 4, 9])))
    processor = FirstTokenProcessor(None, states)
    assert processor.add_request(2, params("slot-2"))
    assert not processor.add_request(0, SamplingParams())

    def apply(seen: int) -> list[int]:
        slots = np.array([0, 2], dtype=np.int32)
        context = SimpleNamespace(
            idx_mapping_np=slots,
            expanded_idx_mapping=torch.from_numpy(slots),
            seq_lens_upper_bound_np=np.array([30, seen]),
        )
        logits = torch.arange(16, dtype=torch.float32).reshape(2, 8)
        return list(processor.apply(logits, context).argmax(dim=1).tolist())

    assert apply(4) == [7, 5]
    assert apply(5) == [7, 7], "the second token is the model's own"
    assert not processor.add_request(2, SamplingParams()), "the slot has another request now"
    assert apply(4) == [7, 7]


# -- the beginning of a stream


@pytest.mark.parametrize(
    "choice",
    [
        {"text": "x", "finish_reason": "stop"}, {"text": None, "finish_reason": "length"}, "odd",
    ],
)  # fmt: skip
def test_what_cannot_begin_a_stream(choice: object) -> None:
    assert opening(COMPLETIONS, {**HEAD, "choices": [choice]}, PARIS) is None
    good = {"text": "x", "finish_reason": "length"}
    assert opening(COMPLETIONS, {**HEAD, "choices": [good]}, None) is None
    assert opening(COMPLETIONS, {**HEAD, "choices": [good, good]}, PARIS) is None
    assert opening(COMPLETIONS, {**HEAD, "choices": [good]}, PARIS) is not None


def test_half_a_character_begins_the_stream_without_text() -> None:
    """Decode holds it back until it is whole, however its events come."""
    found = opening(COMPLETIONS, {**HEAD, "choices": [{"text": "\ufffd", "finish_reason": "length"}]}, PARIS)
    assert found is not None
    assert found.text == texts(found.events) == ""
    for stream in (completion("") + completion("é"), completion("é"), completion("\ufffd")):
        assert texts(Continuation(found.text).feed(stream)) == texts(stream)


@pytest.mark.parametrize("extra", [{"reasoning": "hm"}, {"tool_calls": [{}]}, {"content": None}])
def test_what_a_parser_shapes_cannot_begin_a_stream(extra: Json) -> None:
    message = {"role": "assistant", "content": "x"}
    assert opening(CHAT, {**HEAD, "choices": [{"message": message, "finish_reason": "length"}]}, PARIS) is not None
    answer = {**HEAD, "choices": [{"message": {**message, **extra}, "finish_reason": "length"}]}
    assert opening(CHAT, answer, PARIS) is None


WORDS = st.lists(st.text('aé\n {}"', max_size=4), min_size=1, max_size=6)


@given(words=WORDS, merged=st.integers(1, 3), cut=st.integers(1, 400), over_chat=st.booleans(), data=st.data())
def test_a_continued_stream_reads_like_one(
    *, words: list[str], merged: int, cut: int, over_chat: bool, data: st.DataObject
) -> None:
    """However decode's frontend merges tokens into events and the server cuts events into pieces."""
    whole = "".join(words)
    events = ["".join(words[at : at + merged]) for at in range(0, len(words), merged)]
    if over_chat:
        stream = chat({"role": "assistant", "content": ""}) + b"".join(chat({"content": text}) for text in events)
        stream += chat({"content": ""}, "length")
    else:
        stream = b": ping\n\n" + b"".join(map(completion, events)) + completion("", "length")
    stream += b"data: [DONE]\n\n"
    continuation = Continuation(words[0])
    pieces = [stream[at : at + cut] for at in range(0, len(stream), cut)]
    rest = b"".join(map(continuation.feed, pieces))
    assert continuation.settled
    assert words[0] + texts(rest) == whole
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b'"length"' in rest
    assert b'"role"' not in rest
    if merged == 1:
        events_left = [event for event in rest.split(b"\n\n") if event.startswith(b"data: {")]
        assert len(events_left) == len(words), "one event a token, and the one that ends the answer"


@pytest.mark.parametrize(
    "stream", [completion(" London"), completion("", "stop"), b"data: [DONE]\n\n", completion(" Pa", "length")]
)
def test_another_beginning_is_noticed(stream: bytes) -> None:
    with pytest.raises(Diverged):
        Continuation(" Paris").feed(stream)


def test_an_error_of_the_engine_passes_through() -> None:
    continuation = Continuation(" Paris")
    error = b'data: {"error": {"message": "no", "code": 500}}\n\n'
    assert continuation.feed(error) == error
    assert continuation.feed(b"data: [DONE]\n\n") == b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "changes",
    [
        {"stream": False}, {"stop": ["\n"]}, {"logprobs": 1}, {"return_token_ids": True}, {"tools": [{}]},
        {"response_format": {"type": "json_object"}}, {"structured_outputs": {"json": {}}}, {"stop": "x"},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
)  # fmt: skip
def test_where_decode_has_to_begin(changes: Json) -> None:
    plain = request(stream=True, temperature=1, seed=3, stream_options={"include_usage": True})
    assert bodies.inspect(COMPLETIONS, plain).opens
    assert not bodies.inspect(COMPLETIONS, {**plain, **changes}).opens
