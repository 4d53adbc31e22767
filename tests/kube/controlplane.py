"""A real Kubernetes control plane in a folder: etcd, API server, controller manager and scheduler, up in seconds.

All ports are free ones, everything is below one folder, and `stop()` (or the reaper, when Python is killed) leaves
nothing behind.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from hack.kube.binaries import locate
from tests.kube.audit import AuditLog
from tests.kube.pki import Authority, KeyPair, signing_key
from tests.kube.processes import ProcessFailed, ProcessSet, dismiss, start_reaper
from tests.kube.rest import ApiError, Json, Rest

SERVICE_CIDR = "10.97.0.0/16"
KUBERNETES_SERVICE_IP = "10.97.0.1"
CLUSTER_DOMAIN = "cluster.local"
POLL_SECONDS = 0.1

# One line for each request that can change something or be counted; leases and events would drown the rest.
AUDIT_POLICY: Json = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}


@dataclass(frozen=True)
class Options:
    """How a control plane is started.

    `advertise` is the address at which pods of a real node reach the API server; with it the server listens on all
    addresses. `controllers` are switches of the controller manager; fake nodes never send a heartbeat, so node-
    lifecycle is off by default.
    """

    audit: bool = False
    controller_manager: bool = True
    scheduler: bool = True
    advertise: str | None = None
    controllers: Sequence[str] = ("*", "-node-lifecycle-controller")
    apiserver_args: Sequence[str] = field(default_factory=tuple)
    controller_manager_args: Sequence[str] = field(default_factory=tuple)
    ready_seconds: float = 120.0  # 3-4 s on an idle machine; two busy cores stretch that a lot


def free_ports(count: int) -> list[int]:
    """Ports on 127.0.0.1 that nobody listens on, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def wait_for(what: str, check: Callable[[], bool], *, seconds: float, interval: float = POLL_SECONDS) -> None:
    """Poll until `check` is true. TimeoutError says what was waited for, and the last API error."""
    deadline = time.monotonic() + seconds
    last: Exception | None = None
    while True:
        try:
            if check():
                return
        except (OSError, ApiError) as error:
            last = error
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s" + (f" ({last})" if last else ""))
        time.sleep(interval)


