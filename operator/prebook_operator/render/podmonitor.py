"""PodMonitor for the Prometheus operator."""

from __future__ import annotations

from prebook_operator.api.resources import DisaggregatedModel
from prebook_operator.render.context import RenderContext
from prebook_operator.render.names import REVISION_LABEL, ROLE_LABEL, metadata, model_selector
from prebook_operator.render.types import Manifest


def pod_monitor(model: DisaggregatedModel, ctx: RenderContext) -> Manifest | None:
    """Scrapes every engine; None unless the spec asks for it and the cluster knows the kind."""
    if not (model.spec.monitoring.pod_monitor and ctx.has_pod_monitor):
        return None
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata(model, ctx, model.name),
        "spec": {
            "selector": {"matchLabels": model_selector(model)},
            "podTargetLabels": [ROLE_LABEL, REVISION_LABEL],
            "podMetricsEndpoints": [{"port": "http", "path": "/metrics", "interval": "15s"}],
        },
    }
