"""The side-channel listener: serves handshake payloads to peers, whatever else arrives on its port.

Same language as vLLM's own listener (ROUTER socket; a request is msgpack of ``(GET_META_MSG, pp rank, tp rank)``, the
answer ``payload, msgpack(clock)``), so that stock peers can ask too. Upstream's thread dies of one malformed request
(vllm#54757) and then no new peer can be met; here every request is checked, answered or dropped, and counted.
"""

from __future__ import annotations

import logging
import threading
import time

import msgspec
import zmq

logger = logging.getLogger(__name__)

POLL_MILLISECONDS = 500
MAX_REQUEST_BYTES = 4096


class HandshakeListener:
    """Serves ``payloads`` ((pp, tp) to encoded payload) on ``host:port`` from a thread of its own."""

    def __init__(self, *, host: str, port: int, payloads: dict[tuple[int, int], bytes], greeting: bytes) -> None:
        self._endpoint = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self._payloads = payloads
        self._greeting = greeting
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._failure: zmq.ZMQError | None = None
        self.served = 0
        self.refused = 0
        self._thread = threading.Thread(target=self._run, name="prebook-handshake", daemon=True)

    def start(self) -> None:
        """Binds; raises OSError with the endpoint when it cannot."""
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise OSError(f"cannot listen for handshakes on {self._endpoint}: {self._failure}")

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        context = zmq.Context()
        try:
            socket = context.socket(zmq.ROUTER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
            socket.setsockopt(zmq.RCVTIMEO, POLL_MILLISECONDS)
            # A client that does not read its answer is dropped instead of waited for.
            socket.setsockopt(zmq.SNDTIMEO, 0)
            socket.setsockopt(zmq.IPV6, 1 if "[" in self._endpoint else 0)
            socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            self._failure = error
            self._ready.set()
            context.destroy(linger=0)
            return
        self._ready.set()
        while not self._stop.is_set():
            try:
                frames = socket.recv_multipart()
                socket.send_multipart(self._answer(frames))
                self.served += 1
            except zmq.Again:
                continue
            except (ValueError, zmq.ZMQError) as error:
                self.refused += 1
                logger.debug("handshake request refused: %s", error)
        context.destroy(linger=0)

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        """Frames to send back. Raises ValueError for anything that is not a request for a rank that exists."""
        if len(frames) != 3 or frames[1] != b"":
            raise ValueError(f"{len(frames)} frames")
        try:
            request = msgspec.msgpack.decode(frames[2], type=tuple[bytes, int, int])
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from error
        if request[0] != self._greeting:
            raise ValueError("unknown request")
        payload = self._payloads.get((request[1], request[2]), b"")
        # An unknown rank gets an empty payload: the asker fails at once instead of running into its timeout.
        return [frames[0], b"", payload, msgspec.msgpack.encode(time.perf_counter())]
