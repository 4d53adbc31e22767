"""The script of `helm test` against a real HTTP server: it passes for a working operator, and says why it fails."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.chart.helm import Helm, only

METRICS = "# HELP prebook_models Models.\nprebook_models 3\n"


@contextmanager
def operator(answers: Mapping[str, tuple[int, str]]) -> Iterator[str]:
    """A server with fixed answers by path; yields its base URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers[self.path]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def smoke(helm: Helm, base: str) -> subprocess.CompletedProcess[str]:
    """The rendered script, its two URLs moved to `base`."""
    (container,) = only(helm.template(), "Pod")["spec"]["containers"]
    assert container["command"] == ["python3", "-c"]
    script, ready, metrics = container["args"]
    urls = [f"{base}/{url.rpartition('/')[2]}" for url in (ready, metrics)]
    return subprocess.run(
        [sys.executable, "-c", script, *urls], capture_output=True, text=True, timeout=30, check=False
    )


def test_passes_for_a_ready_operator(helm: Helm) -> None:
    with operator({"/readyz": (200, "ok"), "/metrics": (200, METRICS)}) as base:
        done = smoke(helm, base)
    assert (done.returncode, done.stdout) == (0, "ready; 1 metrics\n")


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"/readyz": (503, "no leader"), "/metrics": (200, METRICS)}, "readyz: HTTP Error 503"),
        ({"/readyz": (200, "ok"), "/metrics": (200, "python_info 1\n")}, "no metric"),
        ({"/readyz": (200, "ok"), "/metrics": (500, "")}, "metrics: HTTP Error 500"),
    ],
)
def test_fails_with_the_reason(helm: Helm, answers: Mapping[str, tuple[int, str]], said: str) -> None:
    with operator(answers) as base:
        done = smoke(helm, base)
    assert done.returncode == 1
    assert said in done.stderr


def test_urls_name_the_service_and_its_ports(helm: Helm) -> None:
    manifests = helm.template(release="r", namespace="n")
    service = only(manifests, "Service")
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    (container,) = only(manifests, "Pod")["spec"]["containers"]
    host = f"http://{service['metadata']['name']}.n.svc"
    assert container["args"][1:] == [f"{host}:{ports['health']}/readyz", f"{host}:{ports['metrics']}/metrics"]
