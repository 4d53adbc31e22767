"""Decisions: pure functions from what is asked for and what is observed to what is wanted next. No I/O."""

from __future__ import annotations

from prebook_operator.plan.revision import ALGORITHM, Revision, revision_of
from prebook_operator.plan.scaling import DesiredReplicas, desired_replicas

__all__ = ["ALGORITHM", "DesiredReplicas", "Revision", "desired_replicas", "revision_of"]
