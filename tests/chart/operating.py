"""The operator's program, run beside a control plane under the service account that the chart made for it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.kube.controlplane import ControlPlane, free_ports, wait_for
from tests.kube.fakenodes import FakeKubelet

ACCOUNT = "prebook-operator"
POD_ADDRESS = "127.77.0.1"
"""Loopback address that stands for the pods': Linux answers on all of 127/8 without any set-up."""


def user(namespace: str) -> str:
    """The operator's name in the audit log."""
    return f"system:serviceaccount:{namespace}:{ACCOUNT}"


@contextmanager
def operator(cluster: ControlPlane, home: str, scope: Sequence[str], *, until_ready: bool = True) -> Iterator[str]:
    """Runs the operator with `scope` flags and its account's rights; yields the URL of its health port."""
    health, metrics = free_ports(2)
    log = cluster.folder / f"operator-{home}.log"
    argv = [sys.executable, "-m", "prebook_operator.cli.main", "operator", *scope, "--image=localhost/prebook:test"]
    argv += [f"--kubeconfig={cluster.service_account_kubeconfig(home, ACCOUNT)}", f"--lease-namespace={home}"]
    argv += [f"--health-port={health}", f"--metrics-port={metrics}", "--bind=127.0.0.1", "--log-format=json"]
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, env=cluster.client_env())
    url = f"http://127.0.0.1:{health}"

    def ready() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"the operator ended with status {process.returncode}:\n{log.read_text()[-4000:]}")
        return answers(f"{url}/readyz")

    try:
        if until_ready:
            wait_for("operator ready", ready, seconds=60)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


def answers(url: str) -> bool:
    """Whether `url` answers with status 200."""
    return ask(url)[0] == 200


def ask(url: str) -> tuple[int, str]:
    """Status and body of `url`; 0 when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


@contextmanager
def paired_pods() -> Iterator[None]:
    """Something that answers on port 8000 of POD_ADDRESS as a decode pod does that is paired with its one peer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pairs = {"ready": 1, "possible": 1, "peers": []}
            body = json.dumps({"role": "decode", "ready": True, "reason": "", "pairs": pairs, "draining": False})
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((POD_ADDRESS, 8000), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def bring_up(cluster: ControlPlane, namespace: str, *, pods: int) -> None:
    """Waits until controllers have made `pods` pods of engines, and reports them as running and ready."""
    kubelet = FakeKubelet(cluster.api, namespace)
    selector = "app.kubernetes.io/managed-by=prebook"
    wait_for(f"{pods} engine pods", lambda: len(kubelet.pods(selector)) == pods, seconds=60)
    for pod in kubelet.pods(selector):
        kubelet.mark(pod["metadata"]["name"], ip=POD_ADDRESS)


def conditions(model: dict[str, Any]) -> dict[str, str]:
    """Status of each condition, of the current generation only."""
    generation = model["metadata"]["generation"]
    return {
        condition["type"]: condition["status"]
        for condition in model.get("status", {}).get("conditions", [])
        if condition["observedGeneration"] == generation
    }
