"""Generated files are what their sources give, and their check notices when they are not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from hack.kube.binaries import locate
from tests.chart.helm import CHART, ROOT, Helm
from tests.kube.fixtures import require_binaries


@pytest.fixture
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chart_generator", ROOT / "hack" / "chart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_chart_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "hack/chart.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_plain_install_is_up_to_date(helm: Helm) -> None:
    done = subprocess.run(
        ["hack/install.sh", "--check"],
        cwd=ROOT,
        env={"HELM": str(helm.program), "HOME": str(helm.home), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_check_shows_a_changed_and_a_superfluous_file(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chart = tmp_path / "charts" / "prebook"
    monkeypatch.setattr(generator, "ROOT", tmp_path)
    monkeypatch.setattr(generator, "CHART", chart)
    generator.write(generator.generated())
    assert generator.check(generator.generated()) == 0

    rights = chart / "templates" / "_rbac.tpl"
    rights.write_text(rights.read_text().replace("verbs: [get, create]", "verbs: ['*']"))
    (chart / "templates" / "crds" / "old.yaml").write_text("kind: CustomResourceDefinition\n")
    assert generator.check(generator.generated()) == 1
    shown = capsys.readouterr().out
    assert "-  verbs: ['*']" in shown
    assert "old.yaml" in shown

    generator.write(generator.generated())
    assert generator.check(generator.generated()) == 0


CRD = """\
# a comment
kind: CustomResourceDefinition
metadata:
  name: a.b
  annotations:
    prebook.dev/schema-version: '1'
  labels:
    app.kubernetes.io/component: crd
spec:
  note: "{{ .Values.x }}"
"""


def test_braces_in_a_description_are_not_taken_for_a_template(generator: ModuleType) -> None:
    template = generator.crd_template(CRD)
    assert '  note: "{{ "{{" }} .Values.x }}"\n' in template
    assert "    prebook.dev/schema-version: '1'\n" in template


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("CustomResourceDefinition", "ConfigMap", "ConfigMap"),
        ("  labels:\n    app.kubernetes.io/component: crd\n", "  finalizers: [x]\n", "finalizers"),
        ("  labels:\n    app.kubernetes.io/component: crd\n", "  labels: {}\n", None),
    ],
)
def test_metadata_that_would_be_lost_is_refused(generator: ModuleType, old: str, new: str, said: str | None) -> None:
    source = CRD.replace(old, new)
    if said is None:
        assert "name: a.b" in generator.crd_template(source)
        return
    with pytest.raises(ValueError, match=said):
        generator.crd_template(source)


@pytest.mark.parametrize("folder", ["deploy", "deploy/cluster"])
def test_kustomize_gives_a_replaced_image_to_the_operator_and_to_its_init_containers(
    folder: str, tmp_path: Path
) -> None:
    text = (ROOT / folder / "kustomization.yaml").read_text()
    require_binaries("kubectl")
    (tmp_path / "kustomization.yaml").write_text(text.replace("newTag: 0.1.0", "newName: r.example/p\n    newTag: x"))
    (tmp_path / "install.yaml").write_text((ROOT / folder / "install.yaml").read_text())
    done = subprocess.run(
        [str(locate("kubectl")), "kustomize", str(tmp_path)], capture_output=True, text=True, check=True
    )
    (deployment,) = [d for d in yaml.safe_load_all(done.stdout) if d["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "r.example/p:x"
    assert {"name": "OPERATOR_IMAGE", "value": "r.example/p:x"} in container["env"]


def test_plain_install_carries_nothing_of_helms() -> None:
    for path in (ROOT / "deploy" / "install.yaml", ROOT / "deploy" / "cluster" / "install.yaml"):
        text = path.read_text()
        assert "Helm" not in text
        assert "helm.sh/" not in text
        kinds = [document["kind"] for document in yaml.safe_load_all(text)]
        assert "Deployment" in kinds
        assert "Pod" not in kinds


def test_chart_ships_no_folder_that_helm_never_upgrades() -> None:
    assert not (CHART / "crds").exists()
