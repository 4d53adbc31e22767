"""Calls Helm, and looks at what it renders."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent.parent
CHART = ROOT / "charts" / "prebook"


class HelmFailed(Exception):
    """Helm ended with an error; the text is what it said."""


@dataclass(frozen=True)
class Helm:
    """One Helm program with a folder of its own, so that nothing of the user's is read or written."""

    program: Path
    home: Path

    def run(self, *args: str) -> str:
        """Helm's standard output; raises HelmFailed with its standard error."""
        done = subprocess.run(
            [str(self.program), *args],
            env={"HOME": str(self.home), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode:
            raise HelmFailed(done.stderr + done.stdout)
        return done.stdout

    def template(self, *settings: str, release: str = "prebook", namespace: str = "prebook-system") -> list[Manifest]:
        """What the chart renders with `settings` (the right sides of --set-json), hooks included."""
        text = self.run("template", release, str(CHART), "--namespace", namespace, *flags(settings))
        # The C loader: the pure Python one takes seconds for the CRDs.
        return [document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document]


def flags(settings: Sequence[str]) -> list[str]:
    """`--set-json` flags."""
    return [flag for setting in settings for flag in ("--set-json", setting)]


def of_kind(manifests: Sequence[Manifest], kind: str) -> list[Manifest]:
    """Those of one kind, in order."""
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def only(manifests: Sequence[Manifest], kind: str) -> Manifest:
    """The one manifest of a kind; raises ValueError when there is not exactly one."""
    (manifest,) = of_kind(manifests, kind)
    return manifest


def pods(manifests: Sequence[Manifest]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and pod spec of everything that makes a pod."""
    for manifest in manifests:
        if manifest["kind"] == "Pod":
            yield manifest["metadata"]["name"], manifest["spec"]
        elif "template" in manifest.get("spec", {}):
            yield manifest["metadata"]["name"], manifest["spec"]["template"]["spec"]
