"""What the chart renders, without a cluster: scopes, rights, restricted pods, and notes that say what to do next."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import yaml

from prebook_operator import rbac
from tests.chart.helm import CHART, ROOT, Helm, Manifest, of_kind, only, pods

CLUSTER = 'scope="Cluster"'


def operator_args(manifests: list[Manifest]) -> list[str]:
    args = only(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert isinstance(args, list)
    return args


def test_lint_finds_nothing(helm: Helm) -> None:
    assert "0 chart(s) failed" in helm.run("lint", "--strict", str(CHART))


def test_default_scope_needs_roles_only(helm: Helm) -> None:
    manifests = helm.template()
    assert not of_kind(manifests, "ClusterRole")
    assert not of_kind(manifests, "ClusterRoleBinding")
    roles = {role["metadata"]["name"]: role["rules"] for role in of_kind(manifests, "Role")}
    assert roles == {
        "prebook-operator": rbac.operator_rules(rbac.Reach.WATCHED),
        "prebook-operator-home": rbac.operator_rules(rbac.Reach.HOME),
    }
    assert "--namespace=$(POD_NAMESPACE)" in operator_args(manifests)


def test_every_watched_namespace_gets_the_same_role_bound_to_the_operator(helm: Helm) -> None:
    manifests = helm.template('watchNamespaces=["team-a","team-b"]')
    watched = {
        role["metadata"]["namespace"]: role["rules"]
        for role in of_kind(manifests, "Role")
        if role["metadata"]["name"] == "prebook-operator"
    }
    rules = rbac.operator_rules(rbac.Reach.WATCHED)
    assert watched == {"team-a": rules, "team-b": rules}
    subjects = [binding["subjects"] for binding in of_kind(manifests, "RoleBinding")]
    assert subjects == [[{"kind": "ServiceAccount", "name": "prebook-operator", "namespace": "prebook-system"}]] * 3
    args = operator_args(manifests)
    assert [arg for arg in args if arg.startswith("--namespace=")] == ["--namespace=team-a", "--namespace=team-b"]


def test_cluster_scope_watches_all_namespaces_and_reads_nodes(helm: Helm) -> None:
    manifests = helm.template(CLUSTER)
    roles = {role["metadata"]["name"]: role["rules"] for role in of_kind(manifests, "ClusterRole")}
    assert roles["prebook-operator-prebook-system"] == rbac.operator_rules(rbac.Reach.WATCHED)
    assert roles["prebook-operator-prebook-system-reader"] == rbac.operator_rules(rbac.Reach.CLUSTER)
    assert [role["metadata"]["name"] for role in of_kind(manifests, "Role")] == ["prebook-operator-home"]
    args = operator_args(manifests)
    assert not any(arg.startswith("--namespace") for arg in args)


def test_node_reader_can_be_added_to_a_namespaced_release(helm: Helm) -> None:
    (role,) = of_kind(helm.template('rbac.nodeReader="Always"'), "ClusterRole")
    assert role["rules"] == rbac.operator_rules(rbac.Reach.CLUSTER)


def test_user_roles_aggregate_to_the_builtin_ones(helm: Helm) -> None:
    roles = {role["metadata"]["name"]: role for role in of_kind(helm.template(CLUSTER), "ClusterRole")}
    for role in rbac.UserRole:
        rendered = roles[f"prebook-{role}"]
        assert rendered["metadata"]["labels"][f"rbac.authorization.k8s.io/aggregate-to-{role}"] == "true"
        assert rendered["rules"] == rbac.user_rules(role)


@pytest.mark.parametrize(
    "settings", [[], [CLUSTER], ['watchNamespaces=["a"]', "replicas=1", "metrics.serviceMonitor.enabled=true"]]
)
def test_every_pod_meets_the_restricted_pod_security_standard(helm: Helm, settings: list[str]) -> None:
    seen = 0
    for name, spec in pods(helm.template(*settings)):
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["securityContext"]["runAsUser"] == 65532, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), name
        for container in spec["containers"] + spec.get("initContainers", []):
            security = container["securityContext"]
            assert security == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "runAsNonRoot": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert {"requests", "limits"} <= set(container["resources"]), name
        assert all(set(volume) - {"name"} == {"emptyDir"} for volume in spec.get("volumes", [])), name
        seen += 1
    assert seen == 2  # the operator and `helm test`


def test_two_replicas_with_a_budget_that_never_blocks_a_drain_for_ever(helm: Helm) -> None:
    manifests = helm.template()
    assert only(manifests, "Deployment")["spec"]["replicas"] == 2
    budget = only(manifests, "PodDisruptionBudget")["spec"]
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    assert not of_kind(helm.template("replicas=1"), "PodDisruptionBudget")


def test_selectors_find_the_operator_and_nothing_else(helm: Helm) -> None:
    manifests = helm.template('podLabels={"app.kubernetes.io/component": "mine", "team": "x"}')
    template = only(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    test_pod = only(manifests, "Pod")["metadata"]["labels"]
    assert template["team"] == "x"
    for selector in (
        only(manifests, "Deployment")["spec"]["selector"]["matchLabels"],
        only(manifests, "Service")["spec"]["selector"],
        only(manifests, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        only(manifests, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= template.items()
        assert not selector.items() <= test_pod.items()


def test_network_policy_admits_only_metrics_and_health_and_lets_out_what_the_operator_calls(helm: Helm) -> None:
    manifests = helm.template(
        'watchNamespaces=["team-a"]', 'networkPolicy.metricsFrom=[{"namespaceSelector": {"matchLabels": {"x": "y"}}}]'
    )
    policy = only(manifests, "NetworkPolicy")["spec"]
    ports = {
        port["name"]: port["containerPort"]
        for port in only(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]["ports"]
    }
    assert [rule["ports"][0]["port"] for rule in policy["ingress"]] == [ports["metrics"], ports["health"]]
    assert policy["ingress"][0]["from"] == [{"namespaceSelector": {"matchLabels": {"x": "y"}}}]
    assert [[port["port"] for port in rule["ports"]] for rule in policy["egress"]] == [[443, 6443], [53, 53], [8000]]
    engines = policy["egress"][2]["to"][0]
    assert engines["namespaceSelector"]["matchExpressions"][0]["values"] == ["team-a"]
    assert not of_kind(helm.template("networkPolicy.enabled=false"), "NetworkPolicy")


def test_service_monitor_only_when_asked_for(helm: Helm) -> None:
    assert not of_kind(helm.template(), "ServiceMonitor")
    manifests = helm.template(
        "metrics.serviceMonitor.enabled=true", 'metrics.serviceMonitor.labels={"release": "prom"}'
    )
    monitor = only(manifests, "ServiceMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prom"
    service = only(manifests, "Service")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}


def test_a_digest_wins_over_a_tag_and_reaches_the_init_container_too(helm: Helm) -> None:
    digest = "sha256:" + "a" * 64
    manifests = helm.template(f'image={{"repository": "r.example/p", "tag": "t", "digest": "{digest}"}}')
    container = only(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == f"r.example/p@{digest}"
    assert {"name": "OPERATOR_IMAGE", "value": container["image"]} in container["env"]
    assert "--image=$(OPERATOR_IMAGE)" in container["args"]


def test_crds_stay_when_the_release_goes_and_can_be_left_out(helm: Helm) -> None:
    crds = of_kind(helm.template(), "CustomResourceDefinition")
    assert {crd["metadata"]["name"] for crd in crds} == {"disaggregatedmodels.prebook.dev", "modelroles.prebook.dev"}
    for crd in crds:
        assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        source = yaml.safe_load((ROOT / "crds" / f"{crd['metadata']['name']}.yaml").read_text())
        assert crd["spec"] == source["spec"]
        assert source["metadata"]["annotations"].items() <= crd["metadata"]["annotations"].items()
        assert source["metadata"]["labels"].items() <= crd["metadata"]["labels"].items()
    for crd in of_kind(helm.template("crds.keep=false"), "CustomResourceDefinition"):
        assert "helm.sh/resource-policy" not in crd["metadata"]["annotations"]
    assert not of_kind(helm.template("crds.install=false"), "CustomResourceDefinition")


def test_an_account_of_the_users_own_is_bound(helm: Helm) -> None:
    manifests = helm.template('serviceAccount={"create": false, "name": "mine"}')
    assert not of_kind(manifests, "ServiceAccount")
    assert only(manifests, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == "mine"
    assert {binding["subjects"][0]["name"] for binding in of_kind(manifests, "RoleBinding")} == {"mine"}


def test_objects_of_a_release_in_another_name_do_not_collide(helm: Helm) -> None:
    first = {
        (m["kind"], m["metadata"]["name"])
        for m in helm.template(CLUSTER, namespace="one")
        if m["kind"].startswith("ClusterRole")
    }
    second = {
        (m["kind"], m["metadata"]["name"])
        for m in helm.template(CLUSTER, 'rbac.aggregatedRoles="Never"', release="other", namespace="two")
        if m["kind"].startswith("ClusterRole")
    }
    assert first
    assert second
    assert not first & second


def test_chart_and_package_have_one_version(helm: Helm) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version("prebook")
    for kustomization in ("deploy/kustomization.yaml", "deploy/cluster/kustomization.yaml"):
        images = yaml.safe_load((ROOT / kustomization).read_text())["images"]
        assert [image["newTag"] for image in images] == [chart["appVersion"]]


def test_nothing_is_allowed_unless_it_is_asked_for(helm: Helm) -> None:
    assert not [arg for arg in operator_args(helm.template()) if arg.startswith("--allow")]
    settings = 'operator.allow={"hostPath": true, "capabilities": ["SYS_NICE"], "serviceAccounts": ["s3-reader"]}'
    allowed = [arg for arg in operator_args(helm.template(settings)) if arg.startswith("--allow")]
    assert allowed == ["--allow-host-path", "--allow-capability=SYS_NICE", "--allow-service-account=s3-reader"]
