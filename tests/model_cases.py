"""Documents that must be accepted or refused: one corpus for `load` and for the real API server's CEL.

Each wrong document differs from a good one in one place, and states the path and a part of the message that a user
must see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.model_documents import Document, changed, minimal, p5en


@dataclass(frozen=True)
class Wrong:
    """A change that makes a good document wrong.

    `path` and `says` are what `load` answers. `server` is what the API server answers (absent: the same words as
    `says`), and `cel` is False for faults that only the operator can judge, because it may have been started to allow
    them.
    """

    id: str
    changes: dict[str, Any]
    path: str
    says: str
    server: str | None = None
    cel: bool = True
    base: str = "minimal"

    @property
    def document(self) -> Document:
        """The wrong document."""
        return changed(p5en() if self.base == "p5en" else minimal(), self.changes)

    @property
    def expected_from_server(self) -> str:
        """Words of the API server's answer."""
        return self.says if self.server is None else self.server


def _engine_overlay(role: str, **fields: Any) -> dict[str, Any]:
    return {f"spec/{role}/template/spec/containers": [{"name": "engine", **fields}]}


_ARG = "is set by Prebook, or may abbreviate"
_OWNED_ARGS = {
    "kv": ("--kv-transfer-config={}", "--kv-transfer-config is set by Prebook"),
    "underscores": ("--kv_transfer_config={}", "--kv-transfer-config is set by Prebook"),
    "dotted": ("--kv-transfer-config.kv_role=x", "--kv-transfer-config is set by Prebook"),
    "abbreviation": ("--middlew=x", "--middlew may stand for --middleware"),
    "config-file": ("--config=/tmp/x.yaml", "--config is set by Prebook"),
    "short": ("-tp=2", "-tp is set by Prebook"),
    "family": ("--data-parallel-backend=ray", "--data-parallel-size, which is set by Prebook"),
    "dashes": ("--", "may stand for"),
    "port": ("--port=9000", "--port is set by Prebook"),
}

