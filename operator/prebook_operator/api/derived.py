"""What follows from a spec without asking anyone: defaults that depend on other fields. Used by validation, rendering
and admission alike."""

from __future__ import annotations

from prebook_operator.api.profiles import MACHINES, Machine
from prebook_operator.api.spec import Backend, DisaggregatedModelSpec, Role


def machine(spec: DisaggregatedModelSpec) -> Machine | None:
    """Devices of the chosen instance type; None for `none`."""
    return MACHINES.get(spec.hardware.profile)


def gpus(spec: DisaggregatedModelSpec, role: Role) -> int:
    """GPUs of each pod of `role`."""
    given = spec.role(role).gpus
    if given is not None:
        return given
    return spec.role(role).tensor_parallel_size if machine(spec) else 0


def efa_per_gpu(spec: DisaggregatedModelSpec) -> int:
    """EFA devices that go with each GPU; 0 when the profile has no fabric or the user wants none."""
    node = machine(spec)
    if node is None:
        return 0
    return node.efa_per_gpu if spec.hardware.efa_per_gpu is None else spec.hardware.efa_per_gpu


def efa_devices(spec: DisaggregatedModelSpec, role: Role) -> int:
    """EFA devices of each pod of `role`."""
    return gpus(spec, role) * efa_per_gpu(spec)


def uses_efa(spec: DisaggregatedModelSpec) -> bool:
    """Whether any pod gets EFA devices."""
    return any(efa_devices(spec, role) > 0 for role in Role)


def backend(spec: DisaggregatedModelSpec) -> Backend:
    """NIXL's transport."""
    return spec.transfer.backend or (Backend.LIBFABRIC if uses_efa(spec) else Backend.UCX)


def minimum_grace_seconds(spec: DisaggregatedModelSpec) -> int:
    """Shortest grace period in which a pod can drain its transfers, finish its requests, and outlive the leases that
    peers hold on it."""
    return spec.transfer.drain_seconds + spec.engine.shutdown_seconds + spec.transfer.lease_seconds


def pinned_replicas(spec: DisaggregatedModelSpec, role: Role) -> int | None:
    """Number of engines that the spec itself asks for; None when the ModelRole owns the number."""
    return spec.role(role).replicas
