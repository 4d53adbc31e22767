"""The chart and the plain install on a real API server.

Pods are admitted, rights hold and end where they should, and models outlive the release.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from prebook_operator import rbac
from tests.chart.conftest import CRDS
from tests.chart.helm import CHART, ROOT
from tests.kube.controlplane import ControlPlane, wait_for
from tests.kube.processes import ProcessFailed

pytestmark = pytest.mark.tier("apiserver")

MODELS = "/apis/prebook.dev/v1alpha1/namespaces/{}/disaggregatedmodels"
OPERATOR = "prebook-operator"


def install(
    cluster: ControlPlane,
    home: str,
    *settings: str,
    release: str = "prebook",
    chart: Path = CHART,
    verb: str = "install",
) -> None:
    """`helm install` (or another verb) without waiting for pods: there are no nodes to run them."""
    cluster.helm(
        verb,
        release,
        str(chart),
        "--namespace",
        home,
        *[part for setting in settings for part in ("--set-json", setting)],
    )


def small_model(name: str) -> dict[str, Any]:
    """The smallest model that the schema accepts."""
    return {
        "apiVersion": "prebook.dev/v1alpha1",
        "kind": "DisaggregatedModel",
        "metadata": {"name": name},
        "spec": {"model": {"uri": "file:///models/x"}, "engine": {"image": "example/vllm:1"}},
    }


def create_model(cluster: ControlPlane, namespace: str, name: str) -> str:
    """Creates a model once its CRD is served; returns its UID."""
    cluster.kubectl("wait", "--for=condition=Established", "crd", *CRDS, "--timeout=30s")
    created = cluster.api.create(MODELS.format(namespace), small_model(name))
    return str(created["metadata"]["uid"])


def uid(cluster: ControlPlane, path: str) -> str:
    return str(cluster.api.get(path)["metadata"]["uid"])


def can(
    cluster: ControlPlane,
    user: str,
    verb: str,
    resource: str,
    namespace: str | None,
    *,
    group: str = "prebook.dev",
    name: str = "",
) -> bool:
    """The authorizer's own answer."""
    resource, _, subresource = resource.partition("/")
    attributes = {
        "verb": verb,
        "group": group,
        "resource": resource,
        "subresource": subresource,
        "namespace": namespace or "",
        "name": name,
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "resourceAttributes": attributes},
    }
    return bool(cluster.api.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)["status"]["allowed"])


def granted(cluster: ControlPlane, user: str, namespace: str, reach: rbac.Reach) -> list[bool]:
    """The authorizer's answer to each verb of each rule of one reach."""
    where = None if reach is rbac.Reach.CLUSTER else namespace
    return [
        can(cluster, user, verb, resource, where, group=rule.group, name=name)
        for rule in rbac.OPERATOR
        if rule.reach is reach
        for resource in rule.resources
        for verb in rule.verbs
        for name in rule.names or ("",)
    ]


def operator_pods(cluster: ControlPlane, namespace: str) -> list[dict[str, Any]]:
    return cluster.api.items(
        f"/api/v1/namespaces/{namespace}/pods", labelSelector="app.kubernetes.io/component=operator"
    )


