"""Counters of the dispatcher, in prometheus_client's default registry, which vLLM serves at ``/metrics``.

With several API server processes vLLM switches prometheus_client to its multi-process mode; gauges say how their
per-process values add up.
"""

from __future__ import annotations

from collections import Counter as Tally
from dataclasses import dataclass, field

from prometheus_client import Counter, Gauge, Histogram

from prebook_connector.dispatch.peertable import PeerState
from prebook_connector.dispatch.reasons import Failure, LocalReason, Refusal

_PREFIX = "prebook_dispatch"

REQUESTS = Counter(
    f"{_PREFIX}_requests",
    "Requests by where their prompt was computed, and why when it was not remote.",
    ["path", "reason"],
)
RETRIES = Counter(f"{_PREFIX}_retries", "Prefill legs sent to another peer after one failed, by failure.", ["reason"])
FAILOVERS = Counter(
    f"{_PREFIX}_failovers",
    "Requests that decode took over from a failed prefill, by failure and way.",
    ["reason", "way"],
)
LEG_FAILURES = Counter(f"{_PREFIX}_leg_failures", "Remote attempts that failed before their first byte.", ["reason"])
LEG_SECONDS = Histogram(
    f"{_PREFIX}_prefill_leg_seconds",
    "Time from sending a prefill leg to its answer.",
    ["outcome"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300),
)
FIRST_TOKENS = Counter(
    f"{_PREFIX}_first_tokens",
    "Streams that prefill's token could begin (firstToken: Prefill), by what became of it.",
    ["outcome"],
)
PEERS = Gauge(f"{_PREFIX}_peers", "Peers by state.", ["state"], multiprocess_mode="max")
STRIPPED = Counter(f"{_PREFIX}_stripped_params", "kv_transfer_params that clients sent and that were removed.")
REFUSED = Counter(f"{_PREFIX}_refused", "Requests that the dispatcher answered with an error itself.", ["reason"])
LEGS = Counter(f"{_PREFIX}_accepted_legs", "Prefill legs that this pod accepted.")
POLL_FAILURES = Counter(f"{_PREFIX}_poll_failures", "Identity polls that failed, by kind.", ["kind"])
CONTROL_ERRORS = Counter(f"{_PREFIX}_control_errors", "Requests on the connector's control sockets that failed.")
UNKNOWN_WANTED = Counter(
    f"{_PREFIX}_unknown_prefiller", "Requests whose x-prefiller-host-port named no peer that can take a leg."
)


@dataclass
class Totals:
    """The same numbers for ``/prebook/v1/status``, since this process started."""

    remote: int = 0
    local: Tally[str] = field(default_factory=Tally)
    relayed: int = 0
    failed_over: int = 0
    retried: int = 0

    def count_remote(self) -> None:
        """A request was answered from a remote attempt."""
        self.remote += 1
        REQUESTS.labels("remote", "").inc()

    def count_local(self, reason: LocalReason) -> None:
        """A request is answered by this engine alone."""
        self.local[reason.value] += 1
        REQUESTS.labels("local", reason.value).inc()

    def count_relayed(self) -> None:
        """A request for one token was answered by a prefill pod alone."""
        self.relayed += 1
        REQUESTS.labels("relayed", "").inc()

    def count_refused(self, refusal: Refusal) -> None:
        """A request is answered with the dispatcher's own error."""
        REQUESTS.labels("refused", refusal.value).inc()
        REFUSED.labels(refusal.value).inc()

    def count_retry(self, failure: Failure) -> None:
        """Another prefill peer is tried."""
        self.retried += 1
        RETRIES.labels(failure.value).inc()

    def count_failover(self, failure: Failure, way: str) -> None:
        """Decode takes over: ``fresh`` with a new leg, or ``in_place`` in the leg that waited."""
        self.failed_over += 1
        FAILOVERS.labels(failure.value, way).inc()

    def snapshot(self) -> dict[str, object]:
        """As ``/prebook/v1/status`` shows it."""
        return {
            "remote": self.remote,
            "local": dict(sorted(self.local.items())),
            "relayed": self.relayed,
            "failed_over": self.failed_over,
            "retried": self.retried,
        }


def show_peers(states: list[PeerState]) -> None:
    """Sets the gauge of peers by state."""
    tally = Tally(states)
    for state in PeerState:
        PEERS.labels(state.value).set(tally[state])
