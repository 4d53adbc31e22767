"""What the operator remembers of an object: a few hundred bytes instead of the object.

A thousand models have some fifteen thousand children and pods; whole objects of that number are a gigabyte of Python
dictionaries (spark-operator#2878). Each record holds identity, ownership, the digest of the fields we own (see
`kube.fields`) and the handful of values that a decision or a condition needs. Pure: raw object in, record out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from sys import intern
from typing import Any, Final

from prebook_operator.kube.fields import digest, live_body
from prebook_operator.kube.resources import MODEL_ROLE, SERVICE, STATEFUL_SET, Resource

MODEL_LABEL: Final = "prebook.dev/model"
ROLE_LABEL: Final = "prebook.dev/role"
REVISION_LABEL: Final = "prebook.dev/revision"
TEXT_LIMIT: Final = 400
INCOMPATIBLE_MARKS: Final = ("prebook: incompatible", "this Prebook connector supports", "compatibility hash mismatch")
"""What an engine that cannot work with this connector, or with its peers, leaves in its termination message."""


@dataclass(frozen=True, order=True, slots=True)
class Key:
    """A DisaggregatedModel, by namespace and name."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A DisaggregatedModel. `spec` and `status` are its JSON, unparsed: they are needed once per reconciliation."""

    key: Key
    uid: str
    version: int
    generation: int
    deleting: bool
    spec: bytes
    status: bytes

    @property
    def names_hardware(self) -> bool:
        """May the spec choose a hardware profile, so that nodes matter to it? Cheap, and never wrongly false."""
        return b'"profile":' in self.spec and b'"profile":"none"' not in self.spec

    @property
    def reported(self) -> bool:
        """Does the stored status speak of this generation of the spec?"""
        return int(self.parsed_status().get("observedGeneration") or 0) == self.generation

    @property
    def unfinished(self) -> bool:
        """Does the stored status say nothing of this generation, or no more than that it was noticed?"""
        return b'"reason":"NewGeneration"' in self.status or not self.reported

    def parsed_spec(self) -> dict[str, Any]:
        """The spec as stored."""
        parsed: dict[str, Any] = json.loads(self.spec)
        return parsed

    def parsed_status(self) -> dict[str, Any]:
        """The status as stored; empty before the first report."""
        parsed: dict[str, Any] = json.loads(self.status)
        return parsed


@dataclass(frozen=True, slots=True)
class SetCounts:
    """Numbers of a StatefulSet. `current`: its controller has seen the latest spec, so the other numbers speak of
    it."""

    desired: int
    replicas: int
    ready: int
    updated: int
    current: bool


@dataclass(frozen=True, slots=True)
class ChildRecord:
    """An object that a model owns, or one that carries its label without being owned by it.

    `owned` is the digest of the fields that we own, None when we have never applied the object. For StatefulSets
    `template` is the digest of the pod template's share, and `owned` covers the rest. `selects` is the revision that
    a Service's selector names. `role_replicas` and `role_status` belong to ModelRoles."""

    plural: str
    name: str
    uid: str
    version: int
    generation: int
    owner: str
    deleting: bool
    owned: bytes | None
    role: str = ""
    revision: str = ""
    template: bytes | None = None
    counts: SetCounts | None = None
    selects: str = ""
    role_replicas: int | None = None
    role_status: bytes = b"{}"


