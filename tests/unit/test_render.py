"""Rendering: what each object must say, and golden manifests that show every change in review."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from prebook_operator.api import Allow, Role, load
from prebook_operator.api.manifest_yaml import to_yaml
from prebook_operator.plan import revision_of
from prebook_operator.render import Manifest, Owner, RenderContext, cluster_context, render
from tests.model_documents import changed, minimal, p5en

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "render"


def context(**options: Any) -> RenderContext:
    return cluster_context("team-a", operator_image="prebook/operator:1", **options)


def manifests(document: dict[str, Any], ctx: RenderContext | None = None, **load_options: Any) -> list[Manifest]:
    return render(load(document, **load_options), ctx or context())


def one(found: list[Manifest], kind: str, name: str = "") -> Manifest:
    matches = [item for item in found if item["kind"] == kind and item["metadata"]["name"].startswith(name)]
    assert len(matches) == 1, [item["metadata"]["name"] for item in matches]
    return matches[0]


def pod(found: list[Manifest], role: str, name: str = "") -> Manifest:
    sets = [item for item in found if item["kind"] == "StatefulSet" and f"-{role}-" in item["metadata"]["name"]]
    spec: Manifest = sets[0]["spec"]["template"]["spec"]
    return spec


def engine(found: list[Manifest], role: str) -> Manifest:
    container: Manifest = pod(found, role)["containers"][0]
    return container


def env(found: list[Manifest], role: str) -> dict[str, Any]:
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in engine(found, role)["env"]}


def option(found: list[Manifest], role: str, name: str) -> str:
    values = [arg.split("=", 1)[1] for arg in engine(found, role)["args"] if arg.startswith(f"{name}=")]
    assert len(values) == 1
    value: str = values[0]
    return value


GOLDEN_CASES = {
    "cpu": minimal(),
    "p5en-plugin": changed(p5en(), {"spec/prefill/replicas": 2, "spec/monitoring": {"podMonitor": True}}),
    "p5en-dra": changed(
        p5en(), {"spec/hardware/devices": "DRA", "spec/hardware/dra": {"gpuDeviceClass": "gpu.nvidia.com"}}
    ),
}


@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_golden_manifests(name: str) -> None:
    """PREBOOK_UPDATE_GOLDEN=1 writes them anew; read the difference before committing it."""
    ctx = context(
        owner=Owner(uid="uid-1", name=GOLDEN_CASES[name]["metadata"]["name"]),
        peer_token="token",
        has_pod_monitor=True,
        operator_namespace="prebook-system",
    )
    text = to_yaml(manifests(GOLDEN_CASES[name], ctx))
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("PREBOOK_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_rendering_is_deterministic() -> None:
    assert manifests(p5en()) == manifests(p5en())


def test_every_object_is_labelled_and_owned() -> None:
    owner = Owner(uid="uid-1", name="qwen3-32b")
    found = manifests(p5en(), context(owner=owner, peer_token="t"))
    for item in found:
        metadata = item["metadata"]
        assert metadata["namespace"] == "team-a"
        assert metadata["labels"]["prebook.dev/model"] == "qwen3-32b"
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "prebook"
        assert [ref["uid"] for ref in metadata["ownerReferences"]] == ["uid-1"]


def test_names_and_labels_carry_the_revision() -> None:
    rev8 = revision_of(load(p5en())).rev8
    found = manifests(p5en())
    for role in ("prefill", "decode"):
        for kind in ("StatefulSet", "Service"):
            item = one(found, kind, f"qwen3-32b-{role}-{rev8}")
            assert item["metadata"]["labels"]["prebook.dev/revision"] == rev8
            assert item["metadata"]["labels"]["prebook.dev/revision-algorithm"] == "v1"


def test_a_set_selects_only_its_own_revision_and_never_updates_in_place() -> None:
    found = manifests(p5en())
    spec = one(found, "StatefulSet", "qwen3-32b-decode-")["spec"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    assert "prebook.dev/revision" in spec["selector"]["matchLabels"]
    assert spec["podManagementPolicy"] == "Parallel"
    assert spec["updateStrategy"] == {"type": "OnDelete"}


def test_discovery_sees_pods_that_are_not_ready_and_only_of_the_same_revision() -> None:
    found = manifests(p5en())
    rev8 = revision_of(load(p5en())).rev8
    service = one(found, "Service", "qwen3-32b-prefill-")
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["clusterIP"] == "None"
    dispatch = json.loads(env(found, "decode")["PREBOOK_DISPATCH"])
    assert dispatch["peers"] == f"dns:///qwen3-32b-prefill-{rev8}.team-a.svc:8000"
    assert json.loads(env(found, "prefill")["PREBOOK_DISPATCH"])["peers"].startswith("dns:///qwen3-32b-decode-")


def test_the_front_door_leads_to_ready_decode_pods_of_every_revision_unless_told_otherwise() -> None:
    selector = {"prebook.dev/model": "qwen3-32b", "prebook.dev/role": "decode"}
    front = [item for item in manifests(p5en()) if item["metadata"]["name"] == "qwen3-32b"]
    assert front[0]["spec"]["selector"] == selector
    assert "publishNotReadyAddresses" not in front[0]["spec"]
    narrowed = [
        item
        for item in manifests(p5en(), context(front_revision="0123abcd"))
        if item["metadata"]["name"] == "qwen3-32b"
    ]
    assert narrowed[0]["spec"]["selector"] == {**selector, "prebook.dev/revision": "0123abcd"}


def test_the_side_channel_is_the_pods_own_address() -> None:
    variables = engine(manifests(minimal()), "decode")["env"]
    names = [item["name"] for item in variables]
    assert names.index("POD_IP") < names.index("VLLM_NIXL_SIDE_CHANNEL_HOST") < names.index("PREBOOK_DISPATCH")
    values = env(manifests(minimal()), "decode")
    assert values["POD_IP"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert values["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$(POD_IP)"
    assert values["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"


def test_no_variable_is_named_twice_and_the_roles_overlay_wins() -> None:
    document = changed(
        p5en(),
        {
            "spec/engine/env": [{"name": "FI_PROVIDER", "value": "tcp"}, {"name": "A", "value": "all"}],
            "spec/decode/template/spec/containers": [{"name": "engine", "env": [{"name": "A", "value": "decode"}]}],
        },
    )
    found = manifests(document)
    names = [item["name"] for item in engine(found, "decode")["env"]]
    assert len(names) == len(set(names))
    assert env(found, "decode")["FI_PROVIDER"] == "tcp"
    assert (env(found, "prefill")["A"], env(found, "decode")["A"]) == ("all", "decode")


@pytest.mark.parametrize(
    ("connector", "expected"),
    [
        ("NixlPush", {"kv_connector": "NixlPushConnector"}),
        ("NixlPull", {"kv_connector": "NixlConnector"}),
        (
            "Prebook",
            {"kv_connector": "PrebookConnector", "kv_connector_module_path": "prebook_connector.connector"},
        ),
    ],
)
def test_kv_transfer_config_by_connector(connector: str, expected: dict[str, str]) -> None:
    found = manifests(changed(minimal(), {"spec/transfer/connector": connector}))
    for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        config = json.loads(option(found, role, "--kv-transfer-config"))
        assert config["kv_role"] == kv_role
        assert config["kv_load_failure_policy"] == "recompute"
        assert config["kv_buffer_device"] == "cpu"
        assert expected.items() <= config.items()
        assert config["kv_connector_extra_config"]["backends"] == ["UCX"]
        assert ("prebook" in config["kv_connector_extra_config"]) == (connector == "Prebook")


def test_connector_settings_follow_the_spec() -> None:
    document = changed(
        p5en(),
        {
            "spec/transfer": {
                "leaseSeconds": 12,
                "onFailure": "Fail",
                "verify": "Sample",
                "progressive": {"enabled": False, "minBytes": "1Mi", "maxInFlight": 5},
            }
        },
    )
    found = manifests(document)
    config = json.loads(option(found, "decode", "--kv-transfer-config"))
    assert config["kv_load_failure_policy"] == "fail"
    assert "kv_buffer_device" not in config
    assert config["kv_connector_extra_config"] == {
        "backends": ["LIBFABRIC"],
        "prebook": {
            "control_dir": "/run/prebook",
            "lease_seconds": 12,
            "progressive": False,
            "min_bytes": 1048576,
            "max_in_flight": 5,
            "verify": "sample",
            "model_revision": revision_of(load(document)).rev8,
            "timeline_dir": None,
        },
    }


@pytest.mark.parametrize(
    ("uri", "model", "extra"),
    [
        ("hf://Qwen/Qwen3-8B", "Qwen/Qwen3-8B", "--revision=r1"),
        ("s3://bucket/a/b", "s3://bucket/a/b", "--load-format=runai_streamer"),
        ("pvc://claim/a/b", "/model/a/b", None),
        ("pvc://claim", "/model", None),
        ("file:///models/x", "/models/x", None),
    ],
)
def test_model_sources(uri: str, model: str, extra: str | None) -> None:
    found = manifests(changed(minimal(), {"spec/model": {"uri": uri, "revision": "r1"}}))
    args = engine(found, "decode")["args"]
    assert f"--model={model}" in args
    assert [arg for arg in args if arg.startswith(("--revision", "--load-format"))] == ([extra] if extra else [])
    claims = [item for item in pod(found, "decode")["volumes"] if item["name"] == "prebook-model"]
    assert [item["persistentVolumeClaim"] for item in claims] == (
        [{"claimName": "claim", "readOnly": True}] if uri.startswith("pvc") else []
    )


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], ["--block-size=128"]),
        (["--block-size", "64"], ["--block-size"]),
        (["--block_size=64"], ["--block_size=64"]),
    ],
)
def test_block_size_is_suggested_on_gpus_only(args: list[str], expected: list[str]) -> None:
    found = manifests(changed(p5en(), {"spec/engine/args": args}))
    assert [arg for arg in engine(found, "prefill")["args"] if "block" in arg] == expected
    assert not [arg for arg in engine(manifests(minimal()), "prefill")["args"] if "block" in arg]


def test_efa_brings_devices_ipc_lock_and_libfabric_settings() -> None:
    found = manifests(p5en())
    container = engine(found, "decode")
    devices = {"nvidia.com/gpu": "4", "vpc.amazonaws.com/efa": "8"}
    assert container["resources"] == {"requests": devices, "limits": devices}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert {"FI_PROVIDER": "efa", "FI_EFA_ENABLE_SHM_TRANSFER": "0"}.items() <= env(found, "decode").items()
    assert pod(found, "decode")["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5en.48xlarge"}


def test_without_efa_there_is_no_privilege_at_all() -> None:
    found = manifests(minimal())
    container = engine(found, "decode")
    assert "resources" not in container
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert not [name for name in env(found, "decode") if name.startswith("FI_")]
    assert "podAffinity" not in pod(found, "decode")["affinity"]


def test_efa_by_claim() -> None:
    found = manifests(GOLDEN_CASES["p5en-dra"])
    claim = one(found, "ResourceClaimTemplate", "qwen3-32b-decode-")
    devices = claim["spec"]["spec"]["devices"]
    assert [item["name"] for item in devices["requests"]] == [
        f"{kind}-{i}" for i in range(4) for kind in ("gpu", "efa")
    ]
    assert devices["constraints"][3] == {
        "matchAttribute": "resource.kubernetes.io/pcieRoot",
        "requests": ["gpu-3", "efa-3"],
    }
    container = engine(found, "decode")
    assert container["resources"] == {"claims": [{"name": "devices"}]}
    assert pod(found, "decode")["resourceClaims"] == [
        {"name": "devices", "resourceClaimTemplateName": claim["metadata"]["name"]}
    ]


def test_both_roles_share_a_zone_and_prefer_other_hosts() -> None:
    affinity = pod(manifests(p5en()), "prefill")["affinity"]
    zone = affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
    assert zone["topologyKey"] == "topology.kubernetes.io/zone"
    assert "prebook.dev/role" not in zone["labelSelector"]["matchLabels"]
    apart = affinity["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"][0]["podAffinityTerm"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"]["matchLabels"]["prebook.dev/role"] == "decode"


def test_pods_run_without_rights() -> None:
    spec = pod(manifests(minimal()), "decode")
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["serviceAccountName"] == "demo-engine"
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["initContainers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()


def test_group_zero_is_a_choice_and_not_an_absence() -> None:
    document = changed(minimal(), {"spec/decode/template/spec/securityContext": {"runAsUser": 2000, "runAsGroup": 0}})
    context_ = pod(manifests(document), "decode")["securityContext"]
    assert (context_["runAsUser"], context_["runAsGroup"], context_["fsGroup"]) == (2000, 0, 65532)


def test_what_the_operator_allows_is_rendered() -> None:
    document = changed(
        p5en(),
        {
            "spec/decode/template/spec/hostNetwork": True,
            "spec/decode/template/spec/containers": [
                {"name": "engine", "securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}}}
            ],
        },
    )
    allow = Allow(host_namespaces=True, capabilities=frozenset({"SYS_PTRACE"}))
    found = manifests(document, allow=allow)
    assert pod(found, "decode")["hostNetwork"] is True
    assert engine(found, "decode")["securityContext"]["capabilities"]["add"] == ["IPC_LOCK", "SYS_PTRACE"]


def test_probes_leave_half_an_hour_for_loading_and_ask_the_pairing_for_readiness() -> None:
    container = engine(manifests(minimal()), "decode")
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    assert startup["httpGet"]["path"] == "/health"
    assert container["readinessProbe"]["httpGet"]["path"] == "/prebook/v1/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"


def test_grace_outlives_drain_shutdown_and_lease() -> None:
    document = changed(
        minimal(), {"spec/transfer": {"drainSeconds": 100, "leaseSeconds": 40}, "spec/engine/shutdownSeconds": 50}
    )
    found = manifests(document)
    assert pod(found, "decode")["terminationGracePeriodSeconds"] >= 190
    command = engine(found, "decode")["lifecycle"]["preStop"]["exec"]["command"]
    assert command == ["python3", "-m", "prebook_connector.drain", "--timeout", "100"]
    assert option(found, "decode", "--shutdown-timeout") == "50"


def test_memory_backed_shared_memory() -> None:
    def size(document: dict[str, Any]) -> dict[str, str]:
        volumes = pod(manifests(document), "decode")["volumes"]
        return next(item["emptyDir"] for item in volumes if item["name"] == "prebook-shm")

    assert size(minimal()) == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert size(p5en()) == {"medium": "Memory", "sizeLimit": "20Gi"}
    assert size(changed(p5en(), {"spec/engine/sharedMemory": "64Gi"}))["sizeLimit"] == "64Gi"


@pytest.mark.parametrize(("replicas", "budgets"), [(1, 0), (2, 1)])
def test_budgets_only_from_two_replicas(replicas: int, budgets: int) -> None:
    found = manifests(changed(minimal(), {"spec/decode/replicas": replicas}))
    made = [item for item in found if item["kind"] == "PodDisruptionBudget"]
    assert len(made) == budgets
    assert all(item["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow" for item in made)


def test_replicas_come_from_the_context_when_it_has_them() -> None:
    found = manifests(minimal(), context(replicas={Role.DECODE: 5}))
    assert one(found, "StatefulSet", "demo-decode-")["spec"]["replicas"] == 5
    assert one(found, "StatefulSet", "demo-prefill-")["spec"]["replicas"] == 1
    assert one(found, "PodDisruptionBudget")["metadata"]["name"] == "demo-decode"


def test_the_role_states_replicas_only_when_the_spec_pins_them() -> None:
    found = manifests(changed(minimal(), {"spec/prefill/replicas": 0}))
    assert one(found, "ModelRole", "demo-prefill")["spec"] == {"model": "demo", "role": "prefill", "replicas": 0}
    assert one(found, "ModelRole", "demo-decode")["spec"] == {"model": "demo", "role": "decode"}


def test_prefill_is_reached_only_by_its_own_model_the_operator_and_the_monitoring() -> None:
    document = changed(minimal(), {"spec/networkPolicy": {"monitoringNamespaces": ["monitoring"]}})
    policy = one(manifests(document, context(operator_namespace="prebook-system")), "NetworkPolicy", "demo-prefill")
    own, others = policy["spec"]["ingress"]
    assert own == {"from": [{"podSelector": {"matchLabels": {"prebook.dev/model": "demo"}}}]}
    assert [item["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for item in others["from"]] == [
        "monitoring",
        "prebook-system",
    ]
    assert others["ports"] == [{"port": 8000, "protocol": "TCP"}]


def test_clients_reach_the_http_port_of_decode_and_no_other() -> None:
    policy = one(manifests(minimal()), "NetworkPolicy", "demo-decode")
    assert policy["spec"]["ingress"][1] == {"ports": [{"port": 8000, "protocol": "TCP"}]}


def test_policies_can_be_switched_off() -> None:
    found = manifests(changed(minimal(), {"spec/networkPolicy": {"enabled": False}}))
    assert not [item for item in found if item["kind"] == "NetworkPolicy"]


def test_the_token_is_rendered_only_when_it_is_made() -> None:
    assert one(manifests(minimal(), context(peer_token="abc")), "Secret")["stringData"] == {"token": "abc"}
    assert not [item for item in manifests(minimal()) if item["kind"] == "Secret"]


@pytest.mark.parametrize(("asked", "known", "made"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_pod_monitor_where_asked_for_and_known(asked: bool, known: bool, made: int) -> None:
    document = changed(minimal(), {"spec/monitoring": {"podMonitor": asked}})
    found = manifests(document, context(has_pod_monitor=known))
    assert len([item for item in found if item["kind"] == "PodMonitor"]) == made


def test_text_has_no_anchors_and_reads_back_as_the_same_objects() -> None:
    found = manifests(p5en())
    text = to_yaml(found)
    assert "&id" not in text
    assert list(yaml.safe_load_all(text)) == found