class ControlPlane:
    """A running control plane. Use as a context manager, or `start()` and `stop()`."""

    def __init__(self, options: Options | None = None, *, folder: Path | None = None, watched: bool = True) -> None:
        self.options = options or Options()
        self.folder = folder or Path(tempfile.mkdtemp(prefix="prebook-kube-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.processes = ProcessSet(self.folder)
        self._reaper = start_reaper(self.folder) if watched else None
        self.admin_token = secrets.token_hex(16)
        self._tokens = [f'{self.admin_token},prebook-admin,prebook-admin,"system:masters"']
        self._etcd_port, self._etcd_peer_port, self.port, self._manager_port, self._scheduler_port = free_ports(5)
        self.pki = Authority(self.folder / "pki")
        self.ca = self.pki.certificate

    # -- life cycle ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything and wait until objects can be created, and controllers and scheduler work."""
        try:
            self._prepare()
            self._start_etcd()
            self._start_apiserver()
            # The controller manager gives up when the API server is not healthy within 10 s of its own start.
            self._wait_apiserver()
            if self.options.controller_manager:
                self._start_controller_manager()
            if self.options.scheduler:
                self._start_scheduler()
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End all processes and remove the folder (kept when PREBOOK_KEEP_CLUSTER is set, for its logs)."""
        self.processes.stop_all()
        if self._reaper is not None:
            dismiss(self._reaper)
            self._reaper = None
        if not os.environ.get("PREBOOK_KEEP_CLUSTER"):
            shutil.rmtree(self.folder, ignore_errors=True)

    # -- use -----------------------------------------------------------------------------------------------------------

    @property
    def server(self) -> str:
        """Base URL of the API server."""
        return f"https://127.0.0.1:{self.port}"

    @property
    def api(self) -> Rest:
        """Small REST client with all rights."""
        return Rest("127.0.0.1", self.port, self.admin_token, self.ca)

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig with all rights."""
        return self.folder / "admin.kubeconfig"

    @property
    def audit(self) -> AuditLog:
        """What the API server was asked. Raises ProcessFailed unless started with `audit`."""
        if not self.options.audit:
            raise ProcessFailed("this control plane was started without an audit log: Options(audit=True)")
        return AuditLog(self.folder / "audit.log")

    def service_account_kubeconfig(self, namespace: str, name: str, *, seconds: int = 7200) -> Path:
        """Kubeconfig with a service account's token (the account must exist), for tests with RBAC as shipped."""
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": seconds},
        }
        answer = self.api.create(f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token", body)
        return self.write_kubeconfig(f"{namespace}.{name}", str(answer["status"]["token"]), namespace=namespace)

    def write_kubeconfig(self, name: str, token: str, *, namespace: str = "default", server: str | None = None) -> Path:
        """Write `<name>.kubeconfig` for a bearer token."""
        cluster = {"server": server or self.server, "certificate-authority": str(self.ca)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "prebook", "cluster": cluster}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": "prebook", "context": {"cluster": "prebook", "user": name, "namespace": namespace}}],
            "current-context": "prebook",
        }
        path = self.folder / f"{name}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(json.dumps(config, indent=1))
        return path

    def kubectl(
        self, *args: str, stdin: str | None = None, kubeconfig: Path | None = None, seconds: float = 120
    ) -> str:
        """Run kubectl and return what it prints. Raises ProcessFailed with its error output."""
        return self._client("kubectl", args, stdin, kubeconfig, seconds)

    def helm(self, *args: str, stdin: str | None = None, kubeconfig: Path | None = None, seconds: float = 300) -> str:
        """Run Helm (its own folders lie in ours) and return what it prints. Raises ProcessFailed with its errors."""
        return self._client("helm", args, stdin, kubeconfig, seconds)

    def restart_apiserver(self, *, kill: bool = False) -> None:
        """Stop the API server (with SIGKILL if asked) and start it again on the same port."""
        self.processes.stop("kube-apiserver", kill=kill)
        self._start_apiserver()
        self._wait_apiserver()

    def stop_apiserver(self, *, kill: bool = False) -> None:
        """Stop the API server alone; `restart_apiserver` is not needed afterwards, `start_apiserver` is."""
        self.processes.stop("kube-apiserver", kill=kill)

    def start_apiserver(self) -> None:
        """Start an API server that was stopped."""
        self._start_apiserver()
        self._wait_apiserver()

    def compact(self) -> int:
        """Compact etcd up to its present revision, which is returned.

        The watch cache still serves older revisions; restart the API server as well to make a watch from one end in 410
        Gone.
        """
        # A range of a key that does not exist: its header carries the revision.
        revision = int(self._etcd("kv/range", {"key": "Lg=="})["header"]["revision"])
        self._etcd("kv/compaction", {"revision": revision, "physical": True})
        return revision

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        hosts = ["127.0.0.1", "localhost", "kubernetes.default.svc", KUBERNETES_SERVICE_IP]
        if self.options.advertise:
            hosts.append(self.options.advertise)
        self._serving = self.pki.issue("apiserver", hosts=hosts)
        self._kubelet_client: KeyPair = self.pki.issue("kubelet-client", organization="system:masters")
        signing_key(self.folder / "pki" / "service-accounts.key")
        for name in (
            "kube-controller-manager",
            "kube-scheduler",
        ):  # users of their own, for the audit log to tell apart
            self.write_kubeconfig(name, self.add_token(f"system:{name}", group="system:masters"))
        (self.folder / "audit-policy.json").write_text(json.dumps(AUDIT_POLICY))
        self.write_kubeconfig("admin", self.admin_token)

    def add_token(self, user: str, *, group: str) -> str:
        """Add a bearer token for a user; the API server reads the file when it starts."""
        token = secrets.token_hex(16)
        self._tokens.append(f'{token},{user},{user},"{group}"')
        path = self.folder / "tokens.csv"
        path.touch(mode=0o600)
        path.write_text("\n".join(self._tokens) + "\n")
        return token

    def _start_etcd(self) -> None:
        client, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{self._etcd_peer_port}"
        argv: list[str | Path] = [
            locate("etcd"),
            "--name=prebook",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=prebook={peer}",
            "--unsafe-no-fsync",  # losing it with the machine is what throw-away means
            "--log-level=warn",
        ]
        self.processes.start("etcd", argv)

    def _start_apiserver(self) -> None:
        folder, advertise = self.folder, self.options.advertise
        argv: list[str | Path] = [
            locate("kube-apiserver"),
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            f"--bind-address={'0.0.0.0' if advertise else '127.0.0.1'}",
            f"--advertise-address={advertise or '127.0.0.1'}",
            f"--secure-port={self.port}",
            f"--tls-cert-file={self._serving.certificate}",
            f"--tls-private-key-file={self._serving.key}",
            f"--client-ca-file={self.ca}",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder / 'pki' / 'service-accounts.key'}",
            f"--service-account-signing-key-file={folder / 'pki' / 'service-accounts.key'}",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            f"--kubelet-client-certificate={self._kubelet_client.certificate}",
            f"--kubelet-client-key={self._kubelet_client.key}",
            "--kubelet-preferred-address-types=InternalIP",
            "--allow-privileged=true",
            "--profiling=false",
            # Without a grace period for watches a clean end waits for clients that never leave, and becomes a kill.
            "--shutdown-watch-termination-grace-period=1s",
        ]
        if advertise is None:
            # A Service may not point at a loopback address, and without a node no pod needs `kubernetes.default`.
            argv.append("--endpoint-reconciler-type=none")
        if self.options.audit:
            argv += [f"--audit-policy-file={folder / 'audit-policy.json'}", f"--audit-log-path={folder / 'audit.log'}"]
        self.processes.start("kube-apiserver", [*argv, *self.options.apiserver_args])

    def _start_controller_manager(self) -> None:
        argv: list[str | Path] = [
            locate("kube-controller-manager"),
            f"--kubeconfig={self.folder / 'kube-controller-manager.kubeconfig'}",
            "--leader-elect=false",
            f"--controllers={','.join(self.options.controllers)}",
            f"--service-account-private-key-file={self.folder / 'pki' / 'service-accounts.key'}",
            f"--root-ca-file={self.ca}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._manager_port}",
            f"--cert-dir={self.folder / 'pki' / 'controller-manager'}",
            "--kube-api-qps=500",  # the default of 20 makes every test of many objects a test of this client's throttle
            "--kube-api-burst=1000",
            "--profiling=false",
        ]
        self.processes.start("kube-controller-manager", [*argv, *self.options.controller_manager_args])

    def _start_scheduler(self) -> None:
        argv: list[str | Path] = [
            locate("kube-scheduler"),
            f"--kubeconfig={self.folder / 'kube-scheduler.kubeconfig'}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._scheduler_port}",
            f"--cert-dir={self.folder / 'pki' / 'scheduler'}",
            "--profiling=false",
        ]
        self.processes.start("kube-scheduler", argv)

    def _wait_apiserver(self) -> None:
        def ready() -> bool:
            self.processes.require("etcd")
            self.processes.require("kube-apiserver")
            return self.api.text("GET", "/readyz").strip() == "ok"

        wait_for("API server ready", ready, seconds=self.options.ready_seconds)

    def _wait_ready(self) -> None:
        self._wait_apiserver()
        if self.options.controller_manager:

            def works() -> bool:
                self.processes.require("kube-controller-manager")
                return self.api.exists("/api/v1/namespaces/default/serviceaccounts/default")

            wait_for("controller manager's first work", works, seconds=self.options.ready_seconds)
        if self.options.scheduler:
            self.processes.require("kube-scheduler")

    def _etcd(self, path: str, body: Json) -> Json:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._etcd_port}/v3/{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            answer: Json = json.load(response)
        return answer

    def client_env(self, kubeconfig: Path | None = None) -> dict[str, str]:
        """Environment in which kubectl, Helm and the operator find this cluster and nothing of the user's."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        programs = str(locate("kubectl").parent)
        return os.environ | {
            "KUBECONFIG": str(kubeconfig or self.kubeconfig),
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / "cache"),
            "XDG_CONFIG_HOME": str(home / "config"),
            "XDG_DATA_HOME": str(home / "data"),
            "PATH": f"{programs}:{os.environ['PATH']}",
        }

    def _client(
        self, program: str, args: Sequence[str], stdin: str | None, kubeconfig: Path | None, seconds: float
    ) -> str:
        done = subprocess.run(
            [str(locate(program)), *args],
            input=stdin if stdin is not None else "",
            env=self.client_env(kubeconfig),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if done.returncode != 0:
            raise ProcessFailed(
                f"{program} {' '.join(args)}: exit status {done.returncode}\n{done.stderr}{done.stdout}"
            )
        return done.stdout