def test_pods_are_admitted_to_a_namespace_that_enforces_the_restricted_standard(
    cluster: ControlPlane, home: str
) -> None:
    cluster.api.merge(
        f"/api/v1/namespaces/{home}", {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    )
    install(cluster, home)
    wait_for("two pods of the operator", lambda: len(operator_pods(cluster, home)) == 2, seconds=60)
    # `helm test` makes its pod in the same namespace; nothing runs it here, so its admission is all that is asked.
    hooks = [
        yaml.safe_load(part)
        for part in cluster.helm("get", "hooks", "prebook", "--namespace", home).split("---\n")
        if part.strip()
    ]
    (pod,) = hooks
    assert cluster.api.create(f"/api/v1/namespaces/{home}/pods", pod)["status"]["phase"] == "Pending"


def test_namespaced_rights_hold_in_the_watched_namespaces_and_nowhere_else(cluster: ControlPlane, home: str) -> None:
    cluster.kubectl("create", "namespace", f"{home}-b")
    install(cluster, home, f'watchNamespaces=["{home}-b"]')
    user = f"system:serviceaccount:{home}:{OPERATOR}"
    assert all(granted(cluster, user, f"{home}-b", rbac.Reach.WATCHED))
    assert all(granted(cluster, user, home, rbac.Reach.HOME))
    assert not any(granted(cluster, user, home, rbac.Reach.WATCHED))
    assert not any(granted(cluster, user, "default", rbac.Reach.WATCHED))
    assert not any(granted(cluster, user, "", rbac.Reach.CLUSTER))
    cluster.kubectl("delete", "namespace", f"{home}-b", "--wait=false")


def test_cluster_rights_hold_everywhere_and_end_at_the_table(cluster: ControlPlane, home: str) -> None:
    install(cluster, home, 'scope="Cluster"')
    user = f"system:serviceaccount:{home}:{OPERATOR}"
    assert all(granted(cluster, user, "default", rbac.Reach.WATCHED))
    assert all(granted(cluster, user, "", rbac.Reach.CLUSTER))
    assert not any(granted(cluster, user, "default", rbac.Reach.HOME))
    for verb, group, resource in (
        ("list", "", "secrets"),
        ("watch", "", "secrets"),
        ("create", "", "pods"),
        ("create", "", "pods/exec"),
        ("update", "prebook.dev", "disaggregatedmodels"),
        ("patch", "prebook.dev", "disaggregatedmodels"),
        ("escalate", "rbac.authorization.k8s.io", "roles"),
        ("list", "", "configmaps"),
    ):
        assert not can(cluster, user, verb, resource, "default", group=group), (verb, resource)


def test_people_with_the_builtin_roles_may_do_what_these_names_promise(cluster: ControlPlane, home: str) -> None:
    install(cluster, home, 'scope="Cluster"')
    for role in rbac.UserRole:
        cluster.kubectl("-n", home, "create", "rolebinding", role, f"--clusterrole={role}", f"--user={role}er")
    wait_for("aggregation", lambda: can(cluster, "adminer", "delete", "modelroles", home), seconds=30)
    answers = {
        (person, verb, resource): can(cluster, person, verb, resource, home)
        for person in ("viewer", "editer", "adminer")
        for verb, resource in (
            ("list", "disaggregatedmodels"),
            ("create", "disaggregatedmodels"),
            ("patch", "modelroles/scale"),
            ("delete", "modelroles"),
            ("patch", "disaggregatedmodels/status"),
        )
    }
    allowed = {
        "viewer": {("list", "disaggregatedmodels")},
        "editer": {("list", "disaggregatedmodels"), ("create", "disaggregatedmodels"), ("patch", "modelroles/scale")},
    }
    allowed["adminer"] = allowed["editer"] | {("delete", "modelroles")}
    assert answers == {
        (person, verb, resource): (verb, resource) in allowed[person] for person, verb, resource in answers
    }
    assert not can(cluster, "viewer", "list", "disaggregatedmodels", "default")


def test_upgrade_replaces_the_schema_and_touches_no_model(cluster: ControlPlane, home: str, tmp_path: Path) -> None:
    older = tmp_path / "prebook"
    shutil.copytree(CHART, older)
    crd_file = older / "templates" / "crds" / "disaggregatedmodels.prebook.dev.yaml"
    crd_file.write_text(crd_file.read_text().replace("shortNames:", "shortNames:\n    - olddm", 1))
    install(cluster, home, "replicas=1", chart=older)
    crd = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRDS[0]}"
    assert "olddm" in cluster.api.get(crd)["spec"]["names"]["shortNames"]
    model = create_model(cluster, home, "kept")
    deployment = uid(cluster, f"/apis/apps/v1/namespaces/{home}/deployments/{OPERATOR}")
    crd_uid = uid(cluster, crd)

    install(cluster, home, "replicas=2", verb="upgrade")
    assert "olddm" not in cluster.api.get(crd)["spec"]["names"]["shortNames"]
    assert uid(cluster, crd) == crd_uid
    assert uid(cluster, f"{MODELS.format(home)}/kept") == model
    after = cluster.api.get(f"/apis/apps/v1/namespaces/{home}/deployments/{OPERATOR}")
    assert (after["metadata"]["uid"], after["spec"]["replicas"]) == (deployment, 2)


def test_upgrade_without_a_change_writes_nothing_to_the_crds(cluster: ControlPlane, home: str) -> None:
    install(cluster, home)
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRDS[0]}"
    cluster.kubectl("wait", "--for=condition=Established", "crd", *CRDS, "--timeout=30s")
    before = cluster.api.get(path)["metadata"]
    install(cluster, home, verb="upgrade")
    after = cluster.api.get(path)["metadata"]
    assert (after["generation"], after["resourceVersion"]) == (before["generation"], before["resourceVersion"])


@pytest.mark.parametrize("force", ["--force-replace", "--force-conflicts"])
def test_a_forced_upgrade_keeps_models(cluster: ControlPlane, home: str, force: str) -> None:
    install(cluster, home)
    model = create_model(cluster, home, "kept")
    mode = ["--server-side=false"] if force == "--force-replace" else []
    cluster.helm("upgrade", "prebook", str(CHART), "--namespace", home, force, *mode)
    assert uid(cluster, f"{MODELS.format(home)}/kept") == model


