"""Leases: measured on the holder's clock, from stamps that came back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prebook_connector.leases import PeerClock, heartbeat_interval


def test_no_echo_no_lease() -> None:
    clock = PeerClock(10.0)
    clock.heard(now=100.0, peer_at=5.0, echo=0.0)
    assert not clock.holds(100.0)


def test_a_late_echo_does_not_stretch_the_lease() -> None:
    clock = PeerClock(10.0)
    clock.heard(now=200.0, peer_at=5.0, echo=100.0)  # stamped at 100, arrived at 200
    assert not clock.holds(200.0)


def test_an_echo_from_the_future_is_not_ours() -> None:
    clock = PeerClock(10.0)
    clock.heard(now=100.0, peer_at=5.0, echo=5000.0)
    assert not clock.holds(100.0)


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1),
    st.floats(1.0, 100.0),
)
def test_a_lease_never_outlives_the_newest_echo(messages: list[tuple[float, float, float]], lease: float) -> None:
    clock = PeerClock(lease)
    newest = 0.0
    for now, peer_at, echo in messages:
        clock.heard(now=now, peer_at=peer_at, echo=echo)
        if echo <= now:
            newest = max(newest, echo)
    assert clock.held_until() <= newest + lease


def test_several_heartbeats_fit_into_a_lease() -> None:
    assert heartbeat_interval(30.0, active=True) * 5 < 30.0
    assert heartbeat_interval(30.0, active=False) * 2 < 30.0
