"""One question through the front door, and the account of how it was served.

The question goes the way a client's would: a streamed chat completion to the front Service. The account comes from
the decode pod that served it, by the transfer id in the answer's headers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from prebook_operator.local.errors import AskError
from prebook_operator.local.httpclient import HttpError, Response, get_json, request
from prebook_operator.local.state import PodRow

TRANSFER_HEADER = "x-prebook-transfer"
LOCAL_HEADER = "x-prebook-local"
_CONNECT_TIMEOUT = 10.0
# The first token of a long prompt on one core may take minutes; later pieces never do.
_FIRST_TIMEOUT = 900.0
_NEXT_TIMEOUT = 120.0
_ACCOUNT_TIMEOUT = 5.0
# States of a transfer that do not change any more; vLLM's own connectors report none.
_FINAL = frozenset({"committed", "failed", "released", ""})


class Transfer(BaseModel):
    """A decode pod's account of one transfer. Durations in seconds."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    known: bool = True
    state: str = ""
    peer: str | None = None
    prefill_leg_s: float | None = None
    prefill_engine_id: str | None = None
    tokens: int | None = None
    blocks: int | None = None
    bytes: int | None = None
    writes: int | None = None
    lead_s: float | None = None
    exposed_s: float | None = None
    overlap: float | None = None


@dataclass(frozen=True)
class Answer:
    """What came back: how it was served, how much, how fast. ``first_token`` and ``total`` in seconds."""

    transfer_id: str
    local_reason: str
    prompt_tokens: int | None
    completion_tokens: int | None
    first_token: float | None
    total: float
    finish_reason: str
    text: str


async def ask(question: str, *, host: str, port: int, max_tokens: int, on_text: Callable[[str], None]) -> Answer:
    """Asks and streams the answer to ``on_text``. Raises ``AskError`` when there is none."""
    started = time.monotonic()
    try:
        model = await _served_model(host=host, port=port)
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        messages = [{"role": "user", "content": question}]
        async with request(
            "POST",
            host=host,
            port=port,
            path="/v1/chat/completions",
            headers=_JSON,
            head_within=_FIRST_TIMEOUT,
            body=json.dumps({**body, "messages": messages}).encode(),
        ) as response:
            if response.status == 200:
                return await _collect(response, started=started, on_text=on_text)
            problem = await _problem(response)
        if "chat template" not in problem:
            raise AskError(f"the model refused the question: {problem}")
        # A model without a chat template can only continue text.
        async with request(
            "POST",
            host=host,
            port=port,
            path="/v1/completions",
            headers=_JSON,
            head_within=_FIRST_TIMEOUT,
            body=json.dumps({**body, "prompt": question}).encode(),
        ) as response:
            if response.status != 200:
                raise AskError(f"the model refused the question: {await _problem(response)}")
            return await _collect(response, started=started, on_text=on_text)
    except HttpError as error:
        raise AskError(
            f"the question got no answer: {error}", remedy="`prebook logs NAME` shows what the engines say"
        ) from error
    except TimeoutError as error:
        raise AskError("the engine stopped answering in the middle", remedy="`prebook logs NAME` shows why") from error


async def fetch_account(transfer_id: str, *, pods: Sequence[PodRow]) -> Transfer | None:
    """The account of ``transfer_id`` from whichever decode pod knows it; None when none does within a few seconds."""
    decodes = [pod for pod in pods if pod.role == "decode"]
    deadline = time.monotonic() + _ACCOUNT_TIMEOUT
    newest: Transfer | None = None
    while time.monotonic() < deadline:
        for pod in decodes:
            found = await _account_of(transfer_id, pod=pod)
            if found is not None and found.known:
                ended_before = newest is not None and newest.state in _FINAL
                newest = found
                # A client that has read its last token asks before the dispatcher has noted how long prefill's leg
                # took, and is told what the connector knows: that is worth one more look.
                if found.state in _FINAL and (found.prefill_leg_s is not None or ended_before):
                    return found
        await asyncio.sleep(0.2)
    return newest


