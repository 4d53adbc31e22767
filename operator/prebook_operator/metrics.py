"""Prometheus metrics of the operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prebook_operator.cache import Cache

WRITES: Final = frozenset({"apply", "create", "delete", "update"})


class Metrics:
    """One registry per process object, so that tests may have several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "prebook_api_requests",
            "Requests to the API server by verb, resource and status code",
            ("verb", "resource", "code"),
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "prebook_api_request_seconds",
            "Duration of requests to the API server",
            ("verb",),
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15),
            registry=self.registry,
        )
        self.reconciles = Counter(
            "prebook_reconciliations", "Reconciliations by result", ("result",), registry=self.registry
        )
        self.reconcile_seconds = Histogram(
            "prebook_reconciliation_seconds",
            "Duration of reconciliations",
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15),
            registry=self.registry,
        )
        self.leader = Gauge("prebook_leader", "1 while this process holds the leader lease", registry=self.registry)
        self.watch_restarts = Counter(
            "prebook_watch_restarts", "How often the watch had to be started again", registry=self.registry
        )

    def observe_request(self, verb: str, plural: str, code: str, seconds: float) -> None:
        """The client's observer."""
        self.requests.labels(verb, plural, code).inc()
        self.request_seconds.labels(verb).observe(seconds)

    def watch_state(self, cache: Cache, depth: Callable[[], int]) -> None:
        """Adds gauges that are computed when they are read."""
        self.registry.register(_StateCollector(cache, depth))

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


class _StateCollector(Collector):
    def __init__(self, cache: Cache, depth: Callable[[], int]) -> None:
        self._cache = cache
        self._depth = depth

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client."""
        models = GaugeMetricFamily("prebook_models", "Models by their Ready condition", labels=("ready", "reason"))
        counts: dict[tuple[str, str], int] = {}
        for record in self._cache.models.values():
            conditions = record.parsed_status().get("conditions") or ()
            ready: dict[str, str] = next((one for one in conditions if one.get("type") == "Ready"), {})
            place = (ready.get("status", "Unknown"), ready.get("reason", ""))
            counts[place] = counts.get(place, 0) + 1
        for (status, reason), count in sorted(counts.items()):
            models.add_metric((status, reason), count)
        yield models
        yield GaugeMetricFamily("prebook_queue_depth", "Models that wait for a worker", value=self._depth())
        yield GaugeMetricFamily(
            "prebook_cached_objects", "Objects that the operator remembers", value=self._cache.objects()
        )
