"""The operator under the rights that the chart gives it: they suffice for a model's whole life; it asks for no more.

On the way, what GitOps tools see of a model: Argo CD's health check and kstatus on statuses that the operator wrote,
and several writers without a fight.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prebook_operator import rbac
from tests.chart.argocd import health
from tests.chart.conftest import CRDS
from tests.chart.helm import CHART, ROOT
from tests.chart.operating import answers, ask, bring_up, conditions, operator, paired_pods, user
from tests.kube.audit import Request
from tests.kube.controlplane import ControlPlane, wait_for
from tests.kube.fakenodes import FakeKubelet, add_node, remove_nodes
from tests.kube.processes import ProcessFailed

pytestmark = pytest.mark.tier("apiserver")

MODEL = (ROOT / "examples" / "smollm2-cpu.yaml").read_text()
NAME = "smollm2"
PREFILL_POD = """\
  prefill:
    replicas: 1
    template:
      spec:
"""
WITH_HOST_PATH = MODEL.replace(PREFILL_POD, PREFILL_POD + "        volumes: [{name: disk, hostPath: {path: /mnt}}]\n")
assert WITH_HOST_PATH != MODEL
"""Refused by the operator, and not by the API server."""


@pytest.fixture
def nodes(cluster: ControlPlane) -> Iterator[None]:
    """Two nodes of the shape of P5en."""
    add_node(cluster.api, "p5en-1")
    add_node(cluster.api, "p5en-2")
    yield
    remove_nodes(cluster.api)


def install(cluster: ControlPlane, home: str, *settings: str) -> None:
    cluster.helm("install", "prebook", str(CHART), "--namespace", home, "--set", "replicas=1", *settings)
    cluster.kubectl("wait", "--for=condition=Established", "crd", *CRDS, "--timeout=30s")


def path(namespace: str) -> str:
    return f"/apis/prebook.dev/v1alpha1/namespaces/{namespace}/disaggregatedmodels/{NAME}"


def apply(cluster: ControlPlane, namespace: str, text: str = MODEL, *, manager: str = "kubectl") -> None:
    cluster.kubectl("apply", "--server-side", f"--field-manager={manager}", "-n", namespace, "-f", "-", stdin=text)


def model(cluster: ControlPlane, namespace: str) -> dict[str, Any]:
    return cluster.api.get(path(namespace))


def wait_for_condition(cluster: ControlPlane, namespace: str, kind: str, status: str = "True") -> dict[str, Any]:
    wait_for(f"{kind}={status}", lambda: conditions(model(cluster, namespace)).get(kind) == status, seconds=60)
    return model(cluster, namespace)


def whole_life(cluster: ControlPlane, namespace: str) -> None:
    """Creates, serves, scales, changes and deletes a model."""
    apply(cluster, namespace)
    with paired_pods():
        bring_up(cluster, namespace, pods=2)
        wait_for_condition(cluster, namespace, "Ready")
        apply(cluster, namespace, MODEL.replace("  decode:\n    replicas: 1", "  decode:\n    replicas: 2"))
        bring_up(cluster, namespace, pods=3)
        wait_for_condition(cluster, namespace, "Ready")
        apply(cluster, namespace, MODEL.replace("--max-model-len=2048", "--max-model-len=1024"))
        bring_up(cluster, namespace, pods=5)  # two of the new revision beside three of the old
        wait_for("the old revision to go", lambda: swept(cluster, namespace) == 2, seconds=60)
        wait_for_condition(cluster, namespace, "Ready")
    cluster.api.delete(path(namespace))
    wait_for("the model's objects to go", lambda: leftovers(cluster, namespace) == [], seconds=60)


def swept(cluster: ControlPlane, namespace: str) -> int:
    """Confirms the end of pods; returns how many engine pods are left."""
    kubelet = FakeKubelet(cluster.api, namespace)
    kubelet.finish_deletions()
    return len(kubelet.pods("app.kubernetes.io/managed-by=prebook"))


def leftovers(cluster: ControlPlane, namespace: str) -> list[str]:
    swept(cluster, namespace)
    kinds = "statefulset,pod,service,serviceaccount,secret,networkpolicy,pdb,modelrole"
    return cluster.kubectl("get", kinds, "-n", namespace, "-l", "prebook.dev/model", "-o", "name").split()


def asked(cluster: ControlPlane, home: str, since: int) -> tuple[set[tuple[str, str, str]], set[tuple[str, str]]]:
    """What the operator asked for as (verb, group, resource), and what it was refused as (verb, resource)."""
    requests = [request for request in cluster.audit.requests(since=since, user=user(home)) if request.resource]
    done = {(request.verb, request.group, request.resource) for request in requests if request.status < 400}
    return done, {(request.verb, request.resource) for request in requests if request.status == 403}


def writes(cluster: ControlPlane, home: str, since: int) -> list[Request]:
    """The operator's writes, but for those that renew its lease."""
    return [write for write in cluster.audit.writes(since=since, user=user(home)) if write.resource != "leases"]


