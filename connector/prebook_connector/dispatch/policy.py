"""Where a prompt is computed, and what follows when that goes wrong. Pure and total: same input, same answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prebook_connector.dispatch.bodies import Facts
from prebook_connector.dispatch.peertable import Peer
from prebook_connector.dispatch.reasons import Failure, LocalReason, Refusal
from prebook_connector.dispatch.settings import Mode


@dataclass(frozen=True)
class Local:
    """Decode computes the prompt."""

    reason: LocalReason


@dataclass(frozen=True)
class Remote:
    """A prefill peer computes it; ``rank`` is the peer's data-parallel rank."""

    peer: Peer
    rank: int


@dataclass(frozen=True)
class Refuse:
    """The client gets an error from the dispatcher."""

    refusal: Refusal


@dataclass(frozen=True)
class Wait:
    """Nothing to start: the decode leg goes on, the connector was told and makes it recompute (or fail) in place."""


@dataclass(frozen=True)
class Relay:
    """A prefill peer computes the prompt and the one token that is asked for; decode has no part in it."""

    peer: Peer
    rank: int


Plan = Local | Remote | Relay | Refuse


@dataclass(frozen=True)
class Rules:
    """The settings that decisions depend on."""

    mode: Mode
    recompute: bool
    local_prefill_max_tokens: int
    max_retries: int
    prefill_opens: bool = False


def decide(
    facts: Facts, *, rules: Rules, ready: Sequence[Peer], draining: bool, wanted: str | None, counter: int
) -> Plan:
    """The first plan for a request.

    ``ready`` are the peers that can take a leg; ``wanted`` is the address in ``x-prefiller-host-port``; ``counter``
    grows with every request and spreads legs over a peer's data-parallel ranks.
    """
    if facts.local is not None:
        return Local(facts.local)
    if draining:
        return Local(LocalReason.DRAINING)
    if facts.tokens <= rules.local_prefill_max_tokens:
        return Local(LocalReason.SHORT_PROMPT)
    if not ready:
        return Local(LocalReason.NO_READY_PEER) if rules.recompute else Refuse(Refusal.NO_READY_PEER)
    peer = next((peer for peer in ready if peer.address == wanted), None) or least_loaded(ready)
    way = Relay if rules.prefill_opens and facts.single else Remote
    return way(peer, rank=counter % _dp_size(peer))


def least_loaded(ready: Sequence[Peer]) -> Peer:
    """The peer behind whose work a new leg waits the least; ties go to the one picked longest ago, then by address."""
    return min(ready, key=lambda peer: (peer.score, peer.picked, peer.address))


def _dp_size(peer: Peer) -> int:
    return peer.identity.dp_size if peer.identity is not None else 1


_UNREACHABLE = frozenset(
    {
        Failure.CONNECT,
        Failure.RESET,
        Failure.PEER_LOST,
        Failure.PEER_REPLACED,
        Failure.QUARANTINED,
        Failure.TRANSFER_DEADLINE,
        Failure.PREFILL_DEADLINE,
    }
)
"""The peer is silent: its connector may never acknowledge, so the decode leg must not be waited for."""

_NO_OTHER_PEER = frozenset({Failure.CLIENT_ERROR, Failure.DECODE_ERROR})
"""Another prefill peer would not help."""


def after_failure(
    failure: Failure, *, rules: Rules, ready: Sequence[Peer], attempts: int, told: bool, counter: int
) -> Plan | Wait:
    """What follows a remote attempt that failed before the first byte of its answer.

    ``ready`` excludes every peer already tried; ``attempts`` counts remote attempts so far (at least one); ``told``:
    the connector of this pod took note of the failure, so it ends the old decode leg's wait by itself.

    A silent peer is never waited for: a fresh leg starts at once. A peer that answered with an error has stopped
    writing, so the connector can recompute in place, unless another peer can still do the work.
    """
    if failure is Failure.FIRST_BYTE_DEADLINE:
        return Refuse(Refusal.FIRST_BYTE_DEADLINE)
    if ready and attempts <= rules.max_retries and failure not in _NO_OTHER_PEER:
        peer = least_loaded(ready)
        return Remote(peer, rank=counter % _dp_size(peer))
    in_place = failure not in _UNREACHABLE and failure is not Failure.DECODE_ERROR
    if rules.mode is Mode.PREBOOK and in_place and told:
        return Wait()
    if rules.recompute or failure is Failure.CLIENT_ERROR:
        # The client's own mistake must be answered in the engine's words, whatever onFailure says.
        return Local(LocalReason.FAILED_OVER)
    return Refuse(Refusal.PREFILL_FAILED)


def starts_together(mode: Mode) -> bool:
    """Whether both legs start at the same moment. Pull needs prefill's answer before decode can begin."""
    return mode is not Mode.NIXL_PULL
