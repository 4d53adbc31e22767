"""The control socket of a connector process: the dispatcher tells it about peers and asks it for its state.

A Unix stream socket in the pod's private run folder; one JSON object a line, one answer a line. Handlers run on this
module's thread and either read a snapshot or submit a call to the transfer thread, so that a slow or hostile client
can hold up nobody but itself. Garbage gets ``{"ok": false, "error": ...}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import socketserver
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 4 * 1024 * 1024

Handler = Callable[[dict[str, Any]], dict[str, Any]]


class ControlError(ValueError):
    """A request that cannot be served; the text goes to the client."""


def answer(line: bytes, handlers: Mapping[str, Handler]) -> dict[str, Any]:
    """The answer to one request line. Never raises."""
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            raise ControlError("a request is a JSON object")
        operation = request.get("op")
        if not isinstance(operation, str) or operation not in handlers:
            raise ControlError(f"op must be one of {', '.join(sorted(handlers))}")
        return {"ok": True, **handlers[operation](request)}
    except (ControlError, ValueError, RecursionError) as error:
        return {"ok": False, "error": str(error)[:500]}
    except Exception as error:  # a bug in a handler must reach the client, not end its connection
        return {"ok": False, "error": f"internal: {type(error).__name__}: {error}"[:500]}


class ControlServer:
    """Serves ``handlers`` on ``folder/name``."""

    def __init__(self, *, folder: Path, name: str, handlers: Mapping[str, Handler]) -> None:
        self.path = folder / name
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()  # left behind by an engine that was killed

        class Connection(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                while line := self.rfile.readline(MAX_LINE_BYTES + 1):
                    if len(line) > MAX_LINE_BYTES:
                        self.wfile.write(b'{"ok": false, "error": "line too long"}\n')
                        return
                    self.wfile.write(json.dumps(answer(line, handlers)).encode() + b"\n")

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that left mid-answer is not worth a traceback."""

        self._server = Server(str(self.path), Connection)
        os.chmod(self.path, 0o600)
        self._thread = threading.Thread(target=self._server.serve_forever, name=f"prebook-{name}", daemon=True)

    def start(self) -> None:
        """Starts serving."""
        self._thread.start()

    def stop(self) -> None:
        """Stops and removes the socket."""
        self._server.shutdown()
        self._server.server_close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