WRONG: tuple[Wrong, ...] = (
    Wrong("name-too-long", {"metadata/name": "a" * 36}, "metadata.name", "characters", "pod labels carry the name"),
    Wrong(
        "name-form",
        {"metadata/name": "4bit"},
        "metadata.name",
        "cannot be the name of a Service",
        "starting with a letter",
    ),
    Wrong("no-model", {"spec/model": None}, "spec.model", "is required", "Required value"),
    Wrong("uri-form", {"spec/model/uri": "Qwen/Qwen3"}, "spec.model.uri", "Use hf://org/name"),
    Wrong(
        "token-without-hf",
        {"spec/model/hfTokenSecretRef": {"name": "hf", "key": "token"}},
        "spec.model.hfTokenSecretRef",
        "only hf:// models use it",
    ),
    Wrong(
        "two-caches",
        {"spec/model/cache": {"emptyDir": {}, "persistentVolumeClaim": "models"}},
        "spec.model.cache",
        "several sources are given",
    ),
    Wrong(
        "cache-host-path",
        {"spec/model/cache": {"hostPath": "/var"}},
        "spec.model.cache.hostPath",
        "not allowed",
        cel=False,
    ),
    Wrong("arg-value-first", {"spec/engine/args": ["7", "--x"]}, "spec.engine.args[0]", "belongs to no option"),
    *(
        Wrong(f"arg-{name}", {"spec/engine/args": ["--dtype=auto", arg]}, "spec.engine.args[1]", says, _ARG)
        for name, (arg, says) in _OWNED_ARGS.items()
    ),
    Wrong(
        "env-side-channel",
        {"spec/engine/env": [{"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "value": "localhost"}]},
        "spec.engine.env[VLLM_NIXL_SIDE_CHANNEL_HOST]",
        "is set by Prebook",
    ),
    Wrong(
        "env-prefix",
        {"spec/engine/env": [{"name": "PREBOOK_DISPATCH", "value": "{}"}]},
        "spec.engine.env[PREBOOK_DISPATCH]",
        "is set by Prebook",
    ),
    Wrong(
        "env-secret-as-text",
        {"spec/engine/env": [{"name": "HF_TOKEN", "value": "hf_abc"}]},
        "spec.engine.env[HF_TOKEN]",
        "holds a credential as plain text",
    ),
    Wrong(
        "env-value-twice",
        {"spec/engine/env": [{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
        "spec.engine.env[A]",
        "has both value and valueFrom",
    ),
    Wrong(
        "env-no-source",
        {"spec/engine/env": [{"name": "A", "valueFrom": {}}]},
        "spec.engine.env[A].valueFrom",
        "has 0 sources",
        "give exactly one of",
    ),
    Wrong(
        "env-twice",
        {"spec/engine/env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
        "spec.engine.env[A]",
        "is given 2 times",
        "Duplicate value",
    ),
    Wrong(
        "ucx-with-efa", {"spec/transfer/backend": "UCX"}, "spec.transfer.backend", "silently run over TCP", base="p5en"
    ),
    Wrong("connector", {"spec/transfer/connector": "Pull"}, "spec.transfer.connector", "'NixlPull'", "NixlPull"),
    Wrong(
        "min-bytes",
        {"spec/transfer/progressive": {"minBytes": "1.5Mi"}},
        "spec.transfer.progressive.minBytes",
        "whole number of bytes",
        "minBytes",
    ),
    Wrong(
        "lease",
        {"spec/transfer/leaseSeconds": 1},
        "spec.transfer.leaseSeconds",
        "Use at least 2",
        "greater than or equal to 2",
    ),
    Wrong("efa-without-profile", {"spec/hardware/efaPerGPU": 2}, "spec.hardware.efaPerGPU", "has no EFA devices"),
    Wrong(
        "too-many-gpus",
        {"spec/decode/gpus": 9},
        "spec.decode.gpus",
        "more than the 8 of one p5en.48xlarge node",
        "a pod cannot span nodes, and p5en.48xlarge has 8",
        base="p5en",
    ),
    Wrong(
        "too-many-gpus-implied",
        {"spec/decode/gpus": None, "spec/decode/tensorParallelSize": 16},
        "spec.decode.gpus",
        "more than the 8 of one p5en.48xlarge node",
        "a pod cannot span nodes, and p5en.48xlarge has 8",
        base="p5en",
    ),
    Wrong(
        "too-many-efa",
        {"spec/hardware/efaPerGPU": 5},
        "spec.hardware.efaPerGPU",
        "Use at most 4",
        "p5en.48xlarge has 16",
        base="p5en",
    ),
    Wrong(
        "gpus-below-tp",
        {"spec/decode/gpus": 2},
        "spec.decode.gpus",
        "cannot hold tensorParallelSize",
        "too few GPUs",
        base="p5en",
    ),
    Wrong(
        "first-token-of-stock",
        {"spec/transfer": {"firstToken": "Prefill", "connector": "NixlPull"}},
        "spec.transfer.firstToken",
        "continue from prefill's token",
    ),
    Wrong(
        "first-token-with-speculation",
        {"spec/transfer/firstToken": "Prefill", "spec/engine/args": ["--max-model-len=99", "--speculative_config={}"]},
        "spec.transfer.firstToken",
        "cannot be combined with",
    ),
    Wrong(
        "first-token-with-processors",
        {"spec/transfer/firstToken": "Prefill", "spec/engine/args": ["--logits-processors=a:B"]},
        "spec.transfer.firstToken",
        "cannot be combined with",
    ),
    Wrong(
        "prefill-tp-above-decode",
        {"spec/decode": {"tensorParallelSize": 2}},
        "spec.prefill.tensorParallelSize",
        "which decode cannot receive",
        base="p5en",
    ),
    Wrong(
        "tp-not-divisible",
        {"spec/prefill/tensorParallelSize": 2, "spec/decode": {"tensorParallelSize": 3}},
        "spec.decode.tensorParallelSize",
        "evenly",
    ),
    Wrong(
        "replicas",
        {"spec/prefill/replicas": -1},
        "spec.prefill.replicas",
        "Use at least 0",
        "greater than or equal to 0",
    ),
    Wrong(
        "ratio-form",
        {"spec/scaling/ratio": {"min": "1/4"}},
        "spec.scaling.ratio.min",
        "Use prefill:decode",
        "should match",
    ),
    Wrong(
        "ratio-order", {"spec/scaling/ratio": {"min": "2:1", "max": "1:2"}}, "spec.scaling.ratio.min", "more than max"
    ),
    Wrong(
        "ratio-replicas",
        {"spec/scaling/ratio": {"max": "2:1"}, "spec/prefill/replicas": 3, "spec/decode/replicas": 1},
        "spec.scaling.ratio",
        "outside of it",
    ),
    Wrong(
        "ratio-replicas-low",
        {"spec/scaling/ratio": {"min": "1:2"}, "spec/prefill/replicas": 1, "spec/decode/replicas": 3},
        "spec.scaling.ratio",
        "outside of it",
    ),
    Wrong(
        "toleration-value",
        {"spec/prefill/tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]},
        "spec.prefill.tolerations[0].value",
        "is not compared with operator Exists",
    ),
    Wrong(
        "toleration-key",
        {"spec/decode/tolerations": [{"value": "b"}]},
        "spec.decode.tolerations[0].key",
        "required with operator Equal",
    ),
    Wrong(
        "toleration-seconds",
        {"spec/decode/template/spec/tolerations": [{"key": "a", "operator": "Exists", "tolerationSeconds": 3}]},
        "spec.decode.template.spec.tolerations[0].tolerationSeconds",
        "no meaning without effect NoExecute",
    ),
    Wrong(
        "template-label",
        {"spec/prefill/template/metadata/labels": {"prebook.dev/role": "decode"}},
        "spec.prefill.template.metadata.labels[prebook.dev/role]",
        "set by Prebook",
    ),
    Wrong(
        "grace",
        {"spec/prefill/template/spec/terminationGracePeriodSeconds": 100},
        "spec.prefill.template.spec.terminationGracePeriodSeconds",
        "shorter than drain, shutdown and lease together",
    ),
    Wrong(
        "volume-name",
        {"spec/decode/template/spec/volumes": [{"name": "prebook-x", "emptyDir": {}}]},
        "spec.decode.template.spec.volumes[0].name",
        "are Prebook's",
    ),
    Wrong(
        "volume-without-source",
        {"spec/decode/template/spec/volumes": [{"name": "a"}]},
        "spec.decode.template.spec.volumes[0]",
        "has 0 sources",
        "give exactly one of",
    ),
    Wrong(
        "mount-without-volume",
        _engine_overlay("decode", volumeMounts=[{"name": "a", "mountPath": "/a"}]),
        "spec.decode.template.spec.containers[0].volumeMounts[0].name",
        "volume",
        "names a volume that this template does not have",
    ),
    Wrong(
        "mount-over-ours",
        {
            "spec/decode/template/spec/volumes": [{"name": "a", "emptyDir": {}}],
            **_engine_overlay("decode", volumeMounts=[{"name": "a", "mountPath": "/prebook/lib"}]),
        },
        "spec.decode.template.spec.containers[0].volumeMounts[0].mountPath",
        "mounted by Prebook",
    ),
    Wrong(
        "owned-resource",
        _engine_overlay("prefill", resources={"limits": {"nvidia.com/gpu": 1}}),
        "spec.prefill.template.spec.containers[0].resources.limits[nvidia.com/gpu]",
        "set by Prebook",
    ),
    Wrong(
        "overlay-env",
        _engine_overlay("prefill", env=[{"name": "PYTHONPATH", "value": "/x"}]),
        "spec.prefill.template.spec.containers[0].env[PYTHONPATH]",
        "set by Prebook",
    ),
    Wrong(
        "host-network",
        {"spec/prefill/template/spec/hostNetwork": True},
        "spec.prefill.template.spec.hostNetwork",
        "not allowed",
        cel=False,
    ),
    Wrong(
        "host-pid",
        {"spec/prefill/template/spec/hostPID": True},
        "spec.prefill.template.spec.hostPID",
        "not allowed",
        cel=False,
    ),
    Wrong(
        "service-account",
        {"spec/decode/template/spec/serviceAccountName": "admin"},
        "spec.decode.template.spec.serviceAccountName",
        "'admin' is not allowed",
        cel=False,
    ),
    Wrong(
        "host-path-volume",
        {"spec/decode/template/spec/volumes": [{"name": "a", "hostPath": {"path": "/"}}]},
        "spec.decode.template.spec.volumes[0].hostPath",
        "not allowed",
        cel=False,
    ),
    Wrong(
        "privileged",
        _engine_overlay("decode", securityContext={"privileged": True}),
        "spec.decode.template.spec.containers[0].securityContext.privileged",
        "not allowed",
        cel=False,
    ),
    Wrong(
        "capability",
        _engine_overlay("decode", securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
        "spec.decode.template.spec.containers[0].securityContext.capabilities.add[SYS_ADMIN]",
        "not allowed",
        cel=False,
    ),
    Wrong(
        "sidecar",
        {"spec/decode/template/spec/containers": [{"name": "sidecar"}]},
        "spec.decode.template.spec.containers[0].name",
        "Use one of 'engine'",
        "supported values",
    ),
)


@dataclass(frozen=True)
class Good:
    """A document that is accepted."""

    id: str
    document: Document


GOOD: tuple[Good, ...] = (
    Good("minimal", minimal()),
    Good("p5en", p5en()),
    Good("gpus-implied", changed(p5en(), {"spec/prefill/gpus": None, "spec/decode/gpus": None})),
    Good("efa-implied", changed(p5en(), {"spec/hardware/efaPerGPU": None, "spec/decode/gpus": 8})),
    Good("no-efa-ucx", changed(p5en(), {"spec/hardware/efaPerGPU": 0, "spec/transfer/backend": "UCX"})),
    Good(
        "dra",
        changed(p5en(), {"spec/hardware/devices": "DRA", "spec/hardware/dra": {"gpuDeviceClass": "gpu.nvidia.com"}}),
    ),
    Good("first-token", changed(minimal(), {"spec/transfer/firstToken": "Prefill"})),
    Good("processors", changed(minimal(), {"spec/engine/args": ["--logits-processors=a:B"]})),
    Good(
        "mla",
        changed(p5en(), {"spec/decode": {"tensorParallelSize": 2}, "spec/transfer/multiHeadLatentAttention": True}),
    ),
    Good("autoscaled", changed(minimal(), {"spec/scaling/ratio": {"min": "1:4", "max": "4:1"}})),
    Good("scaled-to-zero", changed(minimal(), {"spec/prefill/replicas": 0, "spec/scaling/ratio": {"min": "1:4"}})),
    Good(
        "args",
        changed(
            minimal(),
            {"spec/engine/args": ["--max-model-len=2048", "--dtype", "bfloat16", "--enforce-eager", "-cc.mode=3"]},
        ),
    ),
    Good(
        "token-by-reference",
        changed(
            minimal(),
            {"spec/engine/env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}]},
        ),
    ),
    Good(
        "overlay",
        changed(
            minimal(),
            {
                "spec/decode/tolerations": [{"operator": "Exists"}],
                "spec/decode/template/metadata": {"labels": {"team": "a"}, "annotations": {"example.com/x": "y"}},
                "spec/decode/template/spec/volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}}],
                "spec/decode/template/spec/terminationGracePeriodSeconds": 200,
                **_engine_overlay(
                    "decode",
                    resources={"requests": {"cpu": 4, "memory": "16Gi"}},
                    volumeMounts=[{"name": "scratch", "mountPath": "/scratch"}],
                ),
            },
        ),
    ),
)
