"""Plans are pure and total: properties of the first plan and of what follows a failure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prebook_connector.dispatch import policy
from prebook_connector.dispatch.bodies import Facts
from prebook_connector.dispatch.identity import Identity, SideChannel
from prebook_connector.dispatch.peertable import Peer
from prebook_connector.dispatch.policy import Local, Refuse, Remote, Rules, Wait
from prebook_connector.dispatch.reasons import Failure, LocalReason, Refusal, explain
from prebook_connector.dispatch.settings import Mode, Role


def peer(name: str, *, tokens: int = 0, others: int = 0, picked: int = 0, dp: int = 1) -> Peer:
    identity = Identity(version=1, role=Role.PREFILL, engine_id=f"e-{name}", mode=Mode.PREBOOK, tp_size=1, pp_size=1,
                        dp_size=dp, side_channel=SideChannel(host="10.0.0.1", port=5600))  # fmt: skip
    return Peer(f"{name}:8000", identity=identity, in_flight_tokens=tokens, load_others=others, picked=picked)


peers = st.lists(
    st.builds(peer, st.text("abcdef", min_size=1, max_size=3), tokens=st.integers(0, 999), others=st.integers(0, 999),
              picked=st.integers(0, 99), dp=st.integers(1, 4)),
    max_size=5, unique_by=lambda one: one.address,
)  # fmt: skip
rules = st.builds(Rules, st.sampled_from(Mode), st.booleans(), st.integers(0, 500), st.integers(0, 3))
facts = st.builds(Facts, st.integers(0, 1000), st.booleans(), st.none() | st.sampled_from(LocalReason))


@given(
    facts=facts,
    rules=rules,
    ready=peers,
    draining=st.booleans(),
    wanted=st.none() | st.text("abcdef:80", max_size=8),
    counter=st.integers(0, 1000),
)
def test_first_plan(
    *, facts: Facts, rules: Rules, ready: list[Peer], draining: bool, wanted: str | None, counter: int
) -> None:
    plan = policy.decide(facts, rules=rules, ready=ready, draining=draining, wanted=wanted, counter=counter)
    if facts.local is not None:
        assert plan == Local(facts.local), "what push cannot serve is never remote"
    elif draining:
        assert plan == Local(LocalReason.DRAINING)
    elif facts.tokens <= rules.local_prefill_max_tokens:
        assert plan == Local(LocalReason.SHORT_PROMPT)
    elif not ready:
        assert plan == (Local(LocalReason.NO_READY_PEER) if rules.recompute else Refuse(Refusal.NO_READY_PEER))
    else:
        assert isinstance(plan, Remote)
        assert plan.peer in ready
        assert plan.peer.identity is not None
        assert 0 <= plan.rank < plan.peer.identity.dp_size
        if any(one.address == wanted for one in ready):
            assert plan.peer.address == wanted
        else:
            assert plan.peer.score == min(one.score for one in ready)


@given(
    failure=st.sampled_from(Failure),
    rules=rules,
    ready=peers,
    attempts=st.integers(1, 6),
    told=st.booleans(),
    counter=st.integers(0, 99),
)
def test_after_a_failure(
    *, failure: Failure, rules: Rules, ready: list[Peer], attempts: int, told: bool, counter: int
) -> None:
    plan = policy.after_failure(failure, rules=rules, ready=ready, attempts=attempts, told=told, counter=counter)
    if isinstance(plan, Remote):
        assert plan.peer in ready
        assert attempts <= rules.max_retries, "retries are bounded"
    if isinstance(plan, Wait):
        assert told, "nobody waits for a connector that knows nothing"
        assert rules.mode is Mode.PREBOOK
        assert failure not in (
            Failure.RESET, Failure.CONNECT, Failure.PEER_LOST, Failure.PEER_REPLACED, Failure.QUARANTINED,
            Failure.TRANSFER_DEADLINE, Failure.PREFILL_DEADLINE, Failure.DECODE_ERROR,
        ), "a silent peer is never waited for"  # fmt: skip
    if isinstance(plan, Refuse) and failure is not Failure.FIRST_BYTE_DEADLINE:
        assert not rules.recompute, "with recompute the client never pays with an error"
        assert failure is not Failure.CLIENT_ERROR, "the client's mistake is answered by the engine"
    if isinstance(plan, Local):
        assert plan.reason is LocalReason.FAILED_OVER
    if failure is Failure.FIRST_BYTE_DEADLINE:
        assert isinstance(plan, Refuse)


@given(rules, peers, st.booleans())
def test_every_chain_of_failures_ends(rules: Rules, ready: list[Peer], told: bool) -> None:
    left, attempts = list(ready), 0
    plan: policy.Plan | Wait = policy.decide(Facts(10_000, False), rules=rules, ready=left, draining=False, wanted=None,
                                             counter=0)  # fmt: skip
    while isinstance(plan, Remote):
        attempts += 1
        assert attempts <= rules.max_retries + 1
        left.remove(plan.peer)
        plan = policy.after_failure(Failure.RESET, rules=rules, ready=left, attempts=attempts, told=told, counter=0)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=200), st.integers(2, 5))
def test_least_loaded_balances(prompts: list[int], count: int) -> None:
    """Any two peers differ by at most the largest prompt, as greedy balancing guarantees."""
    table = {f"p{index}:8000": peer(f"p{index}") for index in range(count)}
    for turn, tokens in enumerate(prompts):
        chosen = policy.least_loaded(list(table.values()))
        table[chosen.address] = peer(chosen.address.split(":")[0], tokens=chosen.in_flight_tokens + tokens, picked=turn)
    loads = [one.in_flight_tokens for one in table.values()]
    assert max(loads) - min(loads) <= max(prompts)


def test_every_reason_has_a_sentence() -> None:
    for group in (LocalReason, Failure, Refusal):
        for reason in group:
            assert explain(reason)
