"""From a checked model to its Kubernetes objects: pure functions, one per kind. The operator and the local runner use
the same ones."""

from __future__ import annotations

from prebook_operator.api.resources import DisaggregatedModel
from prebook_operator.api.spec import Role
from prebook_operator.plan.revision import revision_of
from prebook_operator.render.context import Owner, PeerSource, RenderContext, cluster_context, dns_peers
from prebook_operator.render.devices import claim_template
from prebook_operator.render.identity import secret, service_account
from prebook_operator.render.modelrole import model_role
from prebook_operator.render.podmonitor import pod_monitor
from prebook_operator.render.policy import disruption_budget, network_policy
from prebook_operator.render.service import front_service, headless_service
from prebook_operator.render.types import Manifest
from prebook_operator.render.workload import stateful_set

__all__ = [
    "Manifest",
    "Owner",
    "PeerSource",
    "RenderContext",
    "cluster_context",
    "dns_peers",
    "render",
    "render_revision",
    "render_shared",
]


def render(model: DisaggregatedModel, ctx: RenderContext) -> list[Manifest]:
    """Every object of `model` at the revision that its spec asks for, in an order in which they can be applied."""
    return [*render_shared(model, ctx), *render_revision(model, ctx)]


def render_shared(model: DisaggregatedModel, ctx: RenderContext) -> list[Manifest]:
    """Objects that outlive revisions."""
    found = [
        secret(model, ctx),
        service_account(model, ctx),
        *(network_policy(model, ctx, role) for role in Role),
        front_service(model, ctx),
        *(disruption_budget(model, ctx, role) for role in Role),
        *(model_role(model, ctx, role) for role in Role),
        pod_monitor(model, ctx),
    ]
    return [manifest for manifest in found if manifest is not None]


def render_revision(model: DisaggregatedModel, ctx: RenderContext) -> list[Manifest]:
    """Objects of one revision: discovery and claims first, then the sets that need them."""
    rev8 = revision_of(model).rev8
    found = [
        *(headless_service(model, ctx, role, rev8) for role in Role),
        *(claim_template(model, ctx, role, rev8) for role in Role),
        *(stateful_set(model, ctx, role, rev8) for role in Role),
    ]
    return [manifest for manifest in found if manifest is not None]
