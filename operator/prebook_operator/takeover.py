"""Which revision serves, and which ones go: the simple change of revision.

State is only what is observed: the sets that exist, their counts, the revision that the front Service selects, and
what pods say about pairing. So the step is the same whether the operator has just started or has run for a month. The
sequence for a new revision: its sets come up beside the serving ones, pair, the front Service is pointed at them, the
old ones go. Until then a broken new revision costs nothing, and going back to the serving revision is at once
complete.

Surge and unavailability bounds, partitions and canaries belong to the rollout planner, which will replace `decide`
behind the same types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prebook_operator.api import Reason, Role
from prebook_operator.records import SetCounts


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """What is observed of a model's sets.

    `sets` holds our own StatefulSets that are not being deleted, by (role, revision). `front` is the revision that
    the front Service selects, empty when there is no such Service. `pairs` is the number of handshaken pairs that
    pods of the target revision report. `desired` is what the target asks for, by role."""

    target: str
    front: str
    sets: Mapping[tuple[Role, str], SetCounts]
    desired: Mapping[Role, int]
    pairs: int
    paused: bool = False

    def revisions(self) -> set[str]:
        """Revisions that have any set."""
        return {revision for _, revision in self.sets}

    def ready(self, role: Role, revision: str) -> int:
        """Ready pods of one set; 0 when it does not exist."""
        counts = self.sets.get((role, revision))
        return counts.ready if counts else 0


@dataclass(frozen=True, kw_only=True)
class Step:
    """What to do now. `start`: the target's sets are to exist. `serving`: what the front Service is to select; empty
    when nothing is to run. `retire`: revisions to delete."""

    serving: str
    start: bool
    retire: frozenset[str]
    reason: Reason
    message: str


def decide(fleet: Fleet) -> Step:
    """The next step; total: every observation has one."""
    serving = _serving(fleet)
    if serving in ("", fleet.target):
        return _no_change_of_hands(fleet, serving)
    others = frozenset(fleet.revisions() - {serving, fleet.target})
    if fleet.paused:
        return Step(
            serving=serving,
            start=False,
            retire=others | (frozenset({fleet.target}) & fleet.revisions()),
            reason=Reason.PAUSED,
            message=f"spec.rollout.paused keeps revision {serving}; {fleet.target} waits",
        )
    lacking = _lacking(fleet)
    if lacking and not _better_than_nothing(fleet, serving):
        return Step(
            serving=serving,
            start=True,
            retire=others,
            reason=Reason.ROLLING_OUT,
            message=f"revision {fleet.target} comes up beside {serving}, which serves: {lacking}",
        )
    return Step(
        serving=fleet.target,
        start=True,
        retire=others,
        reason=Reason.ROLLING_OUT,
        message=f"revision {fleet.target} takes over from {serving}",
    )


def _serving(fleet: Fleet) -> str:
    """The revision that serves now; empty when none can.

    It is what the front Service selects. If that Service, or the set behind it, has been deleted by hand, it is the
    revision with most ready decode pods."""
    if (Role.DECODE, fleet.front) in fleet.sets:
        return fleet.front
    candidates = [revision for revision in fleet.revisions() if fleet.ready(Role.DECODE, revision) > 0]
    return max(candidates, key=lambda one: (fleet.ready(Role.DECODE, one), one == fleet.target, one), default="")


def _no_change_of_hands(fleet: Fleet, serving: str) -> Step:
    start = not fleet.paused or bool(serving) or fleet.target in fleet.revisions()
    retire = frozenset(fleet.revisions() - {fleet.target})
    if not start:
        return Step(
            serving="",
            start=False,
            retire=retire,
            reason=Reason.PAUSED,
            message="spec.rollout.paused: nothing is started",
        )
    lacking = _lacking(fleet)
    if lacking:
        return Step(serving=fleet.target, start=True, retire=retire, reason=Reason.STARTING, message=lacking)
    message = f"revision {fleet.target} serves"
    return Step(serving=fleet.target, start=True, retire=retire, reason=Reason.UP_TO_DATE, message=message)


def _lacking(fleet: Fleet) -> str:
    """What the target still lacks; empty when it is complete."""
    for role in Role:
        counts = fleet.sets.get((role, fleet.target))
        wanted = fleet.desired[role]
        if counts is None:
            return f"{role} pods are being created"
        if not counts.current or counts.desired != wanted:
            return f"{role} is being scaled to {wanted}"
        if counts.ready < wanted:
            return f"{counts.ready} of {wanted} {role} pods are ready"
    if all(fleet.desired[role] > 0 for role in Role) and fleet.pairs == 0:
        return "no pair of prefill and decode has shaken hands yet"
    return ""


def _better_than_nothing(fleet: Fleet, serving: str) -> bool:
    """The serving revision has no pod left that answers, and the target has: the way back is never blocked by a
    broken revision (kubernetes#67250)."""
    return fleet.ready(Role.DECODE, serving) == 0 and fleet.ready(Role.DECODE, fleet.target) > 0
