"""Pods that cannot even be created: from the API server's refusal to a reason and a remedy. Pure.

A StatefulSet whose pods are refused (a quota, Pod Security admission, a policy) says so nowhere in its status; its
controller only records an Event, which `kubectl describe dm` does not show. The same refusals meet the operator's own
writes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from prebook_operator.api import Reason, Role
from prebook_operator.kube.errors import shorten

FAILED_CREATE: Final = "FailedCreate"
"""Reason of the Event that the StatefulSet controller records."""
NOTE_LIMIT: Final = 400
_PREAMBLE: Final = re.compile(r"^create Pod \S+ in StatefulSet \S+ failed error: ")


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a set has fewer pods than it should have. `note` is the API server's word."""

    role: Role
    set_name: str
    note: str

    @property
    def reason(self) -> Reason:
        """One word for it."""
        return judge(self.note, self.role)[0]

    @property
    def message(self) -> str:
        """A sentence with the remedy."""
        _, remedy = judge(self.note, self.role)
        remedy = remedy or f"see kubectl describe statefulset {self.set_name}"
        return f"{self.role} pods cannot be created: {self.note}; {remedy}"


def judge(message: str, role: Role | None = None) -> tuple[Reason, str]:
    """Reason and remedy for a refusal by the API server; the remedy is empty when nothing better is known than to look
    at the object. `role` is the role whose pods were refused, None for another object."""
    resources = f"the resources of spec.{role}.template.spec.containers" if role else "the spec"
    general = Reason.PODS_REFUSED if role else Reason.API_ERROR
    known = (
        ("exceeded quota", Reason.QUOTA_EXCEEDED, f"raise that ResourceQuota, or ask for less in {resources}"),
        ("failed quota", Reason.QUOTA_EXCEEDED, f"the quota wants these to be stated: set them in {resources}"),
        ("violates PodSecurity", Reason.POD_SECURITY, _pod_security(message, role)),
        ("denied the request", Reason.ADMISSION_DENIED, "meet that policy, or ask whoever runs it for an exception"),
        ("denied request", Reason.ADMISSION_DENIED, "meet that policy, or ask whoever runs it for an exception"),
        ("per Container", general, f"a LimitRange of the namespace says so: change it, or {resources}"),
        ("service account", general, "create that service account"),
    )
    return next(((reason, remedy) for mark, reason, remedy in known if mark in message), (general, ""))


def _pod_security(message: str, role: Role | None) -> str:
    if "IPC_LOCK" in message:
        return (
            "EFA needs IPC_LOCK, which neither restricted nor baseline admits: label the namespace "
            "pod-security.kubernetes.io/enforce=privileged, or set spec.hardware.efaPerGPU to 0"
        )
    return f"take out of spec.{role or '<role>'}.template what it names, or label the namespace with a wider level"


def newest_note(events: Iterable[Mapping[str, Any]]) -> str:
    """The text of the newest of a set's FailedCreate Events (events.k8s.io/v1), without what repeats the names; empty
    when there is none."""
    newest = max(events, key=_when, default=None)
    if newest is None:
        return ""
    return shorten(_PREAMBLE.sub("", str(newest.get("note") or "")), limit=NOTE_LIMIT)


def _when(event: Mapping[str, Any]) -> str:
    # All are RFC 3339 in UTC, so they compare as text. A recorder of the older kind fills only the deprecated field.
    series = event.get("series") or {}
    created = (event.get("metadata") or {}).get("creationTimestamp")
    return str(
        series.get("lastObservedTime")
        or event.get("deprecatedLastTimestamp")
        or event.get("eventTime")
        or created
        or ""
    )
