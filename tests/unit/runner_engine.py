"""A stand-in for an engine, for tests of the local runner only: a small HTTP server with switches for everything
that can go wrong.

    python runner_engine.py --port 8000 [--dir DIR] [--delay S] [--crash S] [--ignore-term] [--child]

GET /health 200; /prebook/v1/ready 200 unless DIR/unready exists; /prebook/v1/status a status document; /env the
environment as JSON; /v1/models and /v1/chat/completions (a streamed answer). DIR/<event> files record what happened
(started, term).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--host", default=os.environ.get("POD_IP", "127.0.0.1"))
parser.add_argument("--port", type=int, default=8000)
parser.add_argument("--dir", type=Path)
parser.add_argument("--delay", type=float, default=0.0)
parser.add_argument("--crash", type=float)
parser.add_argument("--ignore-term", action="store_true")
parser.add_argument("--child", action="store_true")
options = parser.parse_args()


def note(event: str) -> None:
    if options.dir:
        with (options.dir / f"{event}-{os.environ.get('POD_NAME', '')}").open("a") as log:
            log.write(f"{os.getpid()} {time.time()}\n")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        return

    def answer(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {
            "Content-Length": str(len(body)),
            "Content-Type": "application/json",
            **(headers or {}),
        }.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/prebook/v1/ready" and options.dir and (options.dir / "unready").exists():
            self.answer({"reason": "told to be unready"}, 503)
        elif self.path == "/health" and options.dir and (options.dir / "sick").exists():
            self.answer({}, 500)
        elif self.path == "/env":
            self.answer(dict(os.environ))
        elif self.path == "/v1/models":
            self.answer({"data": [{"id": "fake"}]})
        elif self.path == "/prebook/v1/status":
            role = os.environ.get("ROLE", "")
            self.answer(
                {
                    "role": role,
                    "engine_id": f"engine-of-{os.environ.get('POD_NAME')}",
                    "ready": True,
                    "reason": "",
                    "pairs": {"ready": 1, "possible": 1, "peers": []},
                    "requests": {"remote": 3, "local": {"short": 1}},
                }
            )
        elif self.path.startswith("/prebook/v1/transfers/abc"):
            engine = os.environ.get("PREFILL_ENGINE", "")
            self.answer(
                {
                    "ok": True,
                    "known": True,
                    "state": "committed",
                    "prefill_engine_id": engine,
                    "tokens": 5,
                    "blocks": 1,
                    "bytes": 81920,
                    "writes": 1,
                    "lead_s": 0.25,
                    "exposed_s": 0.003,
                    "overlap": 0.5,
                }
            )
        else:
            self.answer({"path": self.path, "pod": os.environ.get("POD_NAME", "")})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("x-prebook-transfer", "abc")
        self.end_headers()
        events = [{"choices": [{"delta": {"content": piece}}]} for piece in ("Par", "is", ".")]
        events.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        events.append({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
        for text in [*(json.dumps(event) for event in events), "[DONE]"]:
            data = f"data: {text}\n\n".encode()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")


def on_term(*_: object) -> None:
    note("term")
    if not options.ignore_term:
        os._exit(0)


note("started")
signal.signal(signal.SIGTERM, on_term)
if options.child:
    # Leaves the process group and the session, as a careless engine does.
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(f"child {child.pid}", flush=True)
if options.crash is not None:
    time.sleep(options.crash)
    raise ValueError("the fake engine was told to crash")
time.sleep(options.delay)
print("serving", flush=True)
server = ThreadingHTTPServer((options.host, options.port), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    signal.pause()
