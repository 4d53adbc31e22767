"""The image, really built: it holds the operator and the connector, and nothing that an intruder could use."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from tests.chart.helm import CHART, ROOT

TAG = "localhost/prebook:dev"
STORE = ROOT / "build" / "image"


def buildah(*args: str) -> str:
    """buildah's output, on the storage that hack/image.sh uses."""
    command = [
        "buildah",
        "--root",
        str(STORE / "store"),
        "--runroot",
        str(STORE / "run"),
        "--storage-driver",
        "vfs",
        *args,
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.strip()


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """A container of the image, built or found up to date."""
    subprocess.run([ROOT / "hack" / "image.sh"], check=True, timeout=600)
    container = buildah("from", "--pull-never", TAG)
    yield container
    buildah("rm", container)


def run(container: str, *argv: str, volumes: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Runs a program in the container as the image's user."""
    mounts = [part for volume in volumes for part in ("--volume", volume)]
    command = ["buildah", "--root", str(STORE / "store"), "--runroot", str(STORE / "run"), "--storage-driver", "vfs"]
    command += ["run", "--isolation", "chroot", *mounts, container, "--", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_configuration_is_non_root_and_starts_the_operators_program(image: str) -> None:
    config = json.loads(buildah("inspect", "--type", "image", TAG))["OCIv1"]["config"]
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == ["python3", "-m", "prebook_operator.cli.main"]


def test_chart_and_image_agree_on_the_program(image: str) -> None:
    done = run(image, "python3", "-m", "prebook_operator.cli.main", "operator", "--help")
    assert done.returncode == 0, done.stderr
    template = (CHART / "templates" / "deployment.yaml").read_text()
    for flag in re.findall(r"- (--[a-z-]+)", template):
        assert re.search(rf"{flag}\b", done.stdout), f"{flag} is not a flag of the operator"


def test_version_is_the_charts(image: str) -> None:
    done = run(image, "python3", "-m", "prebook_operator.cli.main", "--version")
    assert done.stdout.split() == ["prebook", yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]]


def test_init_container_copies_the_connector_without_vllm(image: str, tmp_path: Path) -> None:
    target = tmp_path / "lib"
    target.mkdir()
    shutil.chown(target, 65532, 65532)
    done = run(image, "python3", "-m", "prebook_connector.install", "/prebook/lib", volumes=[f"{target}:/prebook/lib"])
    assert done.returncode == 0, done.stderr
    assert (target / "prebook_connector" / "connector.py").is_file()
    assert {path.name for path in target.iterdir()} == {"prebook_connector"}


def test_there_is_no_shell_no_package_manager_and_nothing_to_write_to(image: str) -> None:
    mounted = Path(buildah("mount", image))
    try:
        for name in ("sh", "bash", "dash", "busybox", "apt", "apt-get", "dpkg", "pip", "pip3", "curl", "wget"):
            assert not [path for path in (mounted / "bin", mounted / "usr/bin") if (path / name).exists()], name
        assert not list(mounted.glob("usr/lib/python3*/**/pip/__init__.py"))
    finally:
        buildah("umount", image)
    script = (
        "import os; print(os.getuid(), [d for d in ('/', '/opt/prebook', '/etc', '/usr') if os.access(d, os.W_OK)])"
    )
    done = run(image, "python3", "-c", script)
    assert (done.returncode, done.stdout.strip()) == (0, "65532 []"), done.stderr
