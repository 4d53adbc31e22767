"""The controller of kubernetes-sigs/lws (DisaggregatedSet with two roles) as users install it, webhooks included, for
measuring it beside ours. It is built from its Go module: `python3 hack/kube/binaries.py lws`."""

from __future__ import annotations

import base64
import importlib
import subprocess
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from prebook_bench.creation import Contender, Report
from prebook_bench.operator_process import ControllerProcess, free_port, until

_SETS: Final = "/apis/disaggregatedset.x-k8s.io/v1"
_LEADERS: Final = "/apis/leaderworkerset.x-k8s.io/v1"
_CRDS: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_ADMISSION: Final = "/apis/admissionregistration.k8s.io/v1"
_NAMESPACE: Final = "lws-system"


def _role(role: str) -> Report:
    container = {
        "name": "vllm",
        "image": "vllm/vllm-openai:v0.32.0",
        "args": ["--model", "Qwen/Qwen3-32B"],
        "resources": {"limits": {"nvidia.com/gpu": "8"}},
    }
    template = {"size": 1, "workerTemplate": {"spec": {"containers": [container]}}}
    strategy = {"type": "RollingUpdate", "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0}}
    return {"name": role, "spec": {"replicas": 1, "rolloutStrategy": strategy, "leaderWorkerTemplate": template}}


def _document(name: str) -> Report:
    return {
        "apiVersion": "disaggregatedset.x-k8s.io/v1",
        "kind": "DisaggregatedSet",
        "metadata": {"name": name},
        "spec": {"roles": [_role("prefill"), _role("decode")]},
    }


LWS: Final = Contender(
    agent="lws/",
    plural="disaggregatedsets",
    group_path=_SETS,
    document=_document,
    kinds={"statefulsets": "/apis/apps/v1", "services": "/api/v1", "leaderworkersets": _LEADERS},
    children=6,  # of each two: one for a role
)


def why_not() -> str | None:
    """Why it cannot be measured here, or None when it can."""
    binaries = importlib.import_module("hack.kube.binaries")
    try:
        binaries.locate("lws")
        binaries.module_source("lws", "sigs.k8s.io/lws")
    except (binaries.BinaryMissing, OSError, subprocess.CalledProcessError) as error:
        return f"{error}" + (f": {error.stderr.strip()}" if isinstance(error, subprocess.CalledProcessError) else "")
    return None


class LwsProcess(ControllerProcess):
    """The controller, its kinds and its webhooks on a control plane; see :func:`why_not`."""

    def __init__(self, plane: Any) -> None:
        binaries = importlib.import_module("hack.kube.binaries")
        program = binaries.locate("lws")
        source = binaries.module_source("lws", "sigs.k8s.io/lws")
        for path in sorted((source / "config/crd/bases").glob("*.yaml")):
            plane.api.create(_CRDS, yaml.safe_load(path.read_text(encoding="utf-8")))
        for group in (_SETS, _LEADERS):
            until("the kinds to be served", partial(plane.api.exists, f"/openapi/v3{group}"), timeout=60)
        plane.api.create("/api/v1/namespaces", {"metadata": {"name": _NAMESPACE}})
        health, hooks = free_port(), free_port()
        folder: Path = plane.folder
        pair = plane.pki.issue("tls", hosts=["127.0.0.1"])
        config = folder / "lws.yaml"
        config.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "config.lws.x-k8s.io/v1alpha1",
                    "kind": "Configuration",
                    "leaderElection": {"leaderElect": True, "resourceNamespace": _NAMESPACE},
                    "internalCertManagement": {"enable": False},
                    "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
                    "metrics": {"bindAddress": "0"},
                    "webhook": {"host": "127.0.0.1", "port": hooks, "certDir": str(pair.certificate.parent)},
                }
            ),
            encoding="utf-8",
        )
        super().__init__(
            [str(program), "--config", str(config), "--kubeconfig", str(plane.kubeconfig), "--zap-log-level", "error"],
            health=health,
            log=folder / "lws.log",
        )
        try:
            until("the controller to be ready", self.ready, timeout=60)
            _install_webhooks(plane, source, port=hooks)
        except BaseException:
            self.stop()
            raise


def _install_webhooks(plane: Any, source: Path, *, port: int) -> None:
    """Its webhooks as its kustomization has them, but at a port of this host instead of a Service."""
    folder = source / "config/webhook"
    authority = base64.b64encode(plane.pki.certificate.read_bytes()).decode()
    for document in yaml.safe_load_all((folder / "manifests.yaml").read_text(encoding="utf-8")):
        mutating = document["kind"] == "MutatingWebhookConfiguration"
        patch = folder / ("mutating-patch.yaml" if mutating else "validating-patch.yaml")
        for change in yaml.safe_load(patch.read_text(encoding="utf-8")):
            document["webhooks"][int(change["path"].rsplit("/", 1)[1])] = change["value"]
        for hook in document["webhooks"]:
            path = hook["clientConfig"]["service"]["path"]
            hook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": authority}
        plural = "mutatingwebhookconfigurations" if mutating else "validatingwebhookconfigurations"
        plane.api.create(f"{_ADMISSION}/{plural}", document)
