"""Counts and timings of one process, and the table of everything that is exported. Pure; ``metrics`` talks to vLLM.

Two consumers: the control socket wants totals since start (``totals``), vLLM's stats want what came since the last
call (``take``). Workers record from the transfer thread while the engine's thread takes, hence the lock.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

SEPARATOR = "|"
MAX_SAMPLES = 10_000
"""Samples kept between two calls of ``take``; more are counted as ``dropped_samples``."""


@dataclass(frozen=True)
class CounterSpec:
    """One exported counter: its documentation and label names."""

    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class HistogramSpec:
    """One exported histogram: documentation and bucket bounds."""

    help: str
    buckets: tuple[float, ...]


GAUGES: dict[str, str] = {
    "booked_blocks": "KV blocks that decode has booked with prefill",
    "quarantined_blocks": "Booked blocks that nobody wants and prefill has not yet declared quiet",
    "open_pushes": "Transfers that prefill has not ended",
    "queue_depth": "Calls that wait for the transfer thread",
    "peers_attached": "Peer engines that notifications can be sent to",
}

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

COUNTERS: dict[str, CounterSpec] = {
    "transfers": CounterSpec("Transfers that ended, by outcome (committed, or the reason why not)", ("outcome",)),
    "pushed_bytes": CounterSpec("Bytes of KV written into decode's blocks"),
    "pushed_blocks": CounterSpec("KV blocks written into decode's blocks"),
    "writes": CounterSpec("WRITEs posted"),
    "descriptors": CounterSpec("Descriptors in posted WRITEs, before the transport merges adjacent ones"),
    "post_failures": CounterSpec("WRITEs that the transport refused"),
    "preemptions": CounterSpec("Prefills that were preempted while a transfer was open"),
    "kept_blocks": CounterSpec("Blocks that decode kept of transfers that failed half way"),
    "late_registrations": CounterSpec("Registrations refused at once, by reason", ("reason",)),
    "late_commits": CounterSpec("Commits of transfers that decode no longer has"),
    "duplicate_transfer_ids": CounterSpec("Requests that named a transfer id that was in use"),
    "checksum_mismatches": CounterSpec("Transfers whose KV differed on the two sides"),
    "handshakes": CounterSpec("Handshakes by result", ("result",)),
    "peers_dropped": CounterSpec("Peer engines that were replaced or disappeared"),
    "notifications_failed": CounterSpec("Notifications that the transport refused"),
    "bad_messages": CounterSpec("Notifications that could not be used, by kind", ("kind",)),
    "bad_params": CounterSpec("Requests whose kv_transfer_params could not be used, by reason", ("reason",)),
    "thread_errors": CounterSpec("Unexpected errors on the transfer thread, by call", ("call",)),
    "fence_timeouts": CounterSpec("Preemption fences that passed with WRITEs still open"),
    "dropped_samples": CounterSpec("Timing samples dropped because nobody collected them"),
}
HISTOGRAMS: dict[str, HistogramSpec] = {
    "registration_lead_seconds": HistogramSpec(
        "Registration arrival before the end of prefill; positive: booked before the payload existed",
        (-1.0, -0.1, -0.01, 0.0, *_SECONDS),
    ),
    "exposed_transfer_seconds": HistogramSpec("Last block settled to commit sent, on prefill's clock", _SECONDS),
    "booking_seconds": HistogramSpec("Blocks booked to KV complete, on decode", _SECONDS),
    "overlap_ratio": HistogramSpec(
        "Share of a transfer's bytes that was done before prefill finished", tuple(i / 10 for i in range(11))
    ),
    "post_seconds": HistogramSpec("Time to post one WRITE", _SECONDS),
    "handshake_seconds": HistogramSpec("Duration of successful handshakes", _SECONDS),
}


def key(name: str, labels: tuple[str, ...]) -> str:
    """One string for a counter and its label values."""
    return SEPARATOR.join((name, *labels))


class MemoryRecorder:
    """A thread-safe :class:`prebook_connector.ports.Recorder`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, float] = defaultdict(float)
        self._counts: dict[str, float] = defaultdict(float)
        self._samples: dict[str, list[float]] = defaultdict(list)
        self._gauges: dict[str, float] = {}
        self._told: dict[str, float] = {}
        self._news = False

    def count(self, name: str, labels: tuple[str, ...] = (), by: float = 1.0) -> None:
        """Adds ``by`` to a counter of :data:`COUNTERS`."""
        if len(labels) != len(COUNTERS[name].labels):
            raise ValueError(f"counter {name} has labels {COUNTERS[name].labels}, not {labels}")
        with self._lock:
            self._totals[key(name, labels)] += by
            self._counts[key(name, labels)] += by
            self._news = True

    def observe(self, name: str, value: float) -> None:
        """Adds a sample to a histogram of :data:`HISTOGRAMS`."""
        if name not in HISTOGRAMS:
            raise ValueError(f"no histogram {name}")
        with self._lock:
            if len(self._samples[name]) < MAX_SAMPLES:
                self._samples[name].append(value)
            else:
                self._counts["dropped_samples"] += 1
                self._totals["dropped_samples"] += 1
            self._news = True

    def gauge(self, name: str, value: float) -> None:
        """Sets a gauge of :data:`GAUGES`."""
        if name not in GAUGES:
            raise ValueError(f"no gauge {name}")
        with self._lock:
            self._gauges[name] = value
            self._news = True

    def totals(self) -> dict[str, float]:
        """Counters since start, keyed ``name|label``."""
        with self._lock:
            return dict(self._totals)

    def take(self) -> dict[str, Any] | None:
        """What came since the last call, None when nothing did."""
        if not self._news:  # nearly every step
            return None
        with self._lock:
            self._news = False
            changed = {name: value for name, value in self._gauges.items() if self._told.get(name) != value}
            if not self._counts and not self._samples and not changed:
                return None
            taken = {"counts": dict(self._counts), "samples": dict(self._samples), "gauges": changed}
            self._told.update(changed)
            self._counts.clear()
            self._samples.clear()
            return taken
