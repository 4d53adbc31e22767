"""The image's requirements are what the tests ran with: the same pins as constraints.txt, all hashed, none missing."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = ("hack/image-requirements.txt", "hack/image-build-requirements.txt")
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", re.MULTILINE)


def pins(name: str) -> dict[str, str]:
    """Version by package of a requirements file."""
    return dict(PIN.findall((ROOT / name).read_text()))


@pytest.mark.parametrize("name", FILES)
def test_pins_are_those_of_the_constraints(name: str) -> None:
    image, tested = pins(name), pins("constraints.txt")
    assert image
    assert {name: version for name, version in image.items() if tested.get(name) != version} == {}


@pytest.mark.parametrize("name", FILES)
def test_every_pin_has_a_hash(name: str) -> None:
    entries = re.split(r"\n(?=\S)", (ROOT / name).read_text().strip())
    assert len(entries) == len(pins(name))
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_every_dependency_of_the_operator_and_of_its_build_is_pinned() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, build = document["project"], document["build-system"]
    wanted = project["dependencies"] + project["optional-dependencies"]["operator"]
    names = {re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower() for requirement in wanted}
    assert names <= set(pins(FILES[0]))
    assert {name.split(">=")[0] for name in build["requires"]} <= set(pins(FILES[1]))
