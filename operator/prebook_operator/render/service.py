"""Services: one headless per role and revision for discovery, one in front for clients."""

from __future__ import annotations

from prebook_operator.api.resources import DisaggregatedModel
from prebook_operator.api.spec import Role
from prebook_operator.render.context import RenderContext
from prebook_operator.render.names import (
    HTTP_PORT,
    REVISION_LABEL,
    SIDE_CHANNEL_PORT,
    metadata,
    revision_selector,
    role_selector,
    workload_name,
)
from prebook_operator.render.types import Manifest


def headless_service(model: DisaggregatedModel, ctx: RenderContext, role: Role, rev8: str) -> Manifest:
    """Addresses of the pods of one role and revision, ready or not: peers shake hands before they become ready."""
    name = workload_name(model, role, rev8)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(model, ctx, name, role=role, rev8=rev8),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": revision_selector(model, role, rev8),
            "ports": [_port("http", HTTP_PORT), _port("side-channel", SIDE_CHANNEL_PORT)],
        },
    }


def front_service(model: DisaggregatedModel, ctx: RenderContext) -> Manifest:
    """The door for clients: every decode pod that is ready."""
    selector = role_selector(model, Role.DECODE)
    if ctx.front_revision is not None:
        selector[REVISION_LABEL] = ctx.front_revision
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(model, ctx, model.name),
        "spec": {"type": "ClusterIP", "selector": selector, "ports": [_port("http", HTTP_PORT)]},
    }


def _port(name: str, number: int) -> Manifest:
    return {"name": name, "port": number, "targetPort": name, "protocol": "TCP"}
