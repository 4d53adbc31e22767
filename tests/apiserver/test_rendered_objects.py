"""Rendered objects on a real API server: it knows every field, and the pods pass the restricted standard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from prebook_operator.api import Allow, load
from prebook_operator.render import Manifest, Owner, cluster_context, render
from tests.kube.controlplane import ControlPlane
from tests.kube.rest import ApiError
from tests.model_cases import GOOD, Good
from tests.model_documents import changed, minimal, p5en

PLURALS = {
    "StatefulSet": "statefulsets",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
    "Secret": "secrets",
    "NetworkPolicy": "networkpolicies",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "ResourceClaimTemplate": "resourceclaimtemplates",
}
STRICT = "?dryRun=All&fieldValidation=Strict"


def path_of(manifest: Manifest) -> str:
    version = manifest["apiVersion"]
    root = "/api" if version == "v1" else "/apis"
    return f"{root}/{version}/namespaces/{manifest['metadata']['namespace']}/{PLURALS[manifest['kind']]}"


def objects(document: dict[str, Any], namespace: str, **load_options: Any) -> list[Manifest]:
    owner = Owner(uid="1f3c0b7e-0000-4000-8000-000000000000", name=document["metadata"]["name"])
    ctx = cluster_context(
        namespace, operator_image="prebook/operator:1", owner=owner, peer_token="t", operator_namespace="prebook-system"
    )
    # ModelRole is tested with its CRD.
    return [item for item in render(load(document, **load_options), ctx) if item["kind"] != "ModelRole"]


@pytest.fixture(scope="module")
def restricted(control_plane: ControlPlane) -> Iterator[str]:
    """A namespace that enforces the restricted Pod Security Standard."""
    name = "pss-restricted"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    control_plane.api.create("/api/v1/namespaces", body)
    yield name
    control_plane.api.delete(f"/api/v1/namespaces/{name}")


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.id)
def test_every_object_is_accepted_as_it_is(control_plane: ControlPlane, namespace: str, case: Good) -> None:
    document = changed(case.document, {"spec/prefill/replicas": 2})
    if "scaling" in document["spec"]:
        document = changed(document, {"spec/decode/replicas": 2})
    kinds = set()
    for manifest in objects(document, namespace):
        control_plane.api.create(path_of(manifest) + STRICT, manifest)
        kinds.add(manifest["kind"])
    assert {"StatefulSet", "Service", "ServiceAccount", "Secret", "NetworkPolicy", "PodDisruptionBudget"} <= kinds


def test_a_template_with_everything_the_operator_can_allow_is_accepted(
    control_plane: ControlPlane, namespace: str
) -> None:
    engine = {
        "name": "engine",
        "resources": {
            "requests": {"cpu": 1, "memory": "1Gi", "hugepages-2Mi": "1Gi"},
            "limits": {"hugepages-2Mi": "1Gi"},
        },
        "volumeMounts": [{"name": "a", "mountPath": "/a", "subPath": "x", "readOnly": True}],
        "securityContext": {"privileged": True},
    }
    pod = {
        "nodeSelector": {"a": "b"},
        "tolerations": [{"key": "a", "value": "b", "effect": "NoExecute", "tolerationSeconds": 0}],
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "schedulerName": "other",
        "imagePullSecrets": [{"name": "registry"}],
        "securityContext": {"runAsUser": 1000, "runAsGroup": 0, "fsGroup": 0, "supplementalGroups": [44]},
        "serviceAccountName": "admin",
        "hostNetwork": True,
        "hostPID": True,
        "hostIPC": True,
        "volumes": [
            {"name": "a", "hostPath": {"path": "/x"}},
            {"name": "b", "configMap": {"name": "c", "optional": True}},
            {"name": "c", "secret": {"secretName": "s"}},
            {"name": "d", "persistentVolumeClaim": {"claimName": "p", "readOnly": True}},
            {"name": "e", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        ],
        "containers": [engine],
    }
    document = changed(p5en(), {"spec/decode/template/spec": pod})
    allow = Allow(host_path=True, host_namespaces=True, privileged=True, service_accounts=frozenset({"admin"}))
    for manifest in objects(document, namespace, allow=allow):
        control_plane.api.create(path_of(manifest) + STRICT, manifest)


def pod_of(document: dict[str, Any], namespace: str) -> Manifest:
    sets = [item for item in objects(document, namespace) if item["kind"] == "StatefulSet"]
    template = sets[0]["spec"]["template"]
    # The service account does not exist in a dry run, and is not what is tested.
    spec = {key: value for key, value in template["spec"].items() if key != "serviceAccountName"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": namespace, **template["metadata"]},
        "spec": spec,
    }


def test_pods_without_efa_pass_the_restricted_standard(control_plane: ControlPlane, restricted: str) -> None:
    gpus = changed(minimal(), {"spec/prefill/gpus": 1, "spec/decode/gpus": 1})
    for document in (minimal(), gpus):
        control_plane.api.create(f"/api/v1/namespaces/{restricted}/pods{STRICT}", pod_of(document, restricted))


def test_efa_needs_ipc_lock_beyond_the_restricted_standard_and_nothing_else(
    control_plane: ControlPlane, restricted: str
) -> None:
    with pytest.raises(ApiError, match="IPC_LOCK") as caught:
        control_plane.api.create(f"/api/v1/namespaces/{restricted}/pods{STRICT}", pod_of(p5en(), restricted))
    assert caught.value.status == 403
    reasons = caught.value.body.split("violates PodSecurity", 1)[1]
    assert "unrestricted capabilities" in reasons
    assert not [
        word
        for word in ("privileged", "runAsNonRoot", "seccompProfile", "hostPath", "allowPrivilege")
        if word in reasons
    ]
