"""Disruption budgets and network policies."""

from __future__ import annotations

from prebook_operator.api.resources import DisaggregatedModel
from prebook_operator.api.spec import Role
from prebook_operator.render.context import RenderContext
from prebook_operator.render.names import HTTP_PORT, metadata, model_selector, role_name, role_selector
from prebook_operator.render.types import Manifest
from prebook_operator.render.workload import replicas


def disruption_budget(model: DisaggregatedModel, ctx: RenderContext, role: Role) -> Manifest | None:
    """At most one engine of a role at a time; None below 2 replicas, where a budget would block every node drain.

    AlwaysAllow lets pods that are not ready go, so that a crash-looping engine cannot block a drain either.
    """
    if replicas(model, ctx, role) < 2:
        return None
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(model, ctx, role_name(model, role), role=role),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": role_selector(model, role)},
        },
    }


def network_policy(model: DisaggregatedModel, ctx: RenderContext, role: Role) -> Manifest | None:
    """Who may reach the pods of `role`; None when the spec switches it off.

    Pods of the same model reach each other on every port, because NIXL's TCP transport listens on ports of its own
    choice. Clients reach decode's HTTP port. RDMA passes by network policies; the security group of the nodes governs
    it.
    """
    settings = model.spec.network_policy
    if not settings.enabled:
        return None
    http = [{"port": HTTP_PORT, "protocol": "TCP"}]
    rules: list[Manifest] = [{"from": [{"podSelector": {"matchLabels": model_selector(model)}}]}]
    if role is Role.DECODE:
        rules.append({"ports": http})
    else:
        namespaces = list(settings.monitoring_namespaces)
        sources: list[Manifest] = [_namespace(name) for name in namespaces]
        if ctx.operator_namespace is not None:
            sources.append(
                {
                    **_namespace(ctx.operator_namespace),
                    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prebook"}},
                }
            )
        if sources:
            rules.append({"from": sources, "ports": http})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(model, ctx, role_name(model, role), role=role),
        "spec": {
            "podSelector": {"matchLabels": role_selector(model, role)},
            "policyTypes": ["Ingress"],
            "ingress": rules,
        },
    }


def _namespace(name: str) -> Manifest:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}
