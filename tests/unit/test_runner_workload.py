"""Manifests become pods, environments and folders."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from prebook_operator.local.environment import PodFacts, container_environment
from prebook_operator.local.errors import UserError
from prebook_operator.local.volumes import mounts_of, prepare_volumes
from prebook_operator.local.workload import Workload, build_workload
from tests.unit.runner_support import front_service, stateful_set


def build(*manifests: dict[str, Any]) -> Workload:
    return build_workload(manifests, new_token=lambda: "fresh-token")


def facts(workload: Workload, index: int = 0) -> PodFacts:
    return PodFacts(pod=workload.pods[index], ip="127.0.0.9", node="here")


def test_replicas_become_pods_with_names_of_their_roles() -> None:
    workload = build(front_service(), stateful_set("prefill", replicas=2), stateful_set("decode"))
    assert [(pod.name, pod.short, pod.port) for pod in workload.pods] == [
        ("fake-prefill-0", "prefill-0", 8000),
        ("fake-prefill-1", "prefill-1", 8000),
        ("fake-decode-0", "decode-0", 8000),
    ]
    assert workload.front.name == "fake"


def test_two_revisions_of_a_role_keep_their_long_names() -> None:
    other = stateful_set("decode")
    other["metadata"]["name"] = "fake-decode-old"
    workload = build(front_service(), stateful_set("decode"), other)
    assert [pod.short for pod in workload.pods] == ["fake-decode-0", "fake-decode-old-0"]


@pytest.mark.parametrize(
    ("manifest", "named"),
    [
        ({"kind": "Deployment", "metadata": {"name": "x"}}, "Deployment"),
        (
            stateful_set("decode", spec={"volumes": [{"name": "v", "nfs": {"server": "a", "path": "/"}}]}),
            "volumes.0.nfs",
        ),
        (
            stateful_set("decode", container={"env": [{"name": "A", "valueFrom": {"resourceFieldRef": {}}}]}),
            "resourceFieldRef",
        ),
        (stateful_set("decode", replicas=0), "nothing to run"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(manifest: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        build(front_service(), manifest)


def test_front_service_must_be_the_only_one_with_an_address() -> None:
    headless = front_service()
    headless["spec"]["clusterIP"] = "None"
    with pytest.raises(UserError, match="exactly one Service"):
        _ = build(headless, stateful_set("decode")).front


def environment(
    env: list[dict[str, Any]], *extra_manifests: dict[str, Any], machine: dict[str, str] | None = None, **container: Any
) -> dict[str, str]:
    workload = build(front_service(), stateful_set("decode", container={"env": env, **container}), *extra_manifests)
    engine = workload.pods[0].spec.containers[0]
    return container_environment(
        engine, facts=facts(workload), workload=workload, machine=machine or {}, extra={"CUDA_VISIBLE_DEVICES": "1"}
    )


def test_downward_api_and_references_see_earlier_variables_only() -> None:
    field = {
        name: {"valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in (
            ("POD_IP", "status.podIP"),
            ("NAME", "metadata.name"),
            ("ROLE", "metadata.labels['prebook.dev/role']"),
        )
    }
    env = environment(
        [
            {"name": "EARLY", "value": "$(POD_IP)"},
            *({"name": name, **source} for name, source in field.items()),
            {"name": "BIND", "value": "$(POD_IP):8000"},
        ]
    )
    assert env["EARLY"] == "$(POD_IP)"
    assert (env["POD_IP"], env["NAME"], env["ROLE"], env["BIND"]) == (
        "127.0.0.9",
        "fake-decode-0",
        "decode",
        "127.0.0.9:8000",
    )


def test_unknown_downward_field_is_refused() -> None:
    with pytest.raises(UserError, match=r"status\.phase"):
        environment([{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.phase"}}}])


def test_secrets_and_config_maps_are_found_or_named() -> None:
    secret = {
        "kind": "Secret",
        "metadata": {"name": "s"},
        "data": {"k": base64.b64encode(b"v1").decode()},
        "stringData": {"l": "v2"},
    }
    ref = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    optional = {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "none", "key": "k", "optional": True}}}
    env = environment([ref, optional], secret, envFrom=[{"prefix": "S_", "secretRef": {"name": "s"}}])
    assert (env["A"], env["S_l"]) == ("v1", "v2")
    assert "B" not in env
    with pytest.raises(UserError, match="needs Secret s with key 'k'"):
        environment([ref])


def test_the_users_shell_stays_out_but_for_the_basics() -> None:
    env = environment(
        [{"name": "HOME", "value": "/pod"}],
        machine={"PATH": "/bin", "HOME": "/me", "AWS_SECRET_ACCESS_KEY": "x", "VLLM_FOO": "1"},
    )
    assert env["PATH"] == "/bin"
    assert env["HOME"] == "/pod"
    assert env["CUDA_VISIBLE_DEVICES"] == "1"
    assert not {"AWS_SECRET_ACCESS_KEY", "VLLM_FOO"} & set(env)


def test_volumes_become_folders_with_their_content(tmp_path: Path) -> None:
    volumes = [
        {"name": "run", "emptyDir": {}},
        {"name": "token", "secret": {"secretName": "fake-peer-token", "items": [{"key": "token", "path": "sub/t"}]}},
        {"name": "conf", "configMap": {"name": "c"}},
        {
            "name": "all",
            "projected": {
                "sources": [
                    {"secret": {"name": "fake-peer-token"}},
                    {"downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}},
                ]
            },
        },
        {"name": "pvc", "persistentVolumeClaim": {"claimName": "models"}},
        {"name": "host", "hostPath": {"path": str(tmp_path)}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "prebook-cache", "emptyDir": {}},
    ]
    mounts = [
        {"name": "run", "mountPath": "/run/prebook"},
        {"name": "pvc", "mountPath": "/models", "subPath": "a"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    workload = build(
        front_service(),
        stateful_set("decode", spec={"volumes": volumes}, container={"volumeMounts": mounts}),
        {"kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"x.txt": "hello"}},
    )
    folders = prepare_volumes(
        facts=facts(workload), workload=workload, folder=tmp_path / "v", claims=tmp_path / "claims"
    )
    assert (folders["token"] / "sub" / "t").read_text() == "fresh-token"
    assert (folders["token"] / "sub" / "t").stat().st_mode & 0o077 == 0
    assert (folders["conf"] / "x.txt").read_text() == "hello"
    assert sorted(path.name for path in folders["all"].iterdir()) == ["name", "token"]
    assert folders["host"] == tmp_path
    assert folders["prebook-cache"] == tmp_path / "claims" / "prebook-cache"  # downloads outlive a run
    assert mounts_of(workload.pods[0].spec.containers[0], volumes=folders) == {
        "/run/prebook": str(tmp_path / "v" / "run"),
        "/models": str(tmp_path / "claims" / "models" / "a"),
    }


@pytest.mark.parametrize(
    ("volume", "named"),
    [
        ({"name": "h", "hostPath": {"path": "/does/not/exist"}}, "host path /does/not/exist"),
        ({"name": "s", "secret": {"secretName": "nobody"}}, "needs Secret nobody"),
        ({"name": "c", "configMap": {"name": "nobody"}}, "needs ConfigMap nobody"),
        (
            {"name": "t", "secret": {"secretName": "fake-peer-token", "items": [{"key": "token", "path": "../../x"}]}},
            "leaves its volume",
        ),
    ],
)
def test_volume_that_cannot_be_made_is_refused(volume: dict[str, Any], named: str, tmp_path: Path) -> None:
    workload = build(front_service(), stateful_set("decode", spec={"volumes": [volume]}))
    with pytest.raises(UserError, match=named):
        prepare_volumes(facts=facts(workload), workload=workload, folder=tmp_path / "v", claims=tmp_path / "claims")


def test_mount_of_a_volume_that_the_pod_lacks_is_refused() -> None:
    workload = build(
        front_service(), stateful_set("decode", container={"volumeMounts": [{"name": "x", "mountPath": "/x"}]})
    )
    with pytest.raises(UserError, match="mounts volume 'x'"):
        mounts_of(workload.pods[0].spec.containers[0], volumes={})
