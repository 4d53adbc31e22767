"""StatefulSet of one role and revision."""

from __future__ import annotations

from prebook_operator.api import derived
from prebook_operator.api.resources import DisaggregatedModel
from prebook_operator.api.spec import Role
from prebook_operator.render.context import RenderContext
from prebook_operator.render.names import metadata, revision_selector, workload_name
from prebook_operator.render.pod import pod_template
from prebook_operator.render.types import Manifest


def replicas(model: DisaggregatedModel, ctx: RenderContext, role: Role) -> int:
    """Engines of `role`: what the context says, else the spec's number, else 1."""
    if role in ctx.replicas:
        return ctx.replicas[role]
    pinned = derived.pinned_replicas(model.spec, role)
    return 1 if pinned is None else pinned


def stateful_set(model: DisaggregatedModel, ctx: RenderContext, role: Role, rev8: str) -> Manifest:
    """The engines of `role` at one revision.

    A revision never changes in place: another spec makes another set. OnDelete makes that certain even for an
    operator whose rendering differs from the one that made the set.
    """
    name = workload_name(model, role, rev8)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(model, ctx, name, role=role, rev8=rev8),
        "spec": {
            "serviceName": name,
            "replicas": replicas(model, ctx, role),
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 1,
            "selector": {"matchLabels": revision_selector(model, role, rev8)},
            "template": pod_template(model, ctx, role, rev8),
        },
    }
