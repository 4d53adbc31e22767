"""Services on this machine: which pod addresses stand behind one (pure), and the peers files that dispatchers read
in place of DNS.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from prebook_operator.local.errors import UserError
from prebook_operator.local.kube import ServicePort
from prebook_operator.local.workload import PodPlan, ServicePlan


def selected(service: ServicePlan, *, labels: Mapping[str, str]) -> bool:
    """Whether the Service's selector matches ``labels``; a Service without selector selects nothing."""
    selector = service.spec.selector
    return bool(selector) and all(labels.get(key) == value for key, value in selector.items())


def target_port(port: ServicePort, *, pod: PodPlan) -> int:
    """The container port behind a Service port; raises ``UserError`` for a name that the pod does not have."""
    target = port.target_port if port.target_port is not None else port.port
    if isinstance(target, int):
        return target
    if target.isdigit():
        return int(target)
    for container in pod.spec.containers:
        for candidate in container.ports:
            if candidate.name == target:
                return candidate.container_port
    raise UserError(f"pod {pod.name} has no port named {target!r}")


class PeersFiles:
    """One JSON file per headless Service: a list of ``"ip:port"``, replaced atomically and only when it changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports: dict[str, int] = {}
        self._written: dict[str, list[str]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def source(self, service: str, port: int) -> str:
        """The ``file://`` source of a Service's peers, for rendering; makes the file exist (empty) from then on."""
        self._ports[service] = port
        self.update(service, addresses=[])
        return f"file://{self._path(service)}"

    @property
    def services(self) -> Mapping[str, int]:
        """Service name → port of every source that was asked for."""
        return dict(self._ports)

    def update(self, service: str, *, addresses: Sequence[str]) -> bool:
        """Writes ``addresses`` (sorted ``ip``) of a Service; returns whether the file changed."""
        wanted = [f"{ip}:{self._ports[service]}" for ip in sorted(addresses)]
        if self._written.get(service) == wanted:
            return False
        path = self._path(service)
        fresh = path.with_suffix(".tmp")
        fresh.write_text(json.dumps(wanted))
        os.replace(fresh, path)
        self._written[service] = wanted
        return True

    def _path(self, service: str) -> Path:
        return self._folder / f"{service}.json"
