"""The two custom resources: DisaggregatedModel (written by users) and ModelRole (written by the operator, scaled by
anyone)."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field, StringConstraints

from prebook_operator.api.base import ApiModel, ObjectName
from prebook_operator.api.conditions import Condition
from prebook_operator.api.pod_template import map_list
from prebook_operator.api.spec import DisaggregatedModelSpec, Replicas, Role

MAX_NAME: Final = 35
"""Longest name of a model. Pods of a StatefulSet carry a label `<set>-<10 characters>`, a label value holds 63, and a
set is called `<name>-prefill-<8 characters>`."""

Conditions = Annotated[list[Condition], Field(max_length=16, json_schema_extra=map_list("type"))]
Count = Annotated[int, Field(ge=0)]
Selector = Annotated[str, StringConstraints(max_length=512)]


class ObjectMeta(ApiModel):
    """The part of metadata that Prebook reads; everything else is kept out of the model."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, StringConstraints(min_length=1, max_length=63)]
    namespace: Annotated[str, StringConstraints(max_length=63)] | None = None
    uid: Annotated[str, StringConstraints(max_length=64)] | None = None
    generation: Count = 0
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    deletion_timestamp: str | None = None


class RoleStatus(ApiModel):
    """What runs for one role."""

    model_config = ConfigDict(extra="ignore")

    desired: Count = 0
    """Engines asked for, after bounds."""
    replicas: Count = 0
    """Pods that exist, of every revision."""
    updated: Count = 0
    """Pods of the newest revision."""
    ready: Count = 0
    """Pods that are ready, of every revision."""
    pending: Count = 0
    """Pods that are not scheduled yet."""


class PairStatus(ApiModel):
    """Pairs of one prefill engine and one decode engine."""

    model_config = ConfigDict(extra="ignore")

    ready: Count = 0
    """Pairs that have shaken hands, as the pods report."""
    possible: Count = 0
    """Prefill pods times decode pods of the serving revision."""
    summary: Annotated[str, StringConstraints(max_length=32)] = ""
    """`ready/possible`, for the table of `kubectl get`."""


class DisaggregatedModelStatus(ApiModel):
    """What the operator observed."""

    model_config = ConfigDict(extra="ignore")

    observed_generation: Count = 0
    """Generation of the spec that this status speaks about."""
    revision: Annotated[str, StringConstraints(max_length=63)] | None = None
    """Revision that the spec asks for."""
    previous_revision: Annotated[str, StringConstraints(max_length=63)] | None = None
    """Revision that still serves, or served last, while another one comes up."""
    prefill: RoleStatus = RoleStatus()
    """Prefill engines."""
    decode: RoleStatus = RoleStatus()
    """Decode engines."""
    prefill_summary: Annotated[str, StringConstraints(max_length=32)] = ""
    """`ready/desired`, for the table of `kubectl get`."""
    decode_summary: Annotated[str, StringConstraints(max_length=32)] = ""
    """`ready/desired`, for the table of `kubectl get`."""
    pairs: PairStatus = PairStatus()
    """Pairs of the serving revision."""
    endpoint: Annotated[str, StringConstraints(max_length=512)] | None = None
    """Where clients send requests."""
    conditions: Conditions = Field(default_factory=list)
    """Observations, one per type."""


class DisaggregatedModel(ApiModel):
    """One large language model, served with prefill and decode on separate engines and the KV cache pushed between
    them.

    Apply one, and get an OpenAI-compatible Service of the same name.
    """

    api_version: Literal["prebook.dev/v1alpha1"] = "prebook.dev/v1alpha1"
    kind: Literal["DisaggregatedModel"] = "DisaggregatedModel"
    metadata: ObjectMeta
    spec: DisaggregatedModelSpec
    """What to serve, and how."""
    status: DisaggregatedModelStatus | None = None
    """What the operator observed."""

    @property
    def name(self) -> str:
        """Name of the object."""
        return self.metadata.name

    @property
    def served_name(self) -> str:
        """Name that clients put into `model`."""
        return self.spec.model.served_name or self.metadata.name


class ModelRoleSpec(ApiModel):
    """The number of engines of one role."""

    model: ObjectName
    """DisaggregatedModel that this role belongs to."""
    role: Role
    """Which role."""
    replicas: Replicas = 1
    """Number of engines. When the model's spec gives `replicas` for this role, the operator sets it back to that."""


class ModelRoleStatus(ApiModel):
    """What runs for this role."""

    model_config = ConfigDict(extra="ignore")

    observed_generation: Count = 0
    """Generation of the spec that this status speaks about."""
    replicas: Count = 0
    """Pods that exist, of every revision."""
    ready_replicas: Count = 0
    """Pods that are ready."""
    desired_replicas: Count = 0
    """Number asked for, after the ratio bounds of the model."""
    selector: Selector = ""
    """Label selector of the pods, for autoscalers."""
    conditions: Conditions = Field(default_factory=list)
    """Observations, one per type."""


class ModelRole(ApiModel):
    """Scale handle of one role of a DisaggregatedModel.

    Its name never changes, so an HPA or a KEDA ScaledObject can point at it while revisions come and go. The operator
    makes it; do not create one.
    """

    api_version: Literal["prebook.dev/v1alpha1"] = "prebook.dev/v1alpha1"
    kind: Literal["ModelRole"] = "ModelRole"
    metadata: ObjectMeta
    spec: ModelRoleSpec
    """The number of engines."""
    status: ModelRoleStatus | None = None
    """What runs for this role."""
