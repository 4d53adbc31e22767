"""The kind PodMonitor, as far as the operator needs one: installed and taken away again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.kube.controlplane import wait_for
from tests.kube.rest import Json, Rest

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
NAME = "podmonitors.monitoring.coreos.com"
CRD: Json = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": NAME},
    "spec": {
        "group": "monitoring.coreos.com",
        "names": {
            "kind": "PodMonitor",
            "listKind": "PodMonitorList",
            "plural": "podmonitors",
            "singular": "podmonitor",
        },
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {"spec": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
                    }
                },
            }
        ],
    },
}


@contextmanager
def pod_monitors(api: Rest) -> Iterator[None]:
    """The kind is served within the context, and gone after it."""
    api.create(CRDS, CRD)
    try:
        wait_for("PodMonitors to be served", lambda: served(api), seconds=30)
        yield
    finally:
        api.delete(f"{CRDS}/{NAME}")
        wait_for("PodMonitors to be gone", lambda: not api.exists(f"{CRDS}/{NAME}"), seconds=60)


def served(api: Rest) -> bool:
    """Does discovery name them?"""
    path = "/apis/monitoring.coreos.com/v1"
    return api.exists(path) and any(one["name"] == "podmonitors" for one in api.get(path)["resources"])
