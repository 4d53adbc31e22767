"""Names, labels, ports and paths that the pieces agree on. Nothing else makes up a name."""

from __future__ import annotations

from typing import Final

from prebook_operator.api.base import API_VERSION, GROUP
from prebook_operator.api.resources import DisaggregatedModel
from prebook_operator.api.spec import Role
from prebook_operator.plan.revision import ALGORITHM
from prebook_operator.render.context import RenderContext
from prebook_operator.render.types import Manifest, without_empty

HTTP_PORT: Final = 8000
SIDE_CHANNEL_PORT: Final = 5600
FIELD_MANAGER: Final = "prebook"

MODEL_LABEL: Final = f"{GROUP}/model"
ROLE_LABEL: Final = f"{GROUP}/role"
REVISION_LABEL: Final = f"{GROUP}/revision"
ALGORITHM_LABEL: Final = f"{GROUP}/revision-algorithm"
MANAGED_BY: Final = "app.kubernetes.io/managed-by"

LIB_DIR: Final = "/prebook/lib"
HOME_DIR: Final = "/prebook/home"
CONTROL_DIR: Final = "/run/prebook"
TOKEN_DIR: Final = "/etc/prebook/token"
TOKEN_KEY: Final = "token"
CACHE_DIR: Final = "/var/cache/prebook"
MODEL_DIR: Final = "/model"


def workload_name(model: DisaggregatedModel, role: Role, rev8: str) -> str:
    """StatefulSet and headless Service of one role and revision."""
    return f"{model.name}-{role}-{rev8}"


def role_name(model: DisaggregatedModel, role: Role) -> str:
    """ModelRole, disruption budget and network policy of one role: names that outlive revisions."""
    return f"{model.name}-{role}"


def secret_name(model: DisaggregatedModel) -> str:
    """Secret with the peer token."""
    return f"{model.name}-peer-token"


def service_account_name(model: DisaggregatedModel) -> str:
    """ServiceAccount of the engines."""
    return f"{model.name}-engine"


def model_selector(model: DisaggregatedModel) -> Manifest:
    """Labels of every pod of the model."""
    return {MODEL_LABEL: model.name}


def role_selector(model: DisaggregatedModel, role: Role) -> Manifest:
    """Labels of every pod of one role, of any revision."""
    return {MODEL_LABEL: model.name, ROLE_LABEL: role.value}


def revision_selector(model: DisaggregatedModel, role: Role, rev8: str) -> Manifest:
    """Labels of the pods of one role and revision."""
    return {**role_selector(model, role), REVISION_LABEL: rev8}


def labels(model: DisaggregatedModel, *, role: Role | None = None, rev8: str | None = None) -> Manifest:
    """Labels of an object that belongs to `model`."""
    made: Manifest = {
        MODEL_LABEL: model.name,
        MANAGED_BY: "prebook",
        "app.kubernetes.io/name": "prebook-engine",
        "app.kubernetes.io/instance": model.name,
    }
    if role is not None:
        made[ROLE_LABEL] = role.value
        made["app.kubernetes.io/component"] = role.value
    if rev8 is not None:
        made[REVISION_LABEL] = rev8
        made[ALGORITHM_LABEL] = ALGORITHM
    return made


def metadata(
    model: DisaggregatedModel, ctx: RenderContext, name: str, *, role: Role | None = None, rev8: str | None = None
) -> Manifest:
    """Metadata of an object that belongs to `model`, with its owner."""
    return without_empty(
        name=name,
        namespace=ctx.namespace,
        labels=labels(model, role=role, rev8=rev8),
        ownerReferences=_owners(ctx),
    )


def _owners(ctx: RenderContext) -> list[Manifest]:
    if ctx.owner is None:
        return []
    return [
        {
            "apiVersion": API_VERSION,
            "kind": "DisaggregatedModel",
            "name": ctx.owner.name,
            "uid": ctx.owner.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]
