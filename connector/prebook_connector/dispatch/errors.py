"""Errors that the dispatcher itself gives to a client, in the shape of vLLM's own (OpenAI's error object).

Shape as in ``vllm/entrypoints/serve/engine/protocol.py`` (ErrorResponse), vLLM 0.32.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus

from prebook_connector.dispatch.reasons import Refusal, explain
from prebook_connector.dispatch.types import Send

_STATUS: dict[Refusal, HTTPStatus] = {
    Refusal.NO_TOKEN: HTTPStatus.FORBIDDEN,
    Refusal.WRONG_TOKEN: HTTPStatus.FORBIDDEN,
    Refusal.NO_TOKEN_CONFIGURED: HTTPStatus.FORBIDDEN,
    Refusal.BAD_PARAMETERS: HTTPStatus.BAD_REQUEST,
    Refusal.DRAINING: HTTPStatus.SERVICE_UNAVAILABLE,
    Refusal.BODY_TOO_LARGE: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    Refusal.BODY_TIMEOUT: HTTPStatus.REQUEST_TIMEOUT,
    Refusal.TOO_DEEP: HTTPStatus.BAD_REQUEST,
    Refusal.NO_READY_PEER: HTTPStatus.SERVICE_UNAVAILABLE,
    Refusal.PREFILL_FAILED: HTTPStatus.BAD_GATEWAY,
    Refusal.FIRST_BYTE_DEADLINE: HTTPStatus.GATEWAY_TIMEOUT,
    Refusal.FIRST_TOKEN_LOST: HTTPStatus.BAD_GATEWAY,
}


@dataclass(frozen=True)
class ErrorAnswer:
    """An error on its way to a client."""

    status: int
    message: str
    type: str
    param: str | None = None

    @classmethod
    def of(cls, refusal: Refusal, *, detail: str = "") -> ErrorAnswer:
        """The answer for a refusal. ``detail`` must not hold bytes that came from elsewhere."""
        status = _STATUS[refusal]
        message = explain(refusal) + (f" ({detail})" if detail else "")
        return cls(status=status.value, message=message[0].upper() + message[1:], type=_type_name(status))

    def body(self) -> bytes:
        """The JSON document."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.status}
        return json.dumps({"error": error}).encode()

    def event(self) -> bytes:
        """The same document as a server-sent event, for a stream that has already begun."""
        return b"data: " + self.body() + b"\n\ndata: [DONE]\n\n"


def _type_name(status: HTTPStatus) -> str:
    words = "".join(word.capitalize() for word in status.phrase.replace("-", " ").split())
    return words if words.endswith("Error") else f"{words}Error"


async def send_json(
    send: Send, body: bytes, *, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    """Sends one complete JSON response on an ASGI channel."""
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(send: Send, answer: ErrorAnswer, *, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    """Sends an error as one complete response."""
    await send_json(send, answer.body(), status=answer.status, headers=headers)
