"""One self-contained HTML page out of a JSON report: tables, inline SVG plots, the machine and the exact command."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from prebook_bench import plots, svg, tables

_COLOURS = {"pull": svg.PALETTE[0], "push": svg.PALETTE[1], "prebook": svg.PALETTE[2], "aggregated": svg.PALETTE[3]}


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading with a sentence, plots and a table, each of which may be empty."""

    title: str
    text: str = ""
    plots: tuple[Markup, ...] = ()
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def html(report: dict[str, Any]) -> str:
    """The page. Raises ValueError for a kind of report that it does not know."""
    kind = report.get("measurement")
    if kind == "ab":
        title, sections = "Prebook A/B", _ab_sections(report)
    elif kind == "exposed":
        title, sections = "Exposed transfer", _exposed_sections(report)
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
    facts += [(f"rig: {name}", str(value)) for name, value in report.get("rig", {}).items()]
    wanted = ("front", "interleaved", "kv_bytes_per_token", "chunk_tokens", "workload", "slo", "rounds", "seed")
    facts += [(name.replace("_", " "), str(report[name])) for name in wanted if name in report]
    facts.append(("errors", str(len(report.get("errors", [])))))
    return facts


def _exposed_sections(report: dict[str, Any]) -> list[Section]:
    rows = report["summary"]
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    series = [
        plots.Series(
            name=mode,
            colour=_COLOURS.get(mode, svg.INK),
            points=[(row["tokens"], row["exposed_s"] * 1e3) for row in rows if row["mode"] == mode],
        )
        for mode in modes
    ]
    line = {row["tokens"]: row["line_time_s"] for row in rows if row["line_time_s"] is not None}
    if line:
        points = [(tokens, seconds * 1e3) for tokens, seconds in line.items()]
        series.append(plots.Series(name="line time of all KV", colour=svg.FAINT, points=points))
    plot = plots.lines("Exposed transfer by prompt length", series, x_label="prompt tokens", y_label="milliseconds")
    header, cells = tables.exposed_cells(report)
    return [
        Section(
            title="Exposed transfer",
            text="How much later the first token comes than the prefill engine alone could have given it: "
            "median TTFT through the pair minus median bare prefill.",
            plots=(Markup(plot),),
            header=tuple(header),
            rows=tuple(tuple(row) for row in cells),
        )
    ]


def _ab_sections(report: dict[str, Any]) -> list[Section]:
    targets = list(dict.fromkeys(row["target"] for row in report["summary"]))
    rates = list(dict.fromkeys(row["rate"] for row in report["summary"]))
    sections = [_curves(report, targets=targets)] if len(rates) > 1 else []
    for rate in rates:
        header, cells = tables.ab_cells(report, rate=rate)
        pictures = []
        for metric, name in (("ttft", "TTFT"), ("tpot", "TPOT")):
            series = [
                plots.Series(name=target, colour=_colour(target, targets), values=_values(report, target, rate, metric))
                for target in targets
            ]
            pictures.append(Markup(plots.cdf(f"{name} at {rate:g} requests/s", series, unit="milliseconds")))
        sections.append(
            Section(
                title=f"{rate:g} requests per second",
                text="Times in milliseconds, in brackets 95 % bootstrap intervals; a dash: too few requests to say.",
                plots=tuple(pictures),
                header=tuple(header),
                rows=tuple(tuple(row) for row in cells),
            )
        )
    return sections


def _curves(report: dict[str, Any], *, targets: Sequence[str]) -> Section:
    pictures = []
    for metric, figure, name in (
        ("ttft", "p50", "Median TTFT"),
        ("ttft", "p90", "p90 TTFT"),
        ("tpot", "p90", "p90 TPOT"),
    ):
        series = [
            plots.Series(
                name=target,
                colour=_colour(target, targets),
                points=[
                    (row["rate"], row[metric][figure]["value"] * 1e3)
                    for row in report["summary"]
                    if row["target"] == target and row[metric] and row[metric][figure]
                ],
            )
            for target in targets
        ]
        pictures.append(
            Markup(plots.lines(f"{name} by load", series, x_label="requests per second", y_label="milliseconds"))
        )
    return Section(title="Load curves", plots=tuple(pictures))


def _values(report: dict[str, Any], target: str, rate: float, metric: str) -> list[float]:
    return [
        record[metric] * 1e3
        for record in report["records"]
        if record["target"] == target and record["rate"] == rate and record[metric] is not None
    ]


def _colour(target: str, targets: Sequence[str]) -> str:
    return _COLOURS.get(target) or svg.PALETTE[targets.index(target) % len(svg.PALETTE)]
