"""Server-sent events as vLLM streams them, and what a client reads of them."""

from __future__ import annotations

import json

from tests.unit.dispatch_engine import Json

HEAD = {"id": "cmpl-1", "created": 1, "model": "m"}


def completion(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    return b"data: " + json.dumps({**HEAD, "object": "text_completion", "choices": [choice]}).encode() + b"\n\n"


def chat(delta: Json, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({**HEAD, "object": "chat.completion.chunk", "choices": [choice]}).encode() + b"\n\n"


def texts(stream: bytes) -> str:
    """What a client reads."""
    said = ""
    for event in stream.split(b"\n\n"):
        if event.startswith(b"data: {"):
            for choice in json.loads(event[6:]).get("choices", ()):
                said += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return said
