"""What the repository promises about itself: its pins, its source roots, and documentation without dead ends."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PIN = re.compile(r"^(?P<name>[a-z0-9][a-z0-9.-]*)==(?P<version>[^\s;]+)(?P<marker>; [^\\]+)? \\$")
HASH = re.compile(r"^    --hash=sha256:[0-9a-f]{64}( \\)?$")
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], key=lambda path: path.relative_to(ROOT).as_posix()
)


def pins() -> dict[str, list[str]]:
    """Pinned versions by name (several where a marker chooses)."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if match := PIN.match(line):
            found.setdefault(match["name"], []).append(match["version"])
    return found


def test_constraints_hold_names_versions_and_hashes_only() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    strange = [line for line in lines if not (line.startswith("# ") or PIN.match(line) or HASH.match(line))]
    assert strange == []


def test_every_dependency_is_pinned_within_its_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    pinned = pins()
    wrong = []
    for requirement in map(Requirement, wanted):
        versions = pinned.get(canonicalize_name(requirement.name), [])
        if not versions or not all(requirement.specifier.contains(Version(v), prereleases=True) for v in versions):
            wrong.append(f"{requirement}: pinned {versions or 'nowhere'}; run `make constraints`")
    assert wrong == []


def test_source_root_does_not_shadow_the_standard_library() -> None:
    assert sorted(path.name for path in (ROOT / "operator").iterdir() if path.name != "__pycache__") == [
        "prebook_operator"
    ]


def test_ci_runs_the_readmes_test_command() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert re.search(r"^exec make test$", script.read_text(), re.MULTILINE)
    assert "make test" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    dead = [
        target
        for target in targets
        if not re.match(r"(https?|mailto):|#", target) and not (document.parent / target.partition("#")[0]).exists()
    ]
    assert dead == []


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = {
        (document.name, target)
        for document in DOCUMENTS
        for target in re.findall(r"(?:`|^\$ )make ([a-z][a-z0-9-]*)", document.read_text(), re.MULTILINE)
    }
    assert {target for _, target in used} >= {"demo", "test"}
    assert {(name, target) for name, target in used if target not in targets} == set()


def test_make_help_lists_the_targets() -> None:
    undocumented = [
        line
        for line in re.findall(r"^[a-z][a-z0-9-]*:.*$", (ROOT / "Makefile").read_text(), re.MULTILINE)
        if "## " not in line
    ]
    assert undocumented == ["helm:"]  # a step of others, not for people


def test_every_decision_is_listed_under_its_title() -> None:
    folder = ROOT / "docs" / "adr"
    titles = [path.read_text().splitlines()[0] for path in sorted(folder.glob("[0-9]*.md"))]
    names = [path.name for path in sorted(folder.glob("[0-9]*.md"))]
    wanted = [f"- [{title.removeprefix('# ')}]({name})" for title, name in zip(titles, names, strict=True)]
    assert [line for line in (folder / "README.md").read_text().splitlines() if line.startswith("- ")] == wanted
    assert [int(title.split()[1].rstrip(".")) for title in titles] == list(range(1, len(titles) + 1))
