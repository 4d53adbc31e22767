"""Leases: until when a prefill worker may write into a decode worker's blocks. Pure.

A lease is measured on the *holder's* clock only: P stamps its heartbeats with its own clock, D echoes the stamp, and
P's lease runs from the stamp that came back. Neither clock skew nor a delayed heartbeat can stretch it: a late echo
carries an old stamp. (Measuring on arrival would: a heartbeat that sat in a queue for 20 s would grant 20 s too many.)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PeerClock:
    """What one engine knows of a peer's clock and of its own stamps that came back. Seconds of ``time.monotonic()``."""

    lease_seconds: float
    heard_at: float = 0.0  # own clock when anything of the peer last arrived
    peer_at: float = 0.0  # the peer's newest stamp, to be echoed
    echoed: float = 0.0  # own newest stamp that the peer echoed

    def heard(self, *, now: float, peer_at: float, echo: float) -> None:
        """Takes note of a message with the peer's stamp and an echo of ours.

        An echo from the future of our own clock cannot be ours (a restarted process under the same address): ignored.
        """
        self.heard_at = max(self.heard_at, now)
        self.peer_at = max(self.peer_at, peer_at)
        if echo <= now:
            self.echoed = max(self.echoed, echo)

    def held_until(self) -> float:
        """End of the lease on the own clock; 0.0 when the peer has never echoed."""
        return self.echoed + self.lease_seconds if self.echoed else 0.0

    def holds(self, now: float) -> bool:
        """Whether a WRITE may be posted now."""
        return now < self.held_until()

    def silent_for(self, now: float) -> float:
        """Seconds since the peer was last heard; infinite when never."""
        return now - self.heard_at if self.heard_at else float("inf")


def heartbeat_interval(lease_seconds: float, *, active: bool) -> float:
    """Seconds between heartbeats: a sixth of the lease while transfers are open, a third when idle.

    Several must fit into one lease, or one lost or late heartbeat ends it.
    """
    return lease_seconds / (6.0 if active else 3.0)
