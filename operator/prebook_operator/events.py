"""Kubernetes Events: what changed about a model, said once.

Events follow from the difference between the status that is stored and the one that is about to be, so a restart says
nothing again. The name of an Event is a hash of what it says: the same news about the same object is the same name,
and the API server itself refuses the duplicate."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prebook_operator.api import Condition, ConditionStatus, ConditionType, Reason
from prebook_operator.kube.resources import EVENT, MODEL
from prebook_operator.kube.transport import JsonObject
from prebook_operator.records import Key

NOTE_LIMIT: Final = 1000
CONTROLLER: Final = "prebook.dev/operator"

_NEWS: Final = frozenset(
    {
        Reason.INVALID_SPEC,
        Reason.FORBIDDEN_FIELD,
        Reason.FOREIGN_OBJECT,
        Reason.IMAGE_PULL_FAILED,
        Reason.CRASH_LOOP,
        Reason.UNSCHEDULABLE,
        Reason.ENGINE_INCOMPATIBLE,
        Reason.SECRET_MISSING,
        Reason.QUOTA_EXCEEDED,
        Reason.POD_SECURITY,
        Reason.ADMISSION_DENIED,
        Reason.PODS_REFUSED,
        Reason.API_ERROR,
        Reason.NO_MATCHING_NODES,
        Reason.TOO_FEW_GPUS,
        Reason.TOO_FEW_EFA_DEVICES,
        Reason.ZONES_DIFFER,
        Reason.CLAMPED_TO_RATIO,
    }
)
"""Reasons that a person should be told of, whichever condition carries them."""


@dataclass(frozen=True, kw_only=True)
class News:
    """One thing to tell."""

    warning: bool
    reason: Reason
    note: str


def news(before: Mapping[str, Any], now: Sequence[Condition]) -> list[News]:
    """What to tell, given the stored status and the new conditions; each reason at most once."""
    known = {str(one.get("type")): (one.get("status"), one.get("reason")) for one in before.get("conditions") or ()}
    told: dict[Reason, News] = {}
    for condition in now:
        if known.get(condition.type) == (condition.status.value, condition.reason):
            continue
        reason = Reason(condition.reason)
        if condition.type == ConditionType.READY and condition.status is ConditionStatus.TRUE:
            told[reason] = News(warning=False, reason=reason, note=condition.message)
        elif reason in _NEWS:
            told.setdefault(reason, News(warning=True, reason=reason, note=condition.message))
        elif condition.type == ConditionType.PROGRESSING and reason is Reason.ROLLING_OUT:
            told.setdefault(reason, News(warning=False, reason=reason, note=condition.message))
    return list(told.values())


def event(item: News, *, key: Key, uid: str, reporter: str, at: str) -> JsonObject:
    """The Event object; `at` is the time in RFC 3339 with microseconds, `reporter` the pod that tells."""
    text = f"{uid}/{item.reason.value}/{item.note}"
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.kind,
        "metadata": {
            "name": f"{key.name}.{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}",
            "namespace": key.namespace,
        },
        "eventTime": at,
        "reportingController": CONTROLLER,
        "reportingInstance": reporter[:128],
        "action": "Reconcile",
        "reason": item.reason.value,
        "regarding": {
            "apiVersion": MODEL.api_version,
            "kind": MODEL.kind,
            "name": key.name,
            "namespace": key.namespace,
            "uid": uid,
        },
        "note": item.note[:NOTE_LIMIT],
        "type": "Warning" if item.warning else "Normal",
    }