def settle(cluster: ControlPlane, home: str) -> None:
    """Waits until the operator has written nothing for two seconds: the statuses of roles follow the model's."""

    def quiet() -> bool:
        since = cluster.audit.position()
        time.sleep(2)
        return writes(cluster, home, since) == []

    wait_for("the operator to settle", quiet, seconds=30)


def table() -> set[tuple[str, str, str]]:
    return {(verb, rule.group, name) for rule in rbac.OPERATOR for name in rule.resources for verb in rule.verbs}


@pytest.mark.usefixtures("nodes")
def test_roles_of_one_namespace_suffice_for_a_models_whole_life(cluster: ControlPlane, home: str) -> None:
    install(cluster, home)
    since = cluster.audit.position()
    with operator(cluster, home, [f"--namespace={home}"]):
        whole_life(cluster, home)
    done, refused = asked(cluster, home, since)
    assert refused == {("list", "nodes")}  # asked once: may FabricReady be told?
    assert done <= table()
    assert {("create", "", "secrets"), ("patch", "apps", "statefulsets"), ("delete", "apps", "statefulsets")} <= done


@pytest.mark.usefixtures("nodes")
def test_cluster_role_suffices_in_any_namespace_and_nothing_is_refused(cluster: ControlPlane, home: str) -> None:
    install(cluster, home, "--set", "scope=Cluster")
    cluster.kubectl("create", "namespace", f"{home}-m")
    since = cluster.audit.position()
    with operator(cluster, home, ["--all-namespaces"]):
        whole_life(cluster, f"{home}-m")
    done, refused = asked(cluster, home, since)
    assert refused == set()
    assert done <= table()
    cluster.kubectl("delete", "namespace", f"{home}-m", "--wait=false")


@pytest.mark.usefixtures("nodes")
def test_argo_cd_and_kstatus_follow_a_model(cluster: ControlPlane, home: str) -> None:
    install(cluster, home)
    apply(cluster, home)
    assert health(model(cluster, home)).status == "Progressing"  # nobody has looked at it yet
    with operator(cluster, home, [f"--namespace={home}"]), paired_pods():
        starting = wait_for_condition(cluster, home, "Reconciling")
        assert health(starting).status == "Progressing"
        assert conditions(starting)["Ready"] != "True"
        with pytest.raises(ProcessFailed, match="timed out"):
            cluster.kubectl("wait", "--for=condition=Ready", f"dm/{NAME}", "-n", home, "--timeout=1s")

        bring_up(cluster, home, pods=2)
        cluster.kubectl("wait", "--for=condition=Ready", f"dm/{NAME}", "-n", home, "--timeout=60s")
        serving = model(cluster, home)
        assert (health(serving).status, conditions(serving)["Stalled"]) == ("Healthy", "False")
        assert serving["status"]["observedGeneration"] == serving["metadata"]["generation"]

        # Valid to the API server, refused by the operator: the mistake names its field, and what runs goes on running.
        apply(cluster, home, WITH_HOST_PATH)
        stalled = wait_for_condition(cluster, home, "Stalled")
        shown = health(stalled)
        assert (shown.status, conditions(stalled)["Ready"]) == ("Degraded", "False")
        assert "spec.prefill.template" in shown.message

        apply(cluster, home)
        cluster.kubectl("wait", "--for=condition=Ready", f"dm/{NAME}", "-n", home, "--timeout=60s")
        assert health(model(cluster, home)).status == "Healthy"

        apply(cluster, home, MODEL.replace("replicas: 1", "replicas: 0"))
        wait_for("suspended", lambda: health(model(cluster, home)).status == "Suspended", seconds=60)


