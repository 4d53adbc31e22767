"""The peer table under any order of discovery, polls, pairs and legs."""

from __future__ import annotations

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prebook_connector.dispatch.identity import Identity, Load, SideChannel
from prebook_connector.dispatch.peertable import Gone, Pair, PeerState, PeerTable, PollFailure
from prebook_connector.dispatch.reasons import Failure
from prebook_connector.dispatch.settings import Mode, Role

ADDRESSES = ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]


def engine(name: str, *, draining: bool = False, tokens: int = 0, revision: str = "r1") -> Identity:
    return Identity(version=1, role=Role.PREFILL, engine_id=name, mode=Mode.PREBOOK, tp_size=1, pp_size=1, dp_size=1,
                    side_channel=SideChannel(host="10.0.0.1", port=5600), draining=draining, revision=revision,
                    load=Load(legs=1, tokens=tokens))  # fmt: skip


def fits(identity: Identity, address: str) -> str | None:
    return None if identity.revision == "r1" else "another revision"


def table(*, needs_pair: bool = True) -> PeerTable:
    made = PeerTable(needs_pair=needs_pair, lost_after=5.0, fits=fits)
    made.resolved(ADDRESSES[:1], now=0)
    return made


READY = Pair("ready")


def test_a_peer_becomes_ready_step_by_step() -> None:
    made, address = table(), ADDRESSES[0]
    assert made.state(made.peers()[0]) is PeerState.UNKNOWN
    made.answered(address, engine("a"), now=1)
    assert made.state(made.peers()[0]) is PeerState.CONNECTING
    made.paired({"a": READY}, now=2)
    assert made.state(made.peers()[0]) is PeerState.READY
    assert made.count() == (1, 1)
    made.answered(address, engine("a", draining=True), now=3)
    assert made.ready(now=3) == []
    assert made.state(made.peers()[0]) is PeerState.DRAINING


def test_stock_modes_need_no_pair() -> None:
    made = table(needs_pair=False)
    made.answered(ADDRESSES[0], engine("a"), now=1)
    assert made.count() == (1, 1)


def test_restart_is_noticed_at_once_and_needs_a_new_pair() -> None:
    made, address = table(), ADDRESSES[0]
    made.answered(address, engine("a"), now=1)
    made.paired({"a": READY}, now=1)
    made.began(address, 100)
    assert made.answered(address, engine("b"), now=2) == [Gone("a", Failure.PEER_REPLACED)]
    assert made.count() == (0, 1)
    assert made.peers()[0].in_flight_tokens == 0
    made.computed(address, "a", 100)
    made.ended(address, "a")
    assert made.peers()[0].in_flight == 0, "the end of an old leg does not count against the new engine"


def test_time_outs_lose_a_peer_slowly_and_refusals_at_once() -> None:
    made, address = table(), ADDRESSES[0]
    made.answered(address, engine("a"), now=0)
    assert made.failed(address, PollFailure.TIMEOUT, "", now=1) == []
    assert made.failed(address, PollFailure.TIMEOUT, "", now=5.9) == []
    assert made.failed(address, PollFailure.TIMEOUT, "", now=6.1) == [Gone("a", Failure.PEER_LOST)]
    assert made.failed(address, PollFailure.TIMEOUT, "", now=9) == [], "told once"
    assert made.answered(address, engine("a"), now=10) == []
    assert made.failed(address, PollFailure.REFUSED, "", now=11) == [Gone("a", Failure.PEER_LOST)]
    assert made.desired() == []


def test_wrong_revision_never_pairs() -> None:
    made, address = table(needs_pair=False), ADDRESSES[0]
    made.answered(address, engine("a", revision="r2"), now=1)
    assert made.ready(now=1) == []
    assert made.desired() == []
    assert made.state(made.peers()[0]) is PeerState.INCOMPATIBLE
    made.answered(address, engine("c"), now=2)
    assert made.count() == (1, 1)


def test_unlisted_peer_takes_nothing_new_but_finishes() -> None:
    made, address = table(needs_pair=False), ADDRESSES[0]
    made.answered(address, engine("a"), now=1)
    made.began(address, 10)
    made.resolved([], now=2)
    assert made.ready(now=2) == []
    assert [peer.address for peer in made.desired()] == [address], "its transfers still need the pair"
    made.computed(address, "a", 10)
    assert made.desired() != [], "the transfer is not over with the computation"
    made.ended(address, "a")
    assert made.peers() == []


def test_pair_that_fails_loses_its_work() -> None:
    made, address = table(), ADDRESSES[0]
    made.answered(address, engine("a"), now=1)
    assert made.paired({"a": Pair("failed", "no route")}, now=1) == []
    made.paired({"a": READY}, now=2)
    assert made.paired({"a": Pair("failed", "no heartbeat")}, now=3) == [Gone("a", Failure.QUARANTINED)]
    assert made.paired({}, now=4) == []


