"""The parts of a report's page: what is said, drawn and tabulated about each kind of figure. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Final

from markupsafe import Markup

from prebook_bench import plots, svg, tables

_COLOURS: Final = {
    "pull": svg.PALETTE[0],
    "push": svg.PALETTE[1],
    "prebook": svg.PALETTE[2],
    "aggregated": svg.PALETTE[3],
    "prebook-first": svg.PALETTE[4],
}
_RATIOS: Final = (
    ("ttft_p50", "TTFT p50"), ("ttft_p90", "TTFT p90"), ("ttft_p99", "TTFT p99"),
    ("tpot_p50", "TPOT p50"), ("tpot_p90", "TPOT p90"), ("tpot_p99", "TPOT p99"), ("e2e_p50", "end to end p50"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading with a sentence, plots and a table, each of which may be empty."""

    title: str
    text: str = ""
    plots: tuple[Markup, ...] = ()
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    #: The table holds words, not figures.
    wordy: bool = False


def exposed_sections(report: dict[str, Any]) -> list[Section]:
    """Exposed transfer and TTFT by prompt length, and what failed."""
    rows = report["summary"]
    modes = list(dict.fromkeys(row["mode"] for row in rows))

    def series(field: str) -> list[plots.Series]:
        return [
            plots.Series(
                name=mode,
                colour=_colour(mode, modes),
                points=[(row["tokens"], row[field] * 1e3) for row in rows if row["mode"] == mode],
            )
            for mode in modes
        ]

    exposed, ttft = series("exposed_s"), series("ttft_s")
    line = {row["tokens"]: row["line_time_s"] for row in rows if row["line_time_s"] is not None}
    if line:
        points = [(tokens, seconds * 1e3) for tokens, seconds in line.items()]
        exposed.append(plots.Series(name="line time of all KV", colour=svg.FAINT, points=points))
    pictures = [
        plots.lines("Exposed transfer by prompt length", exposed, x_label="prompt tokens", y_label="ms"),
        plots.lines("Median TTFT by prompt length", ttft, x_label="prompt tokens", y_label="ms"),
    ]
    header, cells = _told(*tables.exposed_cells(report))
    return [
        Section(
            title="Exposed transfer",
            text="How much later the first token comes than the prefill engine alone could have given it: "
            "median TTFT through the pair minus median bare prefill, one request at a time.",
            plots=tuple(Markup(picture) for picture in pictures),
            header=tuple(header),
            rows=_rows(cells),
        ),
        *_errors(report, of="exposed transfer"),
    ]


def ab_sections(report: dict[str, Any]) -> list[Section]:
    """Ratios, load curves, distributions at each rate, use of the link, and what failed."""
    targets = list(dict.fromkeys(row["target"] for row in report["summary"]))
    rates = list(dict.fromkeys(row["rate"] for row in report["summary"]))
    sections = [_ratios(report, rates=rates)]
    if len(rates) > 1:
        sections.append(_curves(report, targets=targets))
    for rate in rates:
        header, cells = _told(*tables.ab_cells(report, rate=rate))
        pictures = []
        for metric, name in (("ttft", "TTFT"), ("tpot", "TPOT")):
            series = [
                plots.Series(name=target, colour=_colour(target, targets), values=_values(report, target, rate, metric))
                for target in targets
            ]
            pictures.append(Markup(plots.cdf(f"{name} at {rate:g} requests/s", series, unit="ms")))
        sections.append(
            Section(
                title=f"{rate:g} requests per second",
                text="Open-loop Poisson arrivals. Times in milliseconds, in brackets 95 % bootstrap intervals; "
                "percentiles that so few requests cannot carry are left out. Goodput: share of requests within both "
                "objectives.",
                plots=tuple(pictures),
                header=tuple(header),
                rows=_rows(cells),
            )
        )
    return [*sections, *_link(report, targets=targets, rates=rates), *_errors(report, of="the A/B")]


