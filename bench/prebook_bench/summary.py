"""Records of a load run as the figures that people compare: percentiles with intervals, goodput, ratios. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from prebook_bench import stats
from prebook_bench.load import Record

_PERCENTILES: Final = (50, 90, 99)
#: Fewer values than this say nothing about a percentile: a p99 of 40 requests is their maximum under another name.
_BEYOND: Final = 1
METRICS: Final = ("ttft", "tpot", "itl", "e2e")


@dataclasses.dataclass(frozen=True)
class Slo:
    """A service level objective for one request, in seconds."""

    ttft: float
    tpot: float

    def met(self, record: Record) -> bool:
        """Whether an answered request was fast enough in both respects."""
        return (
            record.ok
            and record.ttft is not None
            and record.ttft <= self.ttft
            and (record.tpot is None or record.tpot <= self.tpot)
        )


def values_of(records: Sequence[Record], metric: str) -> list[float]:
    """All values of a metric over the answered requests; ITL has one per gap, the others one per request."""
    if metric == "itl":
        return [gap for record in records for gap in record.itl]
    return [value for record in records if (value := getattr(record, metric)) is not None]


def summarise(records: Sequence[Record], *, duration: float, slo: Slo) -> dict[str, Any]:
    """JSON values: counts, throughput over `duration` seconds, goodput, and every metric's mean and percentiles."""
    answered = [record for record in records if record.ok]
    errors: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            errors[record.error] = errors.get(record.error, 0) + 1
    good = sum(slo.met(record) for record in records)
    return {
        "requests": len(records),
        "answered": len(answered),
        "errors": errors,
        "local": sum(record.remote is False for record in answered),
        "requests_per_second": len(answered) / duration,
        "output_tokens_per_second": sum(record.tokens for record in answered) / duration,
        "goodput_per_second": good / duration,
        "goodput_share": good / len(records) if records else 0.0,
        "generator_late_p99_s": stats.percentile([r.late for r in records], p=99) if records else None,
        **{metric: describe(values_of(answered, metric)) for metric in METRICS},
    }


def describe(values: Sequence[float]) -> dict[str, Any] | None:
    """Mean and percentiles with 95 % bootstrap intervals; a percentile that the sample cannot carry is None."""
    if not values:
        return None
    rows: dict[str, Any] = {"n": len(values), "mean": _interval(stats.bootstrap(values, statistic=stats.mean))}
    for p in _PERCENTILES:
        enough = len(values) >= stats.requests_needed(p, beyond=_BEYOND)
        rows[f"p{p}"] = _interval(stats.bootstrap(values, statistic=_at(p), resamples=400)) if enough else None
    return rows


def ratios(rows: Sequence[dict[str, Any]], *, base: str) -> dict[str, dict[str, float]]:
    """For each target of one rate: `base`'s figure over the target's; above 1 the target is better (faster)."""
    reference = next((row for row in rows if row["target"] == base), None)
    if reference is None:
        return {}
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        mine: dict[str, float] = {}
        for metric in ("ttft", "tpot", "e2e"):
            for figure in ("mean", "p50", "p90", "p99"):
                theirs = ((reference[metric] or {}).get(figure) or {}).get("value")
                own = ((row[metric] or {}).get(figure) or {}).get("value")
                if theirs and own:
                    mine[f"{metric}_{figure}"] = theirs / own
        found[row["target"]] = mine
    return found


def _at(p: float) -> Any:
    return lambda values: stats.percentile(values, p=p)


def _interval(interval: stats.Interval) -> dict[str, float]:
    return dataclasses.asdict(interval)
