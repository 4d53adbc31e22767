"""The messages that a prefill worker (P) and a decode worker (D) exchange as NIXL notifications.

Pure: no I/O and no vLLM. A notification is ``PREFIX + version byte + msgpack`` of one tagged struct. Fields that a
newer peer adds are ignored; an unknown version, an unknown tag, a type error or an oversized payload raises
:class:`ProtocolError`, which the transfer thread counts and drops, so that no peer can stop it with bad bytes.

Clocks: every ``at``/``echo`` is a ``time.monotonic()`` reading in seconds of the process that is named in the field's
comment. They are never compared across processes, only echoed back to where they come from (see ``leases``).
"""

from __future__ import annotations

from typing import Final

import msgspec

from prebook_connector import PROTOCOL_VERSION

PREFIX: Final = b"PBK"
MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""Upper bound of one notification; a registration of a 1M-token prompt with 16-token blocks is about 300 KiB."""


class ProtocolError(ValueError):
    """A notification that cannot be used; ``kind`` is the label of the counter that it increments."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


class Message(msgspec.Struct, frozen=True, tag_field="op"):
    """Base of all messages."""


class Register(Message, frozen=True, tag="reg"):
    """D to P: here is the destination of one transfer."""

    transfer_id: str
    decode_engine_id: str
    decode_request_id: str
    rank: int  # D's tensor-parallel rank
    tp_size: int  # D's tensor-parallel size
    block_ids: list[list[int]]  # D's logical block ids, one list a KV cache group
    first_block: int  # index in the prompt of block_ids[0][0]; blocks before it are cached on D already
    prompt_tokens: int  # tokens whose KV is expected
    prompt_digest: bytes  # digest of these tokens' ids: a pair that disagrees on the prompt must not exchange KV
    block_size: int  # tokens a block on D
    at: float  # D's clock
    echo: float  # the last P clock reading that D has seen from this P, 0.0 when none
    host: str  # D's side channel, so that P can handshake with a D it was never told about
    port: int


class Progress(Message, frozen=True, tag="prog"):
    """P to D, attached to a WRITE: these prompt blocks have landed."""

    transfer_id: str
    epoch: int
    start: int  # first prompt block of the WRITE
    stop: int  # one past its last


class Commit(Message, frozen=True, tag="commit"):
    """P to D: every WRITE of this rank is DONE. Figures are of P and in P's clock differences (seconds)."""

    transfer_id: str
    epoch: int
    rank: int  # P's transfer rank, unique over pipeline and tensor parallelism
    ranks: int  # how many P ranks write to the receiver
    blocks: int
    bytes: int
    writes: int
    lead_s: float  # prefill finished - registration received; positive: booked before the payload existed
    tail_s: float  # commit sent - last block settled
    overlap: float  # share of bytes DONE before prefill finished, 0..1
    prefill_s: float  # prefill finished - request admitted
    checksums: list[tuple[int, int, int]] = []  # (start, stop, crc32) of block ranges, when verification is on
    echo: float = 0.0  # the D clock reading that P saw last


class Fail(Message, frozen=True, tag="fail"):
    """P to D: the transfer will not be completed. ``quiesced``: no WRITE of it can still land."""

    transfer_id: str
    epoch: int
    rank: int
    reason: str
    quiesced: bool


class Cancel(Message, frozen=True, tag="cancel"):
    """D to P: stop writing, then acknowledge."""

    transfer_id: str


class CancelAck(Message, frozen=True, tag="ack"):
    """P to D: no WRITE of the transfer can still land."""

    transfer_id: str
    rank: int


class Heartbeat(Message, frozen=True, tag="hb"):
    """Both ways: keeps leases and tells which transfers the sender still holds with the receiver."""

    engine_id: str
    at: float  # sender's clock
    echo: float  # the receiver's clock as last seen by the sender, 0.0 when none
    transfer_ids: list[str]


class Bye(Message, frozen=True, tag="bye"):
    """Both ways: the sender drains; do not start transfers with it."""

    engine_id: str


AnyMessage = Register | Progress | Commit | Fail | Cancel | CancelAck | Heartbeat | Bye

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)
_HEADER = PREFIX + bytes([PROTOCOL_VERSION])


def encode(message: AnyMessage) -> bytes:
    """Bytes of one notification. Raises :class:`ProtocolError` (``oversized``) when it is over the limit."""
    payload = _HEADER + _encoder.encode(message)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ProtocolError("oversized", f"{type(message).__name__} of {len(payload)} bytes")
    return payload


def is_ours(payload: bytes) -> bool:
    """Whether the notification carries Prebook's prefix (stock vLLM peers send others)."""
    return payload.startswith(PREFIX)


def decode(payload: bytes) -> AnyMessage:
    """The message in ``payload``.

    Raises :class:`ProtocolError` with kind ``foreign`` (no prefix), ``oversized``, ``version`` or ``malformed``.
    """
    if not is_ours(payload):
        raise ProtocolError("foreign", f"{len(payload)} bytes without the prefix")
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ProtocolError("oversized", f"{len(payload)} bytes")
    version = payload[len(PREFIX) : len(PREFIX) + 1]
    if version != bytes([PROTOCOL_VERSION]):
        raise ProtocolError("version", f"{version!r}, this side speaks {PROTOCOL_VERSION}")
    try:
        return _decoder.decode(payload[len(_HEADER) :])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError("malformed", str(error)[:200]) from error
