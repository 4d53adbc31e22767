"""The real :class:`prebook_connector.ports.Link`: NIXL through vLLM's data path, and the handshake's metadata fetch."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import zmq

from prebook_connector.ports import Groups, HandleState, LinkError, PeerSpec, Posted
from prebook_connector.upstream import GET_META_MSG, DataPath

FETCH_SECONDS = 5.0
MAX_PAYLOAD_BYTES = 64 * 1024 * 1024


class NixlLink:
    """See ``ports.Link``. ``notify_only``: this side never writes (decode)."""

    def __init__(self, data: DataPath, *, notify_only: bool) -> None:
        self._data = data
        self._notify_only = notify_only

    def attach(self, spec: PeerSpec, payloads: dict[tuple[int, int], bytes]) -> dict[str, tuple[int, int]]:
        return self._data.attach_engine(spec, payloads, notify_only=self._notify_only)

    def detach(self, engine_id: str) -> None:
        self._data.detach_engine(engine_id)

    def notify(self, agent: str, payload: bytes) -> None:
        try:
            self._data.nixl_wrapper.send_notif(agent, notif_msg=payload)
        except Exception as error:  # nixl raises its own, undocumented kinds
            raise LinkError(f"cannot notify {agent}: {error}") from error

    def notifications(self) -> list[tuple[str, bytes]]:
        arrived: dict[str, list[bytes]] = self._data.nixl_wrapper.get_new_notifs()
        return [(agent, payload) for agent, payloads in arrived.items() for payload in payloads]

    def targets(self, engine_id: str) -> frozenset[str]:
        return self._data.write_targets(engine_id)

    def writers(self, tp_size: int) -> int:
        return self._data.producers_per_consumer(tp_size)

    def post(
        self, engine_id: str, *, local: Groups, remote: Groups, payload: bytes, regions: tuple[int, int] | None = None
    ) -> Posted:
        write = self._data.write(engine_id, local=local, remote=remote, payload=payload, regions=regions)
        return Posted(tuple(write.handles), write.bytes, write.descriptors)

    def poll(self, handle: Any) -> HandleState:
        try:
            state = self._data.nixl_wrapper.check_xfer_state(handle)
        except Exception:  # a removed agent or a dead connection is reported by raising: the WRITE has failed
            return "failed"
        return "done" if state == "DONE" else "open" if state == "PROC" else "failed"

    def release(self, handle: Any) -> bool:
        try:
            self._data.nixl_wrapper.release_xfer_handle(handle)
        except Exception:  # documented: raises while the transport still works on it
            return False
        return True


def fetch_payloads(data: DataPath, spec: PeerSpec) -> dict[tuple[int, int], bytes]:
    """Asks the side channel of ``spec`` for the handshake payloads that this rank needs. Blocks: runs on a pool.

    Raises :class:`LinkError` when it does not answer in time or not in its language.
    """
    payloads: dict[tuple[int, int], bytes] = {}
    deadline = time.monotonic() + FETCH_SECONDS
    context = zmq.Context()
    try:
        socket = context.socket(zmq.REQ)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        host = f"[{spec.host}]" if ":" in spec.host else spec.host
        socket.connect(f"tcp://{host}:{spec.port}")
        for pp_rank, tp_rank in data.handshake_ranks(spec):
            remaining = max(0.0, deadline - time.monotonic())
            socket.setsockopt(zmq.RCVTIMEO, int(remaining * 1000))
            socket.setsockopt(zmq.SNDTIMEO, int(remaining * 1000))
            socket.send(msgspec.msgpack.encode((GET_META_MSG, pp_rank, tp_rank)))
            reply = socket.recv_multipart()
            if not reply or not reply[0]:
                raise LinkError(f"{spec.host}:{spec.port} has no rank pp={pp_rank} tp={tp_rank}")
            payloads[(pp_rank, tp_rank)] = reply[0]
    except zmq.Again as error:
        raise LinkError(f"side channel {spec.host}:{spec.port} did not answer within {FETCH_SECONDS:.0f} s") from error
    except zmq.ZMQError as error:
        raise LinkError(f"side channel {spec.host}:{spec.port}: {error}") from error
    finally:
        context.destroy(linger=0)
    return payloads
