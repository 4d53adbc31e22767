"""The beginning of a stream that prefill's token makes, and decode's stream without that beginning. Pure.

With ``firstToken: Prefill`` a client's stream starts with the token that prefill sampled, while its KV is still under
way. Decode is made to sample the same token, so its own stream begins with the same text once more: that text is cut
off, event by event, and everything after it passes through as it is.

Event shapes are those of vLLM 0.32's ``completion_stream_generator`` and ``chat_completion_stream_generator``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from prebook_connector.dispatch.bodies import CHAT

_DATA = b"data: "
_END = b"\n\n"


class Diverged(Exception):
    """Decode did not continue from the token that the client has seen."""


@dataclass(frozen=True)
class Opening:
    """Prefill's first token: its id, its text, and the server-sent events that show it to a client."""

    token: int
    text: str
    events: bytes


def opening(path: str, answer: dict[str, Any], token: object) -> Opening | None:
    """The opening that prefill's (whole, not streamed) answer to a leg makes; None when decode has to begin.

    That is so when the first token ended the answer, or belongs to a part of it that a parser of the engine's shapes. A
    token without text (half a character, a special token) makes an empty event, as it does in vLLM's own stream.
    """
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    if not isinstance(choice, dict) or choice.get("finish_reason") != "length" or type(token) is not int:
        return None
    head = {"id": answer.get("id"), "created": answer.get("created"), "model": answer.get("model")}
    if path != CHAT:
        text = _shown(choice.get("text"))
        if text is None:
            return None
        return Opening(token, text, _event({**head, "object": "text_completion"}, {"text": text}))
    message = choice.get("message")
    if not isinstance(message, dict) or any(
        message.get(key) for key in ("tool_calls", "function_call", "reasoning", "reasoning_content", "refusal")
    ):
        return None
    text = _shown(message.get("content"))
    if text is None:
        return None
    head["object"] = "chat.completion.chunk"
    role = _event(head, {"delta": {"role": message.get("role", "assistant"), "content": ""}})
    return Opening(token, text, role + _event(head, {"delta": {"content": text}}))


def _shown(text: object) -> str | None:
    """The text of a first event; empty where half a character ended the answer as a replacement character."""
    if not isinstance(text, str):
        return None
    return "" if "\ufffd" in text else text


def _event(head: dict[str, Any], part: dict[str, Any]) -> bytes:
    choice = {"index": 0, **part, "logprobs": None, "finish_reason": None}
    return _DATA + json.dumps({**head, "choices": [choice]}, ensure_ascii=False).encode() + _END


class Continuation:
    """Decode's stream after an :class:`Opening`: ``feed`` gives what of each piece is new to the client."""

    def __init__(self, text: str) -> None:
        self._left = text
        self._repeats = True
        self._buffer = b""

    @property
    def settled(self) -> bool:
        """Whether decode has repeated the opening, so that everything from now on is new."""
        return not self._repeats

    def feed(self, piece: bytes) -> bytes:
        """Raises :class:`Diverged`."""
        if not self._repeats:
            return piece
        self._buffer += piece
        new = b""
        while (end := self._buffer.find(_END)) >= 0:
            event, self._buffer = self._buffer[: end + len(_END)], self._buffer[end + len(_END) :]
            new += self._cut(event)
            if self.settled:
                return new + self._buffer
        return new

    def _cut(self, event: bytes) -> bytes:
        if not event.startswith(_DATA + b"{"):
            if event.startswith(_DATA):  # [DONE], too early
                raise Diverged
            return event  # a comment
        document = json.loads(event[len(_DATA) :])
        choices = document.get("choices")
        if "error" in document or not choices:
            self._repeats = "error" not in document
            return event
        choice = choices[0]
        holder, key = (choice["delta"], "content") if "delta" in choice else (choice, "text")
        said, ends = holder.get(key) or "", choice.get("finish_reason") is not None
        if "role" in holder and not said and not ends:
            return b""
        if said.startswith(self._left):
            holder[key], self._repeats = said[len(self._left) :], False
            return _DATA + json.dumps(document, ensure_ascii=False).encode() + _END if holder[key] or ends else b""
        if not self._left.startswith(said) or ends:
            raise Diverged
        self._left = self._left[len(said) :]
        return b""
