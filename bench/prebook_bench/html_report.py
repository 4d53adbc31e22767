"""One self-contained HTML page out of a JSON report: tables, inline SVG plots, the machine and the exact command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import jinja2

from prebook_bench.html_sections import Section, ab_sections, exposed_sections


def html(report: dict[str, Any]) -> str:
    """The page. Raises ValueError for a kind of report that it does not know."""
    kind = report.get("measurement")
    if kind == "ab":
        title, sections = "Prebook A/B", ab_sections(report)
    elif kind == "exposed":
        title, sections = "Exposed transfer", exposed_sections(report)
    elif kind == "quick":
        title = "Prebook, stock push and pull side by side"
        sections = [*exposed_sections(report["exposed"]), *ab_sections(report["ab"])]
    else:
        raise ValueError(f"no page for a report of kind {kind!r}")
    return _page(report, title=title, sections=sections)


def _page(report: dict[str, Any], *, title: str, sections: Sequence[Section]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("prebook_bench"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    machine = report["machine"]
    return environment.get_template("report.html.j2").render(
        title=title,
        subtitle=f"{machine['time']} on {machine['cores']} cores of {machine['cpu']}",
        sections=sections,
        facts=_facts(report),
        command=shlex.join(machine["command"]),
    )


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    machine = report["machine"]
    facts = [
        ("machine", f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB"),
        ("kernel", f"{machine['kernel']} {machine['architecture']}"),
        ("load at start", str(machine["load_1min_at_start"])),
        ("versions", ", ".join(f"{name} {version}" for name, version in machine["versions"].items())),
    ]
    facts += [(f"rig: {name.replace('_', ' ')}", _plain(value)) for name, value in report.get("rig", {}).items()]
    wanted = (
        "fronts", "model", "interleaved", "batches", "kv_bytes_per_token", "chunk_tokens", "generator", "workload",
        "slo", "rounds", "seed", "seconds",
    )  # fmt: skip
    whole = {**report.get("ab", {}), **report}
    facts += [(name.replace("_", " "), _plain(whole[name])) for name in wanted if name in whole]
    return facts


def _plain(value: Any) -> str:
    """A JSON value in words."""
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_plain(one)}" for key, one in value.items())
    if isinstance(value, list):
        nested = any(isinstance(one, list) for one in value)
        return ("; then " if nested else ", ").join(_plain(one) for one in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return str(value)