@pytest.mark.usefixtures("nodes")
def test_helm_waits_for_a_model_by_kstatus_as_flux_does(cluster: ControlPlane, home: str, tmp_path: Path) -> None:
    """Helm 4 judges custom resources by the very library (kstatus) that Flux uses."""
    install(cluster, home)
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "model.yaml").write_text(MODEL)
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nname: model\nversion: 0.0.1\n")
    upgrade = ["upgrade", "--install", "model", str(tmp_path), "--namespace", home, "--wait"]
    with operator(cluster, home, [f"--namespace={home}"]), paired_pods():
        with pytest.raises(ProcessFailed, match=r"InProgress|not ready"):
            cluster.helm(*upgrade, "--timeout", "5s")
        bring_up(cluster, home, pods=2)
        cluster.helm(*upgrade, "--timeout", "60s")
        assert conditions(model(cluster, home))["Ready"] == "True"

        (tmp_path / "templates" / "model.yaml").write_text(WITH_HOST_PATH)
        with pytest.raises(ProcessFailed, match=r"Failed|not ready"):
            cluster.helm(*upgrade, "--timeout", "6s")
        assert conditions(model(cluster, home))["Stalled"] == "True"


@pytest.mark.usefixtures("nodes")
def test_several_appliers_and_the_operator_do_not_fight(cluster: ControlPlane, home: str) -> None:
    install(cluster, home)
    with operator(cluster, home, [f"--namespace={home}"]), paired_pods():
        apply(cluster, home)
        bring_up(cluster, home, pods=2)
        before = wait_for_condition(cluster, home, "Ready")
        settle(cluster, home)
        since = cluster.audit.position()
        # Flux, Argo CD and Helm apply the very same document, again and again, without --force-conflicts.
        for manager in ("kustomize-controller", "argocd-controller", "helm") * 2:
            apply(cluster, home, manager=manager)
        time.sleep(3)
        after = model(cluster, home)
        assert after["metadata"]["generation"] == before["metadata"]["generation"]
        assert after["spec"] == before["spec"]
        assert after["status"] == before["status"]
        assert "annotations" not in after["metadata"]
        assert "finalizers" not in after["metadata"]
        assert writes(cluster, home, since) == []

        # A field that one of them changes alone is a conflict for that writer, not a silent fight.
        with pytest.raises(ProcessFailed, match="conflict"):
            apply(cluster, home, MODEL.replace("sharedMemory: 256Mi", "sharedMemory: 512Mi"), manager="helm")
        assert model(cluster, home)["metadata"]["generation"] == before["metadata"]["generation"]


@pytest.mark.usefixtures("nodes")
def test_a_foreign_label_stays_and_a_changed_field_of_ours_is_set_back(cluster: ControlPlane, home: str) -> None:
    install(cluster, home)
    with operator(cluster, home, [f"--namespace={home}"]), paired_pods():
        apply(cluster, home)
        bring_up(cluster, home, pods=2)
        wait_for_condition(cluster, home, "Ready")
        service = f"/api/v1/namespaces/{home}/services/{NAME}"
        cluster.api.merge(
            service, {"metadata": {"labels": {"team": "x"}}, "spec": {"selector": {"prebook.dev/role": "prefill"}}}
        )
        wait_for(
            "our selector",
            lambda: cluster.api.get(service)["spec"]["selector"]["prebook.dev/role"] == "decode",
            seconds=30,
        )
        assert cluster.api.get(service)["metadata"]["labels"]["team"] == "x"


def test_an_operator_whose_schema_is_not_served_says_what_to_do(cluster: ControlPlane, home: str) -> None:
    install(cluster, home)
    stored = json.loads(cluster.kubectl("get", "crd", CRDS[0], "-o", "json"))
    properties = stored["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    assert properties.pop("monitoring")
    cluster.kubectl("replace", "-f", "-", stdin=json.dumps(stored))
    wait_for(
        "the older schema",
        lambda: '"monitoring"' not in cluster.api.text("GET", "/openapi/v3/apis/prebook.dev/v1alpha1"),
        seconds=30,
    )
    with operator(cluster, home, [f"--namespace={home}"], until_ready=False) as url:
        wait_for("a verdict on the schema", lambda: "older schema" in ask(f"{url}/readyz")[1], seconds=60)
        status, said = ask(f"{url}/readyz")
        assert status == 503
        assert "spec.monitoring" in said
        assert "kubectl apply --server-side" in said
        assert answers(f"{url}/healthz")  # a restart would not help
        # The remedy helps without a restart either.
        cluster.helm("upgrade", "prebook", str(CHART), "--namespace", home, "--force-conflicts")
        wait_for("operator ready", lambda: answers(f"{url}/readyz"), seconds=60)