@dataclass(frozen=True, slots=True)
class PodRecord:
    """A pod of a model. `trouble` is the reason of the worst thing that its containers, or the scheduler, report;
    `detail` its text."""

    name: str
    uid: str
    version: int
    owner: str
    role: str
    revision: str
    ip: str
    scheduled: bool
    running: bool
    ready: bool
    deleting: bool
    trouble: str
    detail: str
    restarts: int


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node, as far as placing engines on it goes. `devices` are its allocatable extended resources."""

    name: str
    version: int
    ready: bool
    schedulable: bool
    zone: str
    labels: tuple[tuple[str, str], ...]
    devices: tuple[tuple[str, int], ...]

    def device(self, name: str) -> int:
        """Allocatable number of an extended resource; 0 when the node does not advertise it."""
        return dict(self.devices).get(name, 0)

    def matches(self, selector: Mapping[str, str]) -> bool:
        """Does the node carry all these labels?"""
        labels = dict(self.labels)
        return all(labels.get(name) == value for name, value in selector.items())


def _version(metadata: Mapping[str, Any]) -> int:
    # Resource versions are opaque in theory and etcd's revision in practice; comparing them is documented since
    # Kubernetes 1.35.
    text = str(metadata.get("resourceVersion") or "0")
    return int(text) if text.isdigit() else 0


def _controller(metadata: Mapping[str, Any]) -> str:
    for reference in metadata.get("ownerReferences") or ():
        if reference.get("controller"):
            return str(reference.get("uid") or "")
    return ""


def _compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _labels(metadata: Mapping[str, Any]) -> Mapping[str, str]:
    labels: Mapping[str, str] = metadata.get("labels") or {}
    return labels


def key_of_model(raw: Mapping[str, Any]) -> Key:
    """Key of a DisaggregatedModel itself."""
    return Key(raw["metadata"]["namespace"], raw["metadata"]["name"])


def key_of_child(raw: Mapping[str, Any]) -> Key | None:
    """Key of the model that an object's label names; None without the label."""
    name = _labels(raw["metadata"]).get(MODEL_LABEL)
    return Key(intern(raw["metadata"]["namespace"]), intern(name)) if name else None


def identity_of(name: str, model: str) -> tuple[str, str]:
    """Role and revision out of a child's name, `<model>-<role>[-<revision>]`; empty where there is none. Names cannot
    be edited, and labels can: a set must not be taken for another revision's, and deleted, because somebody
    relabelled it."""
    for role in ("prefill", "decode"):
        stem = f"{model}-{role}"
        if name == stem:
            return role, ""
        if name.startswith(f"{stem}-"):
            return role, name.removeprefix(f"{stem}-")
    return "", ""


def model_record(raw: Mapping[str, Any]) -> ModelRecord:
    """The record of a DisaggregatedModel."""
    metadata = raw["metadata"]
    return ModelRecord(
        key=key_of_model(raw),
        uid=metadata["uid"],
        version=_version(metadata),
        generation=int(metadata.get("generation") or 0),
        deleting=bool(metadata.get("deletionTimestamp")),
        spec=_compact(raw.get("spec") or {}),
        status=_compact(raw.get("status") or {}),
    )