def describe_account(answer: Answer, *, transfer: Transfer | None, pods: Sequence[PodRow]) -> list[str]:
    """The account as lines for people."""
    lines = [_line("answer", _answer_words(answer))]
    prompt = "" if answer.prompt_tokens is None else f"{answer.prompt_tokens} tokens"
    if answer.local_reason or not answer.transfer_id:
        why = f" ({answer.local_reason})" if answer.local_reason else ""
        return [*lines, _line("prompt", prompt), _line("prefilled by", f"decode itself{why}; no KV was moved")]
    if transfer is None:
        return [*lines, _line("prompt", prompt), _line("transfer", f"{answer.transfer_id}: no account of it")]
    lines += [_line("prompt", prompt), _line("prefilled by", _prefill_name(transfer, pods=pods))]
    if transfer.prefill_leg_s is not None:
        lines.append(_line("prefill took", _ms(transfer.prefill_leg_s)))
    if not transfer.state:
        return [*lines, _line("transfer", "by vLLM's own connector, which keeps no account of it")]
    if transfer.state != "committed":
        return [*lines, _line("transfer", f"{transfer.state}; decode computed the prompt itself")]
    if transfer.bytes is not None:
        writes = "" if transfer.writes is None else f" in {transfer.writes} write{'s' if transfer.writes != 1 else ''}"
        blocks = "" if transfer.blocks is None else f" ({transfer.blocks} block{'s' if transfer.blocks != 1 else ''})"
        lines.append(_line("KV pushed", f"{transfer.bytes:,} bytes{blocks}{writes}"))
    if transfer.lead_s is not None:
        when = "before" if transfer.lead_s >= 0 else "after"
        lines.append(_line("booked", f"{_ms(abs(transfer.lead_s))} {when} prefill finished"))
    if transfer.exposed_s is not None:
        overlap = (
            "" if transfer.overlap is None else f" ({transfer.overlap:.0%} of the bytes moved while prefill computed)"
        )
        lines.append(_line("exposed transfer", f"{_ms(transfer.exposed_s)}{overlap}"))
    return lines


_JSON = {"Content-Type": "application/json", "Accept": "text/event-stream"}


async def _served_model(*, host: str, port: int) -> str:
    code, value = await get_json(host=host, port=port, path="/v1/models", within=_CONNECT_TIMEOUT)
    models = value.get("data")
    if code != 200 or not isinstance(models, list) or not models:
        raise AskError(f"the front door does not name a model (HTTP {code}): {json.dumps(value)[:300]}")
    return str(models[0].get("id"))


async def _collect(response: Response, *, started: float, on_text: Callable[[str], None]) -> Answer:
    usage: Mapping[str, Any] = {}
    first: float | None = None
    pieces: list[str] = []
    finish = ""
    async for event in _events(response):
        if "error" in event:
            raise AskError(
                f"the engine reported an error in the middle of the answer: {json.dumps(event['error'])[:500]}"
            )
        usage = event.get("usage") or usage
        for choice in event.get("choices", []):
            piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            finish = choice.get("finish_reason") or finish
            if piece:
                first = time.monotonic() - started if first is None else first
                pieces.append(piece)
                on_text(piece)
    if not finish:
        raise AskError("the answer ended without a finish reason: the engine went away")
    return Answer(
        transfer_id=response.headers.get(TRANSFER_HEADER, ""),
        local_reason=response.headers.get(LOCAL_HEADER, ""),
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        first_token=first,
        total=time.monotonic() - started,
        finish_reason=finish,
        text="".join(pieces),
    )


async def _events(response: Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to its end or ``[DONE]``."""
    rest = b""
    chunks = response.chunks()
    timeout = _FIRST_TIMEOUT
    while True:
        try:
            async with asyncio.timeout(timeout):
                rest += await anext(chunks)
        except StopAsyncIteration:
            return
        timeout = _NEXT_TIMEOUT
        *lines, rest = rest.split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if line.startswith(b"data:") and isinstance(event := json.loads(data), dict):
                yield event


async def _problem(response: Response) -> str:
    body = (await response.body()).decode(errors="replace")
    try:
        value = json.loads(body)
        message = value.get("error", value).get("message", body)
    except (ValueError, AttributeError):
        message = body
    return f"HTTP {response.status}: {str(message)[:500]}"


async def _account_of(transfer_id: str, *, pod: PodRow) -> Transfer | None:
    try:
        code, value = await get_json(
            host=pod.ip, port=pod.port, path=f"/prebook/v1/transfers/{transfer_id}", within=2.0
        )
        return Transfer.model_validate(value) if code == 200 else None
    except (HttpError, ValidationError):
        return None  # this pod does not know it; another may


def _prefill_name(transfer: Transfer, *, pods: Sequence[PodRow]) -> str:
    for pod in pods:
        if (pod.engine_id and pod.engine_id == transfer.prefill_engine_id) or transfer.peer == f"{pod.ip}:{pod.port}":
            return f"{pod.short} ({pod.ip})"
    return transfer.peer or transfer.prefill_engine_id or "unknown"


def _answer_words(answer: Answer) -> str:
    parts = []
    if answer.completion_tokens is not None:
        parts.append(f"{answer.completion_tokens} tokens in {answer.total:.1f} s")
    if answer.first_token is not None:
        parts.append(f"first after {_ms(answer.first_token)}")
    if answer.finish_reason == "length":
        parts.append("cut at --max-tokens")
    return ", ".join(parts)


def _line(name: str, value: str) -> str:
    return f"  {name:<17} {value}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
