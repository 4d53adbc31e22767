"""From what kubelet and scheduler say about pods to one reason with a remedy. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from prebook_operator.api import Reason
from prebook_operator.records import INCOMPATIBLE_MARKS, PodRecord

_IMAGE: Final = frozenset(
    {"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
_CRASH: Final = frozenset(
    {"CrashLoopBackOff", "Error", "OOMKilled", "ContainerCannotRun", "StartError", "RunContainerError"}
)
_SECRET: Final = frozenset({"CreateContainerConfigError"})

_SEVERITY: Final = (
    Reason.ENGINE_INCOMPATIBLE,
    Reason.IMAGE_PULL_FAILED,
    Reason.SECRET_MISSING,
    Reason.CRASH_LOOP,
    Reason.UNSCHEDULABLE,
    Reason.PODS_NOT_READY,
)
_REMEDY: Final = {
    Reason.ENGINE_INCOMPATIBLE: "use an engine image whose vLLM version this release of Prebook supports",
    Reason.IMAGE_PULL_FAILED: "check spec.engine.image and the pull secrets",
    Reason.SECRET_MISSING: "create what it names, in this namespace",
    Reason.CRASH_LOOP: "see the log of the pod's previous container (kubectl logs -p)",
    Reason.UNSCHEDULABLE: "add nodes that fit, or ask for less",
    Reason.PODS_NOT_READY: "see kubectl describe pod",
}


@dataclass(frozen=True)
class PodTrouble:
    """The worst thing that any pod of a group reports."""

    reason: Reason
    message: str


def worst(pods: Iterable[PodRecord]) -> PodTrouble | None:
    """The worst trouble; of equal ones the first by pod name, so that the text is stable. None when no pod reports
    any."""
    troubled = [(_SEVERITY.index(classify(pod)), pod.name, pod) for pod in pods if pod.trouble and not pod.deleting]
    if not troubled:
        return None
    _, _, pod = min(troubled, key=lambda entry: entry[:2])
    reason = classify(pod)
    return PodTrouble(reason, f"{pod.role} pod {pod.name}: {pod.trouble}: {pod.detail}; {_REMEDY[reason]}")


def classify(pod: PodRecord) -> Reason:
    """The reason for a pod's trouble."""
    if any(mark.lower() in pod.detail.lower() for mark in INCOMPATIBLE_MARKS):
        return Reason.ENGINE_INCOMPATIBLE
    if pod.trouble in _IMAGE:
        return Reason.IMAGE_PULL_FAILED
    if pod.trouble in _SECRET:
        return Reason.SECRET_MISSING
    if pod.trouble in _CRASH:
        return Reason.CRASH_LOOP
    if pod.trouble in ("Unschedulable", "SchedulingGated"):
        return Reason.UNSCHEDULABLE
    return Reason.PODS_NOT_READY
