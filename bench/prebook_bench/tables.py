"""Plain-text tables of the reports, for the terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell; the first left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for number, row in enumerate([header, *rows]):
        cells = [cell.ljust(w) if not i else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
        if number == 0:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines)


def milliseconds(seconds: float | None) -> str:
    """Whole milliseconds, or a dash."""
    return "-" if seconds is None else f"{seconds * 1e3:.0f}"


def exposed_cells(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the summary of an ``exposed`` report."""
    header = [
        "mode",
        "tokens",
        "n",
        "TTFT ms",
        "bare prefill ms",
        "exposed ms",
        "in request ms",
        "line time ms",
        "to pull",
    ]
    rows = [
        [
            str(row["mode"]),
            str(row["tokens"]),
            str(row["samples"]),
            milliseconds(row["ttft_s"]),
            milliseconds(row["bare_prefill_s"]),
            milliseconds(row["exposed_s"]),
            milliseconds(row["exposed_in_request_s"]),
            milliseconds(row["line_time_s"]),
            "-" if row["exposed_to_pull"] is None else f"{row['exposed_to_pull']:.2f}",
        ]
        for row in report["summary"]
    ]
    return header, rows


def exposed_table(report: dict[str, Any]) -> str:
    """The summary of an ``exposed`` report."""
    return table(*exposed_cells(report))


def ab_cells(report: dict[str, Any], *, rate: float) -> tuple[list[str], list[list[str]]]:
    """Header and rows of an ``ab`` report for one request rate; figures in milliseconds, with 95 % intervals."""
    header = ["target", "answered", "TTFT mean", "TTFT p50", "TTFT p90", "TTFT p99", "TPOT p50", "TPOT p90", "TPOT p99",
              "req/s", "tok/s", "goodput"]  # fmt: skip
    rows = []
    for row in report["summary"]:
        if row["rate"] != rate:
            continue
        cells = [str(row["target"]), f"{row['answered']}/{row['requests']}"]
        for metric, figures in (("ttft", ("mean", "p50", "p90", "p99")), ("tpot", ("p50", "p90", "p99"))):
            cells += [interval((row[metric] or {}).get(figure)) for figure in figures]
        cells += [
            f"{row['requests_per_second']:.2f}",
            f"{row['output_tokens_per_second']:.1f}",
            f"{row['goodput_share']:.0%}",
        ]
        rows.append(cells)
    return header, rows


def ab_table(report: dict[str, Any]) -> str:
    """One table per request rate."""
    rates = list(dict.fromkeys(row["rate"] for row in report["summary"]))
    return "\n\n".join(f"{rate:g} requests/s\n{table(*ab_cells(report, rate=rate))}" for rate in rates)


def interval(value: dict[str, float] | None) -> str:
    """``value [low-high]`` in milliseconds, or a dash when the sample was too small."""
    if value is None:
        return "-"
    return f"{value['value'] * 1e3:.0f} [{value['low'] * 1e3:.0f}-{value['high'] * 1e3:.0f}]"


def idle_table(report: dict[str, Any]) -> str:
    """The summary of an ``idle`` report; cores, so 1.00 is one core kept busy."""
    header = ["pair", "prefill cores", "decode cores", "both", "beyond no connector", "warm-up"]
    rows = [
        [
            str(row["mode"]),
            f"{row['prefill_cores']:.3f}",
            f"{row['decode_cores']:.3f}",
            f"{row['pair_cores']:.3f}",
            "-" if row["beyond_baseline_cores"] is None else f"{row['beyond_baseline_cores']:+.3f}",
            row["warm_up"],
        ]
        for row in report["summary"]
    ]
    return table(header, rows)


def first_table(report: dict[str, Any]) -> str:
    """The summary of a ``first-request`` report."""
    header = ["mode", "fresh pairs", "first ms", "warm median ms", "first to warm", "first failed", "others failed"]
    rows = [
        [
            str(row["mode"]),
            str(row["pairs"]),
            milliseconds(row["first_s"]),
            milliseconds(row["warm_median_s"]),
            "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
            str(row["first_failed"]),
            str(row["warm_failed"]),
        ]
        for row in report["summary"]
    ]
    return table(header, rows)


def short_table(report: dict[str, Any]) -> str:
    """The summary of a ``short-prompts`` report."""
    header = ["tokens", "metric", "starts", "n", "alone ms", "Prebook ms", "ratio", "within noise", "starts differ"]
    rows = [
        [
            str(row["tokens"]),
            row["metric"],
            str(row["starts"]),
            str(row["requests"]),
            f"{row['alone_s'] * 1e3:.2f}",
            f"{row['prebook_s'] * 1e3:.2f}",
            ratio(row["ratio"]),
            "yes" if row["within_noise"] else "no",
            f"{row['starts_differ']:.3f}",
        ]
        for row in report["summary"]
    ]
    return table(header, rows)


def overhead_table(report: dict[str, Any]) -> str:
    """The summary of an ``overhead`` report."""
    header = ["engine", "arm", "starts", "n", "step ms", "to no connector", "starts differ"]
    rows = [
        [
            str(row["role"]),
            str(row["arm"]),
            str(row["starts"]),
            str(row["repeats"]),
            f"{row['step_s'] * 1e3:.2f}",
            ratio(row["to_none"]),
            f"{row['starts_differ']:.3f}",
        ]
        for row in report["summary"]
    ]
    return table(header, rows)


def ratio(value: dict[str, float] | None) -> str:
    """``value [low-high]``, or a dash."""
    return "-" if value is None else f"{value['value']:.3f} [{value['low']:.3f}-{value['high']:.3f}]"
