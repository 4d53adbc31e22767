"""The picture that the report is drawn from: everything observed and decided in one reconciliation, and nothing that
could be fetched later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prebook_operator.api import DisaggregatedModelSpec, FieldError, Reason, Role
from prebook_operator.fabric import Verdict
from prebook_operator.pairs import PodPairs
from prebook_operator.records import PodRecord, SetCounts
from prebook_operator.refusals import Refusal
from prebook_operator.takeover import Step


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Something that keeps the intent from being applied. `users`: only the user can mend it, so it is not retried
    before the spec changes."""

    reason: Reason
    message: str
    users: bool


@dataclass(frozen=True, kw_only=True)
class View:
    """One model at one moment.

    `spec`, `step`, `target` and `fabric` are None while the spec cannot be used. `pods` are pods that sets of this
    model own, of all revisions; `sets` our own sets by (role, revision); `pairs` the answers of decode pods of the
    serving revision, by pod name; `refusals` tell why sets of the target lack pods. `applied` tells that everything
    intended has been written."""

    name: str
    namespace: str
    generation: int
    now: str
    previous: Mapping[str, Any]
    spec: DisaggregatedModelSpec | None = None
    target: str | None = None
    step: Step | None = None
    desired: Mapping[Role, int] = field(default_factory=dict)
    scaling: tuple[Reason, str] | None = None
    sets: Mapping[tuple[Role, str], SetCounts] = field(default_factory=dict)
    pods: tuple[PodRecord, ...] = ()
    pairs: Mapping[str, PodPairs] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()
    fabric: Verdict | None = None
    faults: tuple[FieldError, ...] = ()
    trouble: Trouble | None = None
    applied: bool = False

    @property
    def serving(self) -> str:
        """Revision that the front Service selects, or is about to; the last reported one while the spec cannot be
        used."""
        if self.step is not None:
            return self.step.serving
        return str(self.previous.get("previousRevision") or self.previous.get("revision") or "")

    def pods_of(self, role: Role, revision: str | None = None) -> list[PodRecord]:
        """Pods of a role that are not on their way out, of one revision or of all."""
        return [
            pod
            for pod in self.pods
            if pod.role == role.value and not pod.deleting and (revision is None or pod.revision == revision)
        ]

    def ready(self, role: Role, revision: str | None = None) -> int:
        """Ready pods of a role."""
        return sum(1 for pod in self.pods_of(role, revision) if pod.ready)
