"""The operator on a cluster: its image built from this checkout, and the chart installed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.kube.controlplane import ControlPlane

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "prebook"
IMAGE = "localhost/prebook:dev"
IMAGE_ARCHIVE = ROOT / "build" / "image" / "prebook.tar"
NAMESPACE = "prebook-system"
RELEASE = "prebook"
# What goes into the image; a newer file than the archive means that the archive is out of date.
IMAGE_SOURCES = (
    "Dockerfile",
    "hack/image.sh",
    "hack/image-requirements.txt",
    "pyproject.toml",
    "operator",
    "connector",
    "bench",
)


def operator_image() -> Path:
    """The archive of the operator's image, built with buildah where it is missing or older than its sources.

    Raises subprocess.CalledProcessError when the build fails; its messages go to this process's error output.
    """
    if not IMAGE_ARCHIVE.exists() or _newest(ROOT / name for name in IMAGE_SOURCES) > IMAGE_ARCHIVE.stat().st_mtime:
        command = ["hack/image.sh", "-t", IMAGE, "-o", str(IMAGE_ARCHIVE.relative_to(ROOT))]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return IMAGE_ARCHIVE


def install_chart(control_plane: ControlPlane, *extra: str) -> str:
    """Install or upgrade the release and wait until the operator is ready; `extra` goes to Helm. Returns its notes."""
    repository, _, tag = IMAGE.partition(":")
    values = {"image.repository": repository, "image.tag": tag, "image.pullPolicy": "Never", "scope": "Cluster"}
    settings = [f"--set={key}={value}" for key, value in values.items()]
    place = ["--namespace", NAMESPACE, "--create-namespace"]
    patience = ["--wait", "--timeout=5m"]
    return control_plane.helm(
        "upgrade", "--install", RELEASE, str(CHART), *place, *settings, *patience, *extra, seconds=360
    )


def uninstall_chart(control_plane: ControlPlane) -> None:
    """Remove the release; its CRDs stay, as they do for users."""
    control_plane.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", seconds=360)


def _newest(paths: Iterable[Path]) -> float:
    files = (file for path in paths for file in ([path] if path.is_file() else path.rglob("*")))
    return max(file.stat().st_mtime for file in files if file.suffix != ".pyc" and file.is_file())
