"""Who the engines are: the Secret that makes them peers, and a ServiceAccount without a token."""

from __future__ import annotations

from prebook_operator.api.resources import DisaggregatedModel
from prebook_operator.render.context import RenderContext
from prebook_operator.render.names import TOKEN_KEY, metadata, secret_name, service_account_name
from prebook_operator.render.types import Manifest


def secret(model: DisaggregatedModel, ctx: RenderContext) -> Manifest | None:
    """The peer token; None when it exists already, because it is made once and never read back."""
    if ctx.peer_token is None:
        return None
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(model, ctx, secret_name(model)),
        "type": "Opaque",
        "stringData": {TOKEN_KEY: ctx.peer_token},
    }


def service_account(model: DisaggregatedModel, ctx: RenderContext) -> Manifest:
    """Identity of the pods; they never call the API server."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(model, ctx, service_account_name(model)),
        "automountServiceAccountToken": False,
    }