def test_uninstall_leaves_the_models_and_a_new_release_takes_them_over(cluster: ControlPlane, home: str) -> None:
    install(cluster, home, 'scope="Cluster"')
    model = create_model(cluster, home, "kept")
    cluster.helm("uninstall", "prebook", "--namespace", home)
    left = cluster.kubectl(
        "get",
        "all,role,rolebinding,networkpolicy,pdb,serviceaccount",
        "-n",
        home,
        "-l",
        "app.kubernetes.io/instance=prebook",
        "-o",
        "name",
    )
    gone = [
        line for line in left.split() if not line.startswith(("pod/", "replicaset.apps/"))
    ]  # garbage collection takes these a moment later
    assert gone == []
    assert (
        cluster.kubectl(
            "get", "clusterrole,clusterrolebinding", "-l", "app.kubernetes.io/part-of=prebook", "-o", "name"
        )
        == ""
    )
    assert uid(cluster, f"{MODELS.format(home)}/kept") == model

    install(cluster, home)
    assert uid(cluster, f"{MODELS.format(home)}/kept") == model
    cluster.helm("uninstall", "prebook", "--namespace", home)

    with pytest.raises(ProcessFailed, match="ownership"):
        install(cluster, home, release="prebook-next")
    cluster.helm("install", "prebook-next", str(CHART), "--namespace", home, "--take-ownership")
    assert uid(cluster, f"{MODELS.format(home)}/kept") == model


def test_a_second_release_shares_the_crds_of_the_first(cluster: ControlPlane, home: str) -> None:
    install(cluster, home)
    cluster.kubectl("create", "namespace", f"{home}-b")
    install(cluster, f"{home}-b", "crds.install=false")
    wait_for(
        "pods of both", lambda: [len(operator_pods(cluster, n)) for n in (home, f"{home}-b")] == [2, 2], seconds=60
    )
    cluster.helm("uninstall", "prebook", "--namespace", f"{home}-b")
    assert cluster.api.exists(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRDS[0]}")
    cluster.kubectl("delete", "namespace", f"{home}-b", "--wait=false")


def test_notes_name_commands_that_exist(cluster: ControlPlane, home: str) -> None:
    install(cluster, home, 'scope="Cluster"')
    notes = cluster.helm("get", "notes", "prebook", "--namespace", home)
    assert f"kubectl -n {home} rollout status deployment/{OPERATOR}" in notes
    assert f"helm test prebook -n {home}" in notes
    (example,) = [line.split()[-1] for line in notes.splitlines() if " apply -f examples/" in line]
    assert (ROOT / example).is_file()
    assert "FabricReady" not in notes
    install(cluster, home, "crds.install=false", verb="upgrade")
    notes = cluster.helm("get", "notes", "prebook", "--namespace", home)
    assert "rbac.nodeReader=Always" in notes
    assert "kubectl apply --server-side -f crds/" in notes


@pytest.mark.parametrize(("folder", "roles"), [("deploy", "role"), ("deploy/cluster", "clusterrole")])
def test_plain_install_applies_twice_without_a_change_and_goes_without_the_models(
    cluster: ControlPlane, home: str, folder: str, roles: str
) -> None:
    target = ["-n", "prebook-system"]
    cluster.kubectl("apply", "--server-side", "-k", str(ROOT / folder))
    wait_for("two pods of the operator", lambda: len(operator_pods(cluster, "prebook-system")) == 2, seconds=60)
    assert cluster.kubectl("get", roles, *target, "-l", "app.kubernetes.io/part-of=prebook", "-o", "name")
    model = create_model(cluster, home, "kept")

    def versions() -> dict[str, str]:
        listed = cluster.kubectl("get", "--server-print=false", "-o", "json", "-k", str(ROOT / folder))
        return {
            f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["resourceVersion"]
            for item in json.loads(listed)["items"]
            if item["kind"] not in {"Deployment", "PodDisruptionBudget"}  # their controllers write status meanwhile
        }

    before = versions()
    cluster.kubectl("apply", "--server-side", "-k", str(ROOT / folder))
    assert versions() == before

    file = ROOT / folder / "install.yaml"
    cluster.kubectl("delete", "-f", str(file), "-l", "app.kubernetes.io/component=operator")
    assert uid(cluster, f"{MODELS.format(home)}/kept") == model
    assert not cluster.api.exists(f"/apis/apps/v1/namespaces/prebook-system/deployments/{OPERATOR}")
