"""Can this model's pods get their GPUs and EFA devices, all in one availability zone? Pure: nodes in, verdict out.

The scheduler only ever says "0/12 nodes are available". This says which nodes match, what they advertise, what is
missing and what to do about it, before anybody waits for it. EFA traffic cannot leave a zone, so both roles must fit
into one; a device plugin that does not know the instance type advertises nothing, and pods without EFA would run over
TCP (aws-do-eks#56, skypilot#10491)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prebook_operator.api import Devices, DisaggregatedModelSpec, Reason, Role
from prebook_operator.api.derived import efa_devices, gpus, machine, uses_efa
from prebook_operator.records import NodeRecord

GPU: Final = "nvidia.com/gpu"
EFA: Final = "vpc.amazonaws.com/efa"
INSTANCE_TYPE: Final = "node.kubernetes.io/instance-type"
NODE_GROUP: Final = "eks.amazonaws.com/nodegroup"
NAMED: Final = 3
"""Nodes that a message names before it says "and N more"."""


@dataclass(frozen=True)
class Verdict:
    """`ready`: None when it cannot be known."""

    ready: bool | None
    reason: Reason
    message: str


@dataclass(frozen=True)
class _Need:
    role: Role
    gpus: int
    efa: int
    selector: Mapping[str, str]


def required_labels(spec: DisaggregatedModelSpec, role: Role) -> dict[str, str]:
    """Node labels that a role's pods select."""
    labels: dict[str, str] = {}
    if machine(spec) is not None:
        labels[INSTANCE_TYPE] = spec.hardware.profile.value
    group = spec.hardware.node_groups.prefill if role is Role.PREFILL else spec.hardware.node_groups.decode
    if group:
        labels[NODE_GROUP] = group
    labels.update({str(name): str(value) for name, value in spec.role(role).node_selector.items()})
    return labels


def assess(spec: DisaggregatedModelSpec, nodes: Collection[NodeRecord] | None) -> Verdict:
    """The verdict; `nodes` is None when the operator may not read nodes."""
    if machine(spec) is None:
        return Verdict(True, Reason.FABRIC_NOT_NEEDED, "hardware profile none: no fabric devices are asked for")
    if nodes is None:
        return Verdict(
            None,
            Reason.NODES_UNKNOWN,
            "the operator may not read nodes, so it cannot tell; the chart's value rbac.nodeReader=Always allows it",
        )
    zones: dict[Role, set[str]] = {}
    for role in Role:
        found = _fitting(_need(spec, role), nodes)
        if isinstance(found, Verdict):
            return found
        zones[role] = {node.zone for node in found}
    common = zones[Role.PREFILL] & zones[Role.DECODE]
    if not common and uses_efa(spec):
        return Verdict(
            False,
            Reason.ZONES_DIFFER,
            f"prefill fits in {_list(sorted(zones[Role.PREFILL]))}, decode in {_list(sorted(zones[Role.DECODE]))}: EFA "
            "traffic cannot leave a zone; put both node groups into one zone (spec.hardware.nodeGroups)",
        )
    where = f" in {_list(sorted(common))}" if common and "" not in common else ""
    return Verdict(True, Reason.FABRIC_AVAILABLE, f"matching nodes advertise enough GPUs and EFA devices{where}")


def _need(spec: DisaggregatedModelSpec, role: Role) -> _Need:
    # Devices that are claimed (DRA) are no counts on the node; the scheduler alone knows whether a claim can be met.
    claims = spec.hardware.devices is Devices.DRA and efa_devices(spec, role) > 0
    claims_gpus = claims and spec.hardware.dra.gpu_device_class is not None
    return _Need(
        role=role,
        gpus=0 if claims_gpus else gpus(spec, role),
        efa=0 if claims else efa_devices(spec, role),
        selector=required_labels(spec, role),
    )


def _fitting(need: _Need, nodes: Collection[NodeRecord]) -> list[NodeRecord] | Verdict:
    labelled = [node for node in nodes if node.matches(need.selector)]
    selector = _list([f"{name}={value}" for name, value in sorted(need.selector.items())])
    if not labelled:
        return Verdict(
            False,
            Reason.NO_MATCHING_NODES,
            f"no node for {need.role} carries {selector}; add such nodes, or change spec.hardware or "
            f"spec.{need.role}.nodeSelector",
        )
    usable = [node for node in labelled if node.ready and node.schedulable]
    if not usable:
        return Verdict(
            False,
            Reason.NO_MATCHING_NODES,
            f"{_names(labelled)} match {selector} for {need.role} but are not ready or are cordoned; bring one back",
        )
    for device, count, reason, remedy in _wanted(need):
        enough = [node for node in usable if node.device(device) >= count]
        if not enough:
            best = max(usable, key=lambda node: node.device(device))
            return Verdict(
                False,
                reason,
                f"each {need.role} pod needs {count} {device}, and {_names(usable)} advertise {best.device(device)} at "
                f"most; {remedy}",
            )
        usable = enough
    return usable


def _wanted(need: _Need) -> list[tuple[str, int, Reason, str]]:
    wanted = [
        (
            GPU,
            need.gpus,
            Reason.TOO_FEW_GPUS,
            f"install the NVIDIA device plugin there, or lower spec.{need.role}.gpus",
        ),
        (
            EFA,
            need.efa,
            Reason.TOO_FEW_EFA_DEVICES,
            "install the EFA device plugin (it must know this instance type) and launch the nodes with all EFA "
            "interfaces, or lower spec.hardware.efaPerGPU",
        ),
    ]
    return [entry for entry in wanted if entry[1] > 0]


def _names(nodes: Sequence[NodeRecord]) -> str:
    names = sorted(node.name for node in nodes)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def _list(words: Sequence[str]) -> str:
    return ", ".join(word or "an unnamed zone" for word in words)
