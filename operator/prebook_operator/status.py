"""The report: from a View to the whole status. Pure and total.

kstatus reads three conditions (Ready, Reconciling, Stalled) and `observedGeneration`; people read the messages. Each
condition is one function that returns status, reason and message; `report` adds what they share. A condition's
`lastTransitionTime` moves only when its status does, so an unchanged picture gives an equal status and nothing is
written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from prebook_operator.api import (
    Condition,
    ConditionStatus,
    ConditionType,
    DisaggregatedModelStatus,
    PairStatus,
    Reason,
    Role,
    RoleStatus,
)
from prebook_operator.kube.errors import shorten
from prebook_operator.pod_trouble import PodTrouble, worst
from prebook_operator.view import View

MESSAGE_LIMIT: Final = 1000
TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN


@dataclass(frozen=True)
class Finding:
    """One condition, without time and generation."""

    status: ConditionStatus
    reason: Reason
    message: str


def report(view: View) -> DisaggregatedModelStatus:
    """The status that says what `view` shows."""
    pairs = pair_status(view)
    roles = {role: _role_status(view, role) for role in Role}
    target = view.target or view.previous.get("revision")
    serving = view.serving
    return DisaggregatedModelStatus(
        observed_generation=view.generation,
        revision=target,
        previous_revision=serving if serving and serving != target else None,
        prefill=roles[Role.PREFILL],
        decode=roles[Role.DECODE],
        prefill_summary=f"{roles[Role.PREFILL].ready}/{roles[Role.PREFILL].desired}",
        decode_summary=f"{roles[Role.DECODE].ready}/{roles[Role.DECODE].desired}",
        pairs=pairs,
        endpoint=f"http://{view.name}.{view.namespace}.svc:8000" if serving else None,
        conditions=_conditions(view),
    )


def _conditions(view: View) -> list[Condition]:
    known = {str(condition.get("type")): condition for condition in view.previous.get("conditions") or ()}
    found = ((kind, finding) for kind, judge in JUDGES.items() if (finding := judge(view)) is not None)
    return [_condition(kind, finding, known.get(kind.value), view) for kind, finding in found]


def _condition(kind: ConditionType, finding: Finding, before: Mapping[str, Any] | None, view: View) -> Condition:
    same = before is not None and before.get("status") == finding.status.value
    since = str(before["lastTransitionTime"]) if same and before and before.get("lastTransitionTime") else view.now
    return Condition(
        type=kind.value,
        status=finding.status,
        reason=finding.reason.value,
        message=shorten(finding.message, limit=MESSAGE_LIMIT),
        last_transition_time=since,
        observed_generation=view.generation,
    )


def _role_status(view: View, role: Role) -> RoleStatus:
    pods = view.pods_of(role)
    updated = view.pods_of(role, view.target) if view.target else []
    return RoleStatus(
        desired=view.desired.get(role, int((view.previous.get(role.value) or {}).get("desired") or 0)),
        replicas=len(pods),
        updated=len(updated),
        ready=sum(1 for pod in pods if pod.ready),
        pending=sum(1 for pod in pods if not pod.scheduled),
    )


def pair_status(view: View) -> PairStatus:
    """Pairs of the serving revision, as the decode pods report them."""
    possible = len(view.pods_of(Role.PREFILL, view.serving)) * len(view.pods_of(Role.DECODE, view.serving))
    ready = min(possible, sum(answer.ready for answer in view.pairs.values()))
    return PairStatus(ready=ready, possible=possible, summary=f"{ready}/{possible}")


def blocked(view: View) -> Finding | None:
    """What keeps the intent from being applied; None when nothing does."""
    if view.faults:
        text = "; ".join(str(fault) for fault in view.faults)
        return Finding(FALSE, Reason.INVALID_SPEC, f"{text}. Pods that run are left as they are")
    if view.trouble is not None:
        return Finding(FALSE, view.trouble.reason, view.trouble.message)
    return None


def ready(view: View) -> Finding:
    """Ready: this generation is applied, complete, paired, and serves. Nothing less."""
    hindrance = blocked(view)
    if hindrance is not None:
        return hindrance
    if view.step is None or not view.applied:
        return Finding(FALSE, Reason.NEW_GENERATION, f"generation {view.generation} is being applied")
    if view.step.reason is Reason.PAUSED:
        return Finding(FALSE, Reason.PAUSED, view.step.message)
    if view.step.reason is not Reason.UP_TO_DATE or view.step.retire:
        return _not_yet(view)
    return _complete(view)


def _complete(view: View) -> Finding:
    if all(view.desired.get(role, 0) == 0 for role in Role):
        return Finding(TRUE, Reason.SCALED_TO_ZERO, "no engines are asked for, and none run")
    pairing = pairs_ready(view)
    if pairing.status is not TRUE and pairing.reason is not Reason.LOCAL_PREFILL_ONLY:
        return pairing
    decode = view.ready(Role.DECODE, view.serving)
    return Finding(TRUE, Reason.SERVING, f"revision {view.serving} serves: {decode} decode pods, {pairing.message}")


def _trouble(view: View, revision: str | None = None) -> PodTrouble | None:
    """The worst that is known of the pods, of one revision or of all: those that are refused before those that run."""
    if view.refusals:
        return PodTrouble(view.refusals[0].reason, view.refusals[0].message)
    return worst(view.pods_of(Role.PREFILL, revision) + view.pods_of(Role.DECODE, revision))


def _not_yet(view: View) -> Finding:
    trouble = _trouble(view)
    step = view.step
    if trouble is None:
        if step is None:
            return Finding(FALSE, Reason.STARTING, "nothing has been decided yet")
        retiring = f"revisions {', '.join(sorted(step.retire))} are going" if step.retire else step.message
        message = retiring if step.reason is Reason.UP_TO_DATE else step.message
        reason = Reason.ROLLING_OUT if step.reason is Reason.UP_TO_DATE else step.reason
        return Finding(FALSE, reason, message)
    fabric = view.fabric
    if trouble.reason is Reason.UNSCHEDULABLE and fabric is not None and fabric.ready is False:
        return Finding(FALSE, fabric.reason, fabric.message)
    return Finding(FALSE, trouble.reason, trouble.message)


def reconciling(view: View) -> Finding:
    """Reconciling: the operator, or Kubernetes on its behalf, still has work to do that may succeed."""
    stuck = stalled(view)
    if stuck.status is TRUE:
        return Finding(FALSE, stuck.reason, "waits for a change: see Stalled")
    now = ready(view)
    if now.status is TRUE:
        return Finding(FALSE, Reason.UP_TO_DATE, f"generation {view.generation} is applied and complete")
    return Finding(TRUE, now.reason, now.message)


def stalled(view: View) -> Finding:
    """Stalled: nothing will get better until somebody changes something."""
    hindrance = blocked(view)
    if hindrance is not None and (view.faults or (view.trouble is not None and view.trouble.users)):
        return Finding(TRUE, hindrance.reason, hindrance.message)
    trouble = worst(view.pods_of(Role.PREFILL, view.target) + view.pods_of(Role.DECODE, view.target))
    if trouble is not None and trouble.reason is Reason.ENGINE_INCOMPATIBLE:
        return Finding(TRUE, trouble.reason, trouble.message)
    return Finding(FALSE, Reason.UP_TO_DATE, "nothing needs to be changed by hand")


def available(view: View) -> Finding:
    """Available: somebody answers requests, whatever else is going on."""
    count = view.ready(Role.DECODE, view.serving) if view.serving else 0
    if count:
        return Finding(TRUE, Reason.SERVING, f"{count} decode pods of revision {view.serving} answer requests")
    if view.desired.get(Role.DECODE) == 0:
        return Finding(FALSE, Reason.SCALED_TO_ZERO, "no decode engines are asked for")
    return Finding(FALSE, Reason.PODS_NOT_READY, "no decode pod is ready")


def progressing(view: View) -> Finding:
    """Progressing: a revision is starting or taking over, and nothing holds it up."""
    hindrance = blocked(view)
    if hindrance is not None:
        return hindrance
    if view.step is None or not view.applied:
        return Finding(TRUE, Reason.NEW_GENERATION, f"generation {view.generation} is being applied")
    if view.step.reason in (Reason.UP_TO_DATE, Reason.PAUSED) and not view.step.retire:
        return Finding(FALSE, view.step.reason, view.step.message)
    trouble = _trouble(view, view.target)
    if trouble is not None:
        return Finding(FALSE, trouble.reason, trouble.message)
    return Finding(TRUE, view.step.reason, view.step.message)


def pairs_ready(view: View) -> Finding:
    """PairsReady: every decode pod of the serving revision has shaken hands with every prefill pod, in its own
    words."""
    if view.desired.get(Role.PREFILL) == 0 and view.spec is not None:
        return Finding(
            FALSE, Reason.LOCAL_PREFILL_ONLY, "no prefill engines are asked for: decode computes prompts itself"
        )
    counts = pair_status(view)
    summary = f"{counts.ready} of {counts.possible} pairs have shaken hands"
    silent = {name: answer.error for name, answer in view.pairs.items() if answer.error}
    if counts.possible == 0:
        return Finding(FALSE, Reason.NO_PAIRS, "there are no pods to pair yet")
    if counts.ready == counts.possible:
        return Finding(TRUE, Reason.PAIRED, summary)
    failures = sorted(answer.failure for answer in view.pairs.values() if answer.failure)
    if failures:
        return Finding(FALSE, Reason.PAIRING, f"{summary}; {failures[0]}")
    if silent and any(pod.ready for pod in view.pods_of(Role.DECODE, view.serving) if pod.name in silent):
        name, error = min(silent.items())
        return Finding(
            UNKNOWN,
            Reason.PAIRS_UNKNOWN,
            f"{summary}; pod {name} does not tell ({error}): the operator must reach port 8000 of the pods",
        )
    return Finding(FALSE, Reason.PAIRING, summary)


def fabric_ready(view: View) -> Finding | None:
    """FabricReady: nodes offer what the pods ask for."""
    if view.fabric is None:
        return None
    status = {True: TRUE, False: FALSE, None: UNKNOWN}[view.fabric.ready]
    return Finding(status, view.fabric.reason, view.fabric.message)


def scaling_limited(view: View) -> Finding | None:
    """ScalingLimited: present only while the ratio bound changes a number that was asked for."""
    if view.scaling is None:
        return None
    return Finding(TRUE, *view.scaling)


JUDGES: Final[Mapping[ConditionType, Callable[[View], Finding | None]]] = {
    ConditionType.READY: ready,
    ConditionType.RECONCILING: reconciling,
    ConditionType.STALLED: stalled,
    ConditionType.AVAILABLE: available,
    ConditionType.PROGRESSING: progressing,
    ConditionType.PAIRS_READY: pairs_ready,
    ConditionType.FABRIC_READY: fabric_ready,
    ConditionType.SCALING_LIMITED: scaling_limited,
}