def _ratios(report: dict[str, Any], *, rates: Sequence[float]) -> Section:
    base = report["ratios_to"]
    shown = [
        (key, name) for key, name in _RATIOS
        if any(key in one for of in report["ratios"].values() for one in of.values())
    ]  # fmt: skip
    rows = []
    for rate in rates:
        for target, found in report["ratios"].get(f"{rate:g}", {}).items():
            cells = [f"{found[key]:.2f}" if key in found else "-" for key, _ in shown]
            rows.append([str(target), f"{rate:g}", *cells])
    return Section(
        title=f"How many times faster than {base}",
        text=f"The figure of {base} over the target's own, at the same rate in this run: above 1 the target is faster.",
        header=("target", "requests/s", *(name for _, name in shown)),
        rows=_rows(rows),
    )


def _curves(report: dict[str, Any], *, targets: Sequence[str]) -> Section:
    pictures = []
    for metric, figure, name in (
        ("ttft", "p50", "Median TTFT"),
        ("ttft", "p90", "p90 TTFT"),
        ("tpot", "p50", "Median TPOT"),
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
        if any(one.points for one in series):
            picture = plots.lines(f"{name} by load", series, x_label="requests per second", y_label="ms")
            pictures.append(Markup(picture))
    return Section(title="Load curves", plots=tuple(pictures))


def _link(report: dict[str, Any], *, targets: Sequence[str], rates: Sequence[float]) -> list[Section]:
    uses = report.get("link", [])
    if not uses:
        return []
    pictures = []
    for rate in rates:
        series = [
            plots.Series(
                name=use["target"],
                colour=_colour(use["target"], targets),
                points=[(at, bits / 1e6) for at, bits in use["series"]],
            )
            for use in uses
            if use["rate"] == rate and use["round"] == 0
        ]
        if series:
            title = f"Leaving prefill at {rate:g} requests/s"
            pictures.append(Markup(plots.lanes(title, series, x_label="seconds", y_label="Mbit/s")))
    rows = [
        [
            use["target"],
            f"{use['rate']:g}",
            str(use["round"] + 1),
            f"{use['seconds']:.1f}",
            f"{use['bytes'] / 1e6:.0f}",
            f"{use['mean_bits_per_second'] / 1e6:.0f}",
            f"{use['peak_bits_per_second'] / 1e6:.0f}",
            "-" if use["mean_share"] is None else f"{use['mean_share']:.0%}",
        ]
        for use in uses
    ]
    return [
        Section(
            title="Use of the link",
            text="The kernel's byte counter of prefill's interface, five times a second, in each rate's first round. "
            "It counts KV, and headers and answers too. Peaks above the line's rate are its token bucket.",
            plots=tuple(pictures),
            header=("target", "requests/s", "round", "seconds", "MB", "mean Mbit/s", "peak Mbit/s", "mean of the line"),
            rows=_rows(rows),
        )
    ]


def _errors(report: dict[str, Any], *, of: str) -> list[Section]:
    """Failed requests by target and words: those in the figures, and those before them."""
    counted: dict[tuple[str, str, str], int] = {}
    for row in report["summary"]:
        for said, count in row.get("errors", {}).items():
            key = (str(row["target"]), f"{row['rate']:g} requests/s", said)
            counted[key] = counted.get(key, 0) + count
    for error in report.get("errors", []):
        key = (str(error["target"]), str(error["phase"]), str(error["error"])[:300])
        counted[key] = counted.get(key, 0) + 1
    if not counted:
        return []
    return [
        Section(
            title=f"What failed in {of}",
            wordy=True,
            header=("target", "when", "requests", "what it said"),
            rows=_rows([target, when, str(count), said] for (target, when, said), count in counted.items()),
        )
    ]


def _values(report: dict[str, Any], target: str, rate: float, metric: str) -> list[float]:
    return [
        record[metric] * 1e3
        for record in report["records"]
        if record["target"] == target and record["rate"] == rate and record[metric] is not None
    ]


def _told(header: Sequence[str], cells: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """The table without columns that hold nothing but dashes."""
    kept = [column for column in range(len(header)) if any(row[column] != "-" for row in cells)]
    return [header[column] for column in kept], [[row[column] for column in kept] for row in cells]


def _rows(cells: Iterable[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(row) for row in cells)


def _colour(target: str, targets: Sequence[str]) -> str:
    return _COLOURS.get(target) or svg.PALETTE[targets.index(target) % len(svg.PALETTE)]
