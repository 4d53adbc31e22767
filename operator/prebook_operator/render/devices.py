"""GPUs and EFA devices: extended resources of the device plugins, or a claim for dynamic resource allocation."""

from __future__ import annotations

from typing import Final

from prebook_operator.api import derived
from prebook_operator.api.resources import DisaggregatedModel
from prebook_operator.api.spec import Devices, Role
from prebook_operator.render.context import RenderContext
from prebook_operator.render.names import metadata, workload_name
from prebook_operator.render.types import Manifest, without_empty

GPU: Final = "nvidia.com/gpu"
EFA: Final = "vpc.amazonaws.com/efa"
CLAIM: Final = "devices"
"""Name of the claim within the pod."""


def uses_claim(model: DisaggregatedModel, role: Role) -> bool:
    """Whether the pods of `role` get devices through a ResourceClaimTemplate."""
    return model.spec.hardware.devices is Devices.DRA and derived.efa_devices(model.spec, role) > 0


def resources(model: DisaggregatedModel, role: Role) -> Manifest:
    """Resources of the engine container. Devices are exclusive: requests and limits are equal."""
    given = model.spec.role(role).template.engine.resources
    devices = _extended_resources(model, role)
    return without_empty(
        requests={**(given.requests if given else {}), **devices},
        limits={**(given.limits if given else {}), **devices},
        claims=[{"name": CLAIM}] if uses_claim(model, role) else None,
    )


def _extended_resources(model: DisaggregatedModel, role: Role) -> Manifest:
    spec = model.spec
    gpus, efa = derived.gpus(spec, role), derived.efa_devices(spec, role)
    claim = uses_claim(model, role)
    found: Manifest = {}
    if gpus and not (claim and spec.hardware.dra.gpu_device_class):
        found[GPU] = str(gpus)
    if efa and not claim:
        found[EFA] = str(efa)
    return found


def claim_template(model: DisaggregatedModel, ctx: RenderContext, role: Role, rev8: str) -> Manifest | None:
    """ResourceClaimTemplate for the pods of one role and revision; None with device plugins or without EFA."""
    if not uses_claim(model, role):
        return None
    name = workload_name(model, role, rev8)
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": metadata(model, ctx, name, role=role, rev8=rev8),
        "spec": {"spec": {"devices": _device_requests(model, role)}},
    }


def _device_requests(model: DisaggregatedModel, role: Role) -> Manifest:
    spec, dra = model.spec, model.spec.hardware.dra
    if dra.gpu_device_class is None:
        return {"requests": [_request("efa", dra.efa_device_class, derived.efa_devices(spec, role))]}
    requests: list[Manifest] = []
    constraints: list[Manifest] = []
    for index in range(derived.gpus(spec, role)):
        gpu, efa = f"gpu-{index}", f"efa-{index}"
        requests.append(_request(gpu, dra.gpu_device_class, 1))
        requests.append(_request(efa, dra.efa_device_class, derived.efa_per_gpu(spec)))
        constraints.append({"matchAttribute": dra.align_attribute, "requests": [gpu, efa]})
    return {"requests": requests, "constraints": constraints}


def _request(name: str, device_class: str, count: int) -> Manifest:
    return {"name": name, "exactly": {"deviceClassName": device_class, "allocationMode": "ExactCount", "count": count}}
