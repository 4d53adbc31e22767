"""Settings of the operator process, with the reason for each default."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from prebook_operator.api import NOTHING, Allow


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that the process is told. Durations are seconds."""

    image: str
    """Image of this operator; its init container brings the connector into the engines' pods."""
    namespaces: tuple[str, ...] = ()
    """Watched namespaces; empty means all of them, which needs a ClusterRole."""
    lease_namespace: str = "default"
    """Where the leader lease lives: the operator's own namespace."""
    lease_name: str = "prebook-operator"
    identity: str = field(
        default_factory=lambda: f"{os.environ.get('POD_NAME') or os.uname().nodename}-{uuid.uuid4().hex[:8]}"
    )
    """Unique per process, not per pod: a restarted container must not take itself for its predecessor."""
    own_namespace: str | None = None
    """Namespace of the operator's pods, let in by the models' NetworkPolicies; None outside a cluster."""
    kubeconfig: Path | None = None
    """None: the pod's service account, else the default kubeconfig."""
    allow: Allow = NOTHING
    """What models may ask for beyond the restricted pod template."""

    workers: int = 8
    """Models in work at the same time. The API server's answer takes a few milliseconds; eight keep one core of
    Python busy."""
    debounce: float = 0.25
    """A StatefulSet that starts sends a burst of events; one look after the burst is enough."""
    settle: float = 1.0
    """From the last write to the report: the controllers answer within it, so that creation is reported in one
    write."""
    resync: float = 600.0
    """Events bring everything; this only bounds the damage of a bug. A resync without a difference costs one metadata
    read."""
    pairing: float = 3.0
    """Pods do not send events when they pair, so they are asked while pairs are missing."""
    request_timeout: float = 15.0
    watch_timeout: int = 300
    """The server ends each watch after it; a new one starts from the last version."""
    discovery: float = 60.0
    """How often optional kinds are looked up, such as PodMonitor: two small reads."""
    watch_silence: float = 180.0
    """Bookmarks come every minute. A watch that has been silent for three is dead, whatever its TCP connection says."""

    lease_duration: float = 15.0
    lease_margin: float = 5.0
    lease_period: float = 2.5
    """The usual proportions: a lost leader is replaced within 15 s, and stops writing 5 s before that."""
    lease_look: float = 1.0
    """How often a standby looks whether the lease is free: one small read, for a hand-over within about a second."""
    drain: float = 10.0
    """How long a stopping operator waits for reconciliations that have begun."""

    health_port: int = 8081
    metrics_port: int = 8080
    bind: str = "0.0.0.0"
    pod_port: int = 8000
    """HTTP port of the engines' pods."""
