"""Conditions of the API objects, in the shape of metav1.Condition."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from prebook_operator.api.base import ApiModel

Timestamp = Annotated[str, StringConstraints(max_length=32), Field(json_schema_extra={"format": "date-time"})]


class ConditionType(StrEnum):
    """Every condition that a DisaggregatedModel or a ModelRole may carry. Ready, Reconciling and Stalled follow
    kstatus."""

    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    AVAILABLE = "Available"
    PROGRESSING = "Progressing"
    PAIRS_READY = "PairsReady"
    FABRIC_READY = "FabricReady"
    ROLLOUT_HELD = "RolloutHeld"
    SCALING_LIMITED = "ScalingLimited"


class ConditionStatus(StrEnum):
    """Whether a condition holds."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ApiModel):
    """One observation of the object's state."""

    type: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    """Which condition."""
    status: ConditionStatus
    """Whether it holds."""
    reason: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    """One word for programs."""
    message: Annotated[str, StringConstraints(max_length=4096)]
    """A sentence for people: what is the matter, and what to do."""
    last_transition_time: Timestamp
    """When the status last changed."""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    """Generation of the spec that this was observed for."""
