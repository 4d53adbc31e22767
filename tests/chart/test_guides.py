"""What the guides tell people to type and to write down is there, parses and works."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise

import pytest
import yaml

from tests.chart.helm import ROOT, Helm

GUIDES = [ROOT / "docs" / "guide" / f"{name}.md" for name in ("install", "gitops", "upgrade")]


def blocks(language: str) -> list[tuple[str, str]]:
    """The guides' code blocks of one language, each with its guide's name."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [(guide.name, text) for guide in GUIDES for text in pattern.findall(guide.read_text())]


def commands(program: str) -> list[list[str]]:
    """The guides' command lines of one program, split as a shell would; comments are left out."""
    lines = [line for _, text in blocks("console") for line in text.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(f"{program} ")]


@pytest.mark.parametrize(("guide", "text"), blocks("yaml"))
def test_manifests_parse(guide: str, text: str) -> None:
    assert [document for document in yaml.safe_load_all(text) if document], guide


def test_every_file_that_a_command_names_is_there() -> None:
    named = {
        word
        for program in ("helm", "kubectl", "docker", "hack/image.sh")
        for command in commands(program)
        for word in command
        if re.match(r"(charts|deploy|examples|crds|hack)(/|$)", word)
    }
    assert {"charts/prebook", "crds/", "deploy/install.yaml", "deploy/cluster/install.yaml"} <= named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_values_of_the_commands_are_values_of_the_chart(helm: Helm) -> None:
    tried = 0
    for command in commands("helm"):
        if command[1] not in {"install", "upgrade"}:
            continue
        settings = [part for flag, value in pairwise(command) if flag.startswith("--set") for part in (flag, value)]
        assert "kind: Deployment" in helm.run("template", "prebook", str(ROOT / "charts" / "prebook"), *settings)
        tried += bool(settings)
    assert tried >= 2


def test_values_of_the_text_are_values_of_the_chart(helm: Helm) -> None:
    text = "".join(guide.read_text() for guide in GUIDES)
    values = yaml.safe_load(helm.run("show", "values", str(ROOT / "charts" / "prebook")))
    named = set(re.findall(r"[` ]((?:operator|rbac|networkPolicy|metrics|crds|image)\.[a-zA-Z.]+)[`=]", text))
    assert {"operator.allow.hostPath", "rbac.nodeReader", "networkPolicy.metricsFrom"} <= named
    for name in named:
        node = values
        for part in name.split("."):
            assert part in node, name
            node = node[part]
