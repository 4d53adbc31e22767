"""The API: types of the custom resources, their validation, and the reasons and conditions that speak about them. No
I/O.

Import from here; the modules inside are private to the package.
"""

from __future__ import annotations

from prebook_operator.api.allow import NOTHING, Allow
from prebook_operator.api.base import API_VERSION, GROUP, VERSION
from prebook_operator.api.conditions import Condition, ConditionStatus, ConditionType
from prebook_operator.api.errors import FieldError, UserError
from prebook_operator.api.load import load
from prebook_operator.api.reasons import Reason
from prebook_operator.api.resources import (
    DisaggregatedModel,
    DisaggregatedModelStatus,
    ModelRole,
    ModelRoleStatus,
    PairStatus,
    RoleStatus,
)
from prebook_operator.api.spec import (
    Backend,
    Connector,
    Devices,
    DisaggregatedModelSpec,
    FirstToken,
    OnFailure,
    Role,
    RoleSpec,
)
from prebook_operator.api.validation import check

__all__ = [
    "API_VERSION",
    "GROUP",
    "NOTHING",
    "VERSION",
    "Allow",
    "Backend",
    "Condition",
    "ConditionStatus",
    "ConditionType",
    "Connector",
    "Devices",
    "DisaggregatedModel",
    "DisaggregatedModelSpec",
    "DisaggregatedModelStatus",
    "FieldError",
    "FirstToken",
    "ModelRole",
    "ModelRoleStatus",
    "OnFailure",
    "PairStatus",
    "Reason",
    "Role",
    "RoleSpec",
    "RoleStatus",
    "UserError",
    "check",
    "load",
]
