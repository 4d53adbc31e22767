"""Every example is what it claims to be: the models accept it, the API server accepts it, and it renders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from prebook_operator.api import load
from prebook_operator.render import cluster_context, render
from tests.chart.conftest import CRDS, delete_crds
from tests.chart.helm import ROOT
from tests.kube.controlplane import ControlPlane

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
EFA = "vpc.amazonaws.com/efa"


def objects(path: Path) -> list[dict[str, Any]]:
    """The rendered objects of an example."""
    model = load(path.read_text())
    rendered: list[dict[str, Any]] = render(model, cluster_context("default", operator_image="prebook:test"))
    return rendered


def engines(path: Path) -> dict[str, dict[str, Any]]:
    """The engine container of each role's StatefulSet."""
    return {
        manifest["metadata"]["labels"]["prebook.dev/role"]: manifest["spec"]["template"]["spec"]["containers"][0]
        for manifest in objects(path)
        if manifest["kind"] == "StatefulSet"
    }


def is_model(path: Path) -> bool:
    return any(
        document["kind"] == "DisaggregatedModel" for document in yaml.safe_load_all(path.read_text()) if document
    )


MODELS = [path for path in EXAMPLES if is_model(path)]
CLUSTER_MODELS = [path for path in MODELS if "pkg://" not in path.read_text()]
"""Models that `prebook up` prepares (`pkg://`) are for this machine only."""


def example(name: str) -> Path:
    return ROOT / "examples" / f"{name}.yaml"


def test_the_examples_of_the_guide_are_there() -> None:
    names = {path.stem for path in CLUSTER_MODELS}
    assert names >= {"qwen3-32b-p5en", "qwen3-32b-xpyd", "qwen3-32b-dra", "smollm2-cpu"}


@pytest.mark.parametrize("path", CLUSTER_MODELS, ids=lambda path: path.stem)
def test_is_valid_and_renders_both_roles(path: Path) -> None:
    assert set(engines(path)) == {"prefill", "decode"}


def test_p5en_takes_two_efa_devices_per_gpu_over_libfabric() -> None:
    for engine in engines(example("qwen3-32b-p5en")).values():
        limits = engine["resources"]["limits"]
        assert (str(limits["nvidia.com/gpu"]), str(limits[EFA])) == ("4", "8")
        assert '"backends":["LIBFABRIC"]' in " ".join(engine["args"] if "args" in engine else engine["command"])


def test_xpyd_gives_each_role_its_own_size_and_the_autoscaler_a_stable_target() -> None:
    sizes = {
        role: (str(engine["resources"]["limits"]["nvidia.com/gpu"]), str(engine["resources"]["limits"][EFA]))
        for role, engine in engines(example("qwen3-32b-xpyd")).items()
    }
    assert sizes == {"prefill": ("1", "2"), "decode": ("4", "8")}
    documents = list(yaml.safe_load_all(example("qwen3-32b-xpyd").read_text()))
    (autoscaler,) = [document for document in documents if document["kind"] == "HorizontalPodAutoscaler"]
    roles = {m["metadata"]["name"] for m in objects(example("qwen3-32b-xpyd")) if m["kind"] == "ModelRole"}
    assert autoscaler["spec"]["scaleTargetRef"]["name"] in roles


def test_dra_claims_devices_instead_of_counting_them() -> None:
    assert any(m["kind"] == "ResourceClaimTemplate" for m in objects(example("qwen3-32b-dra")))
    for engine in engines(example("qwen3-32b-dra")).values():
        assert engine["resources"]["claims"]
        assert EFA not in engine["resources"].get("limits", {})


def test_cpu_asks_for_no_device() -> None:
    for engine in engines(example("smollm2-cpu")).values():
        limits = engine.get("resources", {}).get("limits", {})
        assert not {EFA, "nvidia.com/gpu"} & set(limits)


@pytest.fixture
def crds(cluster: ControlPlane) -> Any:
    """The CRDs, for the time of a test."""
    cluster.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
    cluster.kubectl("wait", "--for=condition=Established", "crd", *CRDS, "--timeout=30s")
    yield
    delete_crds(cluster)


@pytest.mark.tier("apiserver")
@pytest.mark.usefixtures("crds")
def test_the_api_server_accepts_every_example_as_written_and_refuses_a_misspelt_field(cluster: ControlPlane) -> None:
    for path in CLUSTER_MODELS:
        shown = cluster.kubectl("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", str(path))
        assert "serverside-applied (server dry run)" in shown, path
    text = example("smollm2-cpu").read_text().replace("localPrefillMaxTokens", "localPrefilMaxTokens")
    with pytest.raises(Exception, match="localPrefilMaxTokens"):
        cluster.kubectl("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)