def split_body(body: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """A StatefulSet's body without its pod template, and the template."""
    spec = dict(body.get("spec") or {})
    template = spec.pop("template", None)
    return {**body, "spec": spec}, template


def child_record(raw: Mapping[str, Any], resource: Resource) -> ChildRecord:
    """The record of a child of any kind in `kube.resources.CHILDREN`."""
    metadata = raw["metadata"]
    role, revision = identity_of(metadata["name"], _labels(metadata).get(MODEL_LABEL, ""))
    spec = raw.get("spec") or {}
    body = live_body(raw)
    template: bytes | None = None
    counts: SetCounts | None = None
    if resource is STATEFUL_SET:
        if body is not None:
            body, owned_template = split_body(body)
            template = digest(owned_template)
        counts = _set_counts(raw)
    is_role = resource is MODEL_ROLE
    return ChildRecord(
        plural=resource.plural,
        name=metadata["name"],
        uid=metadata["uid"],
        version=_version(metadata),
        generation=int(metadata.get("generation") or 0) if resource in (MODEL_ROLE, STATEFUL_SET) else 0,
        owner=intern(_controller(metadata)),
        deleting=bool(metadata.get("deletionTimestamp")),
        owned=None if body is None else digest(body),
        role=intern(role),
        revision=intern(revision),
        template=template,
        counts=counts,
        selects=intern((spec.get("selector") or {}).get(REVISION_LABEL, "")) if resource is SERVICE else "",
        role_replicas=spec.get("replicas") if is_role else None,
        role_status=_compact(raw.get("status") or {}) if is_role else b"{}",
    )


def _set_counts(raw: Mapping[str, Any]) -> SetCounts:
    spec, status = raw.get("spec") or {}, raw.get("status") or {}
    generation = int(raw["metadata"].get("generation") or 0)
    replicas = spec.get("replicas")
    return SetCounts(
        desired=1 if replicas is None else int(replicas),
        replicas=int(status.get("replicas") or 0),
        ready=int(status.get("readyReplicas") or 0),
        updated=int(status.get("updatedReplicas") or 0),
        current=int(status.get("observedGeneration") or 0) >= generation,
    )


def pod_record(raw: Mapping[str, Any]) -> PodRecord:
    """The record of a pod."""
    metadata, status = raw["metadata"], raw.get("status") or {}
    role, revision = identity_of(metadata["name"].rpartition("-")[0], _labels(metadata).get(MODEL_LABEL, ""))
    statuses = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    trouble, detail = _trouble(status, statuses)
    return PodRecord(
        name=metadata["name"],
        uid=metadata["uid"],
        version=_version(metadata),
        owner=intern(_controller(metadata)),
        role=intern(role),
        revision=intern(revision),
        ip=str(status.get("podIP") or ""),
        scheduled=_condition(status, "PodScheduled") == "True",
        running=status.get("phase") == "Running",
        ready=_condition(status, "Ready") == "True",
        deleting=bool(metadata.get("deletionTimestamp")),
        trouble=intern(trouble),
        detail=detail[:TEXT_LIMIT],
        restarts=sum(int(one.get("restartCount") or 0) for one in statuses),
    )


def telling(message: str) -> str:
    """The part of a termination message that says why: the line that names an incompatibility, else the end, for a
    log that ends in an exception tells the reason last."""
    for line in message.splitlines():
        if any(mark.lower() in line.lower() for mark in INCOMPATIBLE_MARKS):
            return line.strip()[-TEXT_LIMIT:]
    return message.strip()[-TEXT_LIMIT:]


def _condition(status: Mapping[str, Any], kind: str) -> str:
    for condition in status.get("conditions") or ():
        if condition.get("type") == kind:
            return str(condition.get("status"))
    return ""


_WAITING_IS_NORMAL: Final = ("", "PodInitializing", "ContainerCreating")


def _trouble(status: Mapping[str, Any], statuses: list[Mapping[str, Any]]) -> tuple[str, str]:
    for one in statuses:
        state = one.get("state") or {}
        waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
        last = (one.get("lastState") or {}).get("terminated") or {}
        reason = str(waiting.get("reason") or "")
        if reason not in _WAITING_IS_NORMAL:
            # Why the previous attempt died says more than "back-off restarting failed container".
            return reason, telling(str(last.get("message") or waiting.get("message") or reason))
        if ended and int(ended.get("exitCode") or 0) != 0:
            return str(ended.get("reason") or "Error"), str(
                ended.get("message") or f"exit code {ended.get('exitCode')}"
            )
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("reason") or "Unschedulable"), str(condition.get("message") or "")
    return "", ""


def node_record(raw: Mapping[str, Any]) -> NodeRecord:
    """The record of a node. All its labels are kept: a model's node selector may name any of them."""
    metadata, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    carried = _labels(metadata)
    allocatable = status.get("allocatable") or {}
    devices = {name: int(count) for name, count in allocatable.items() if "/" in name and str(count).isdigit()}
    return NodeRecord(
        name=metadata["name"],
        version=_version(metadata),
        ready=_condition(status, "Ready") == "True",
        schedulable=not spec.get("unschedulable", False),
        zone=intern(carried.get("topology.kubernetes.io/zone", "")),
        labels=tuple(sorted((intern(name), intern(value)) for name, value in carried.items())),
        devices=tuple(sorted((intern(name), count) for name, count in devices.items())),
    )
