"""Leader election against a lease that behaves like the API server's, on clocks that never agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prebook_operator.kube.client import KubeClient
from prebook_operator.kube.election import Election, LeaseSettings
from prebook_operator.kube.errors import RetryLater
from prebook_operator.kube.transport import Request, Response
from tests.unit.fake_api import FakeServer


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Candidate:
    """One process with a clock of its own."""

    def __init__(self, server: FakeServer, name: str, start: float) -> None:
        self.clock = Clock(start)
        self.cut_off = False
        self.changes: list[bool] = []
        candidate = self

        class Link:
            async def send(self, request: Request) -> Response:
                if candidate.cut_off:
                    raise RetryLater("cut off")
                return await server.send(request)

            async def close(self) -> None:
                return

        settings = LeaseSettings(namespace="ns", identity=name, duration=15, margin=5, period=2)
        self.election = Election(
            KubeClient(Link(), clock=self.clock), settings, on_change=self.changes.append, clock=self.clock
        )


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


async def step(*candidates: Candidate, seconds: float = 2.0) -> None:
    for candidate in candidates:
        candidate.clock.now += seconds
        await candidate.election.step()


async def test_the_first_leads_and_the_second_waits(server: FakeServer) -> None:
    first, second = Candidate(server, "first", 0.0), Candidate(server, "second", 1e6)
    for _ in range(20):
        await step(first, second)
    assert first.election.leading
    assert not second.election.leading
    assert first.changes == [True]


async def test_a_candidate_looks_more_often_than_the_leader_renews(server: FakeServer) -> None:
    first, second = Candidate(server, "first", 0.0), Candidate(server, "second", 0.0)
    await step(first, second)
    assert (first.election.pause, second.election.pause) == (2.0, 1.0)


async def test_a_release_hands_over_at_once(server: FakeServer) -> None:
    first, second = Candidate(server, "first", 0.0), Candidate(server, "second", 0.0)
    await step(first, second)
    await first.election.release()
    assert not first.election.leading
    await step(second)
    assert second.election.leading


async def test_a_leader_that_is_cut_off_stops_before_another_may_start(server: FakeServer) -> None:
    first, second = Candidate(server, "first", 0.0), Candidate(server, "second", 5e3)
    await step(first, second)
    first.cut_off = True
    stopped = started = None
    for tick in range(40):
        await step(first, second, seconds=1.0)
        if stopped is None and not first.election.leading:
            stopped = tick
        if started is None and second.election.leading:
            started = tick
    assert stopped is not None
    assert started is not None
    assert stopped < started


async def test_remaining_counts_from_before_the_renewal_was_sent(server: FakeServer) -> None:
    first = Candidate(server, "first", 0.0)
    await step(first)
    assert first.election.remaining() == 10.0
    first.clock.now += 4.0
    assert first.election.remaining() == 6.0


async def test_a_lease_that_vanished_is_made_again(server: FakeServer) -> None:
    first = Candidate(server, "first", 0.0)
    await step(first)
    server.objects.clear()
    await step(first)
    await step(first)
    assert first.election.leading


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from(["step", "cut", "mend", "release"])), max_size=60
    )
)
async def test_never_two_leaders(script: list[tuple[str, str]]) -> None:
    """Whatever order candidates act in, and whoever is cut off: at no moment do two of them think that they may
    write."""
    server = FakeServer()
    everyone = {name: Candidate(server, name, 1000.0 * index) for index, name in enumerate("abc")}
    for name, what in script:
        actor = everyone[name]
        for candidate in everyone.values():
            candidate.clock.now += 1.0
        if what == "step":
            await actor.election.step()
        elif what == "release":
            await actor.election.release()
        else:
            actor.cut_off = what == "cut"
        leaders = [one for one in everyone.values() if one.election.leading]
        assert len(leaders) <= 1


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="duration - margin"):
        LeaseSettings(namespace="ns", identity="x", duration=10, margin=9, period=2)
