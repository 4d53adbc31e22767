"""The connector's metrics in vLLM's own registry: names ``prebook_*``, labels as vLLM's (engine, model)."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from prebook_connector.recorder import COUNTERS, GAUGES, HISTOGRAMS, SEPARATOR


class PrebookStats(KVConnectorStats):  # type: ignore[misc]
    """``data``: counts by ``name|label`` and samples by name, as ``MemoryRecorder.take`` gives them."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Forgets everything."""
        self.data = {"counts": {}, "samples": {}, "gauges": {}}

    def is_empty(self) -> bool:
        """Whether there is anything to report."""
        return not any(self.data.get(part) for part in ("counts", "samples", "gauges"))

    def aggregate(self, other: KVConnectorStats) -> PrebookStats:
        """Adds another worker's or interval's figures to these."""
        counts = self.data.setdefault("counts", {})
        samples = self.data.setdefault("samples", {})
        for name, value in other.data.get("counts", {}).items():
            counts[name] = counts.get(name, 0.0) + value
        for name, values in other.data.get("samples", {}).items():
            samples[name] = [*samples.get(name, []), *values]
        # The ranks of one engine book alike, and a later interval replaces an earlier one: the last word counts.
        self.data["gauges"] = {**self.data.get("gauges", {}), **other.data.get("gauges", {})}
        return self

    def reduce(self) -> dict[str, int | float]:
        """Sums and medians for vLLM's periodic log line."""
        reduced: dict[str, int | float] = dict(self.data.get("counts", {}))
        for name, values in self.data.get("samples", {}).items():
            reduced[f"{name}_median"] = sorted(values)[len(values) // 2]
        return reduced


class PrebookPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Registers every counter and histogram of ``recorder`` and feeds them."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter_type, histogram_type = metric_types[Counter], metric_types[Histogram]
        self._counters = {
            name: counter_type(name=f"prebook_{name}", documentation=spec.help, labelnames=[*labelnames, *spec.labels])
            for name, spec in COUNTERS.items()
        }
        self._histograms = {
            name: histogram_type(
                name=f"prebook_{name}", documentation=spec.help, buckets=list(spec.buckets), labelnames=labelnames
            )
            for name, spec in HISTOGRAMS.items()
        }
        gauge_type = metric_types[Gauge]
        self._gauges = {
            name: gauge_type(
                name=f"prebook_{name}", documentation=text, labelnames=labelnames, multiprocess_mode="mostrecent"
            )
            for name, text in GAUGES.items()
        }
        for name, spec in COUNTERS.items():
            if not spec.labels:  # shows 0 instead of nothing
                for values in per_engine_labelvalues.values():
                    self._counters[name].labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one interval's figures."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name_and_labels, value in transfer_stats_data.get("counts", {}).items():
            name, *labels = name_and_labels.split(SEPARATOR)
            self._counters[name].labels(*engine, *labels).inc(value)
        for name, values in transfer_stats_data.get("samples", {}).items():
            for sample in values:
                self._histograms[name].labels(*engine).observe(sample)
        for name, value in transfer_stats_data.get("gauges", {}).items():
            self._gauges[name].labels(*engine).set(value)
