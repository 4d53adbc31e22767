"""ModelRole: the scale handle of one role."""

from __future__ import annotations

from prebook_operator.api import derived
from prebook_operator.api.base import API_VERSION
from prebook_operator.api.resources import DisaggregatedModel
from prebook_operator.api.spec import Role
from prebook_operator.render.context import RenderContext
from prebook_operator.render.names import metadata, role_name
from prebook_operator.render.types import Manifest, without_empty


def model_role(model: DisaggregatedModel, ctx: RenderContext, role: Role) -> Manifest:
    """The role's handle. `replicas` is stated only when the spec pins it; otherwise it belongs to whoever scales."""
    return {
        "apiVersion": API_VERSION,
        "kind": "ModelRole",
        "metadata": metadata(model, ctx, role_name(model, role), role=role),
        "spec": without_empty(model=model.name, role=role.value, replicas=derived.pinned_replicas(model.spec, role)),
    }
