"""What rendering needs to know besides the model: who renders, and for where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from prebook_operator.api.allow import NOTHING, Allow
from prebook_operator.api.spec import Role

PeerSource = Callable[[str, int], str]
"""(headless Service, port) → address of the peer list, as dispatch understands it (dns:///…, static:///…, file:///…)."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The DisaggregatedModel that the objects belong to: garbage collection deletes them with it."""

    uid: str
    name: str


@dataclass(frozen=True, kw_only=True)
class RenderContext:
    """Everything that is not in the spec. `cluster_context` and the local runner make one."""

    namespace: str
    operator_image: str
    """Image of the init container that brings the connector."""
    bind_host: str = "0.0.0.0"
    """Address that the HTTP server binds; `$(POD_IP)` where pods share one network namespace."""
    peer_source: PeerSource
    owner: Owner | None = None
    """None renders objects without an owner, for people to read or to run locally."""
    allow: Allow = NOTHING
    has_pod_monitor: bool = False
    """Whether the cluster knows the kind PodMonitor."""
    peer_token: str | None = None
    """Token of the peer Secret; None leaves the Secret out, because it exists already and is made only once."""
    replicas: Mapping[Role, int] = field(default_factory=dict)
    """Engines wanted by role (`plan.desired_replicas`). A missing role takes the spec's number, or 1."""
    operator_namespace: str | None = None
    """Namespace of the operator, whose pods may ask engines for their status; None outside a cluster."""
    front_revision: str | None = None
    """Revision (rev8) that the front Service is limited to; None sends requests to ready decode pods of every
    revision."""
    timeline_dir: str | None = None
    """Folder in the engine's container that per-request timelines are written to; None writes none."""


def dns_peers(namespace: str) -> PeerSource:
    """Peers by the DNS name of a headless Service of `namespace`."""

    def source(service: str, port: int) -> str:
        return f"dns:///{service}.{namespace}.svc:{port}"

    return source


def cluster_context(
    namespace: str,
    *,
    operator_image: str,
    owner: Owner | None = None,
    allow: Allow = NOTHING,
    has_pod_monitor: bool = False,
    peer_token: str | None = None,
    replicas: Mapping[Role, int] | None = None,
    operator_namespace: str | None = None,
    front_revision: str | None = None,
) -> RenderContext:
    """The context for objects that go to an API server."""
    return RenderContext(
        namespace=namespace,
        operator_image=operator_image,
        peer_source=dns_peers(namespace),
        owner=owner,
        allow=allow,
        has_pod_monitor=has_pod_monitor,
        peer_token=peer_token,
        replicas=replicas or {},
        operator_namespace=operator_namespace,
        front_revision=front_revision,
    )