def test_reported_load_leaves_out_what_came_from_here() -> None:
    made, address = table(), ADDRESSES[0]
    made.answered(address, engine("a"), now=1)
    made.began(address, 300)
    made.answered(address, engine("a", tokens=1000), now=2)
    peer = made.peers()[0]
    assert (peer.load_others, peer.score) == (700, 1000)


def test_a_silent_peer_stays_desired_until_it_is_known_to_be_dead() -> None:
    """What decode booked with it must stay booked: it may come back in the middle of a write."""
    made, address = table(), ADDRESSES[0]
    made.resolved([address], now=0)
    made.answered(address, engine("a"), now=0)
    made.failed(address, PollFailure.TIMEOUT, "", now=1)
    assert made.failed(address, PollFailure.TIMEOUT, "", now=7) == [Gone("a", Failure.PEER_LOST)]
    assert [peer.address for peer in made.desired()] == [address]
    made.failed(address, PollFailure.REFUSED, "", now=8)
    assert made.desired() == []


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order: no load goes negative, and nothing unfit is ever offered."""

    def __init__(self) -> None:
        super().__init__()
        self.made = PeerTable(needs_pair=True, lost_after=5.0, fits=fits)
        self.now = 0.0
        self.listed: set[str] = set()
        self.legs: list[tuple[str, str, int]] = []
        self.alive: dict[str, str] = {}

    @rule(which=st.sets(st.sampled_from(ADDRESSES)), step=st.floats(0, 4))
    def resolve(self, which: set[str], step: float) -> None:
        self.now += step
        self.listed = which
        self.made.resolved(which, now=self.now)

    @rule(address=st.sampled_from(ADDRESSES), name=st.sampled_from("abc"), draining=st.booleans(),
          tokens=st.integers(0, 500), revision=st.sampled_from(["r1", "r1", "r2"]))  # fmt: skip
    def answer(self, address: str, name: str, draining: bool, tokens: int, revision: str) -> None:
        known = self.made.get(address)
        identity = engine(f"{address}-{name}", draining=draining, tokens=tokens, revision=revision)
        gone = self.made.answered(address, identity, now=self.now)
        if known is None:
            assert gone == []
            return
        before = self.alive.get(address)
        expected = before is not None and before != identity.engine_id
        assert bool(gone) == expected, "exactly the engine that was there is announced as gone"
        self.alive[address] = identity.engine_id

    @rule(address=st.sampled_from(ADDRESSES), how=st.sampled_from(PollFailure), step=st.floats(0, 4))
    def fail(self, address: str, how: PollFailure, step: float) -> None:
        self.now += step
        gone = self.made.failed(address, how, "x", now=self.now)
        for item in gone:
            assert self.alive.pop(address) == item.engine_id

    @rule(address=st.sampled_from(ADDRESSES), name=st.sampled_from("abc"), state=st.sampled_from(["ready", "failed"]))
    def pair(self, address: str, name: str, state: str) -> None:
        self.made.paired({f"{address}-{name}": Pair(state)}, now=self.now)

    @rule(tokens=st.integers(1, 900))
    def leg(self, tokens: int) -> None:
        for peer in self.made.ready(now=self.now):
            assert peer.identity is not None
            self.made.began(peer.address, tokens)
            self.legs.append((peer.address, peer.identity.engine_id, tokens))

    @rule()
    def end_all(self) -> None:
        for address, engine_id, tokens in self.legs:
            self.made.computed(address, engine_id, tokens)
            self.made.ended(address, engine_id)
        self.legs.clear()
        assert all(peer.in_flight == 0 and peer.in_flight_tokens == 0 for peer in self.made.peers())

    @invariant()
    def offers_are_sound(self) -> None:
        for peer in self.made.peers():
            assert peer.in_flight >= 0
            assert peer.in_flight_tokens >= 0
            assert peer.load_others >= 0
        for peer in self.made.ready(now=self.now):
            assert peer.identity is not None
            assert peer.identity.revision == "r1"
            assert not peer.identity.draining
            assert peer.address in self.listed
        known = {peer.address for peer in self.made.peers()}
        assert self.listed <= known, "a listed address is never forgotten"
        ready, possible = self.made.count()
        assert ready <= possible == len(self.listed)

    @invariant()
    def forgotten_addresses_are_not_alive(self) -> None:
        known = {peer.address for peer in self.made.peers()}
        self.alive = {address: name for address, name in self.alive.items() if address in known}


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)
