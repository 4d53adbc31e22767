"""Where the pods of a role may run, and next to what."""

from __future__ import annotations

from typing import Final

from prebook_operator.api import derived
from prebook_operator.api.profiles import HardwareProfile
from prebook_operator.api.resources import DisaggregatedModel
from prebook_operator.api.spec import Role
from prebook_operator.render.names import MODEL_LABEL, REVISION_LABEL, revision_selector
from prebook_operator.render.types import Manifest

HOST: Final = "kubernetes.io/hostname"
ZONE: Final = "topology.kubernetes.io/zone"
CLOSEST_SWITCH: Final = "topology.k8s.aws/network-node-layer-3"
INSTANCE_TYPE: Final = "node.kubernetes.io/instance-type"
NODE_GROUP: Final = "eks.amazonaws.com/nodegroup"


def node_selector(model: DisaggregatedModel, role: Role) -> Manifest:
    """Node labels that the pods of `role` ask for; the user's win over the derived ones."""
    spec = model.spec
    selector: Manifest = {}
    if spec.hardware.profile is not HardwareProfile.NONE:
        selector[INSTANCE_TYPE] = spec.hardware.profile.value
    group = spec.hardware.node_groups.prefill if role is Role.PREFILL else spec.hardware.node_groups.decode
    if group:
        selector[NODE_GROUP] = group
    return {**selector, **spec.role(role).node_selector, **spec.role(role).template.pod.node_selector}


def tolerations(model: DisaggregatedModel, role: Role) -> list[Manifest]:
    """Taints of GPU and EFA nodes, then the user's."""
    spec = model.spec
    own: list[Manifest] = []
    if derived.gpus(spec, role) > 0:
        own.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
    if derived.efa_devices(spec, role) > 0:
        own.append({"key": "vpc.amazonaws.com/efa", "operator": "Exists", "effect": "NoSchedule"})
    given = [*spec.role(role).tolerations, *spec.role(role).template.pod.tolerations]
    return [*own, *(toleration.to_wire() for toleration in given)]


def affinity(model: DisaggregatedModel, role: Role, rev8: str) -> Manifest:
    """With EFA: one zone for both roles, close switches preferred. Always: prefill and decode on different hosts
    preferred.

    The zone term matches the pods of both roles of the revision, so the first pod, which matches itself, may be
    placed anywhere, and all others follow it. EFA cannot cross zones, and pods of one host may have no loopback
    between their EFA devices.
    """
    terms: Manifest = {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                _weighted(100, revision_selector(model, role.other, rev8), HOST)
            ]
        }
    }
    if derived.uses_efa(model.spec):
        everyone = {MODEL_LABEL: model.name, REVISION_LABEL: rev8}
        terms["podAffinity"] = {
            "requiredDuringSchedulingIgnoredDuringExecution": [_term(everyone, ZONE)],
            "preferredDuringSchedulingIgnoredDuringExecution": [_weighted(50, everyone, CLOSEST_SWITCH)],
        }
    return terms


def topology_spread(model: DisaggregatedModel, role: Role, rev8: str) -> list[Manifest]:
    """Pods of one role over hosts, as far as possible."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": HOST,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": revision_selector(model, role, rev8)},
        }
    ]


def _term(match: Manifest, topology: str) -> Manifest:
    return {"labelSelector": {"matchLabels": match}, "topologyKey": topology}


def _weighted(weight: int, match: Manifest, topology: str) -> Manifest:
    return {"weight": weight, "podAffinityTerm": _term(match, topology)}
