"""The kinds that the operator touches, and the URL of each.

A fixed table instead of discovery: the operator's rights are a fixed table too (`rbac.py`), and a request saved at
every start is a request saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from prebook_operator.api.base import GROUP, VERSION


@dataclass(frozen=True, kw_only=True)
class Resource:
    """One served resource. `group` is empty for the core API."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """As written in manifests: `v1` or `apps/v1`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def prefix(self) -> str:
        """Path of the API group and version, without the resource."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, *, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Path of a collection, an object or a subresource."""
        parts = [self.prefix]
        if namespace is not None:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        if name is not None:
            parts.append(quote(name, safe=""))
        if subresource is not None:
            parts.append(subresource)
        return "/".join(parts)


MODEL: Final = Resource(group=GROUP, version=VERSION, plural="disaggregatedmodels", kind="DisaggregatedModel")
MODEL_ROLE: Final = Resource(group=GROUP, version=VERSION, plural="modelroles", kind="ModelRole")
STATEFUL_SET: Final = Resource(group="apps", version="v1", plural="statefulsets", kind="StatefulSet")
SERVICE: Final = Resource(group="", version="v1", plural="services", kind="Service")
SERVICE_ACCOUNT: Final = Resource(group="", version="v1", plural="serviceaccounts", kind="ServiceAccount")
SECRET: Final = Resource(group="", version="v1", plural="secrets", kind="Secret")
POD: Final = Resource(group="", version="v1", plural="pods", kind="Pod")
NODE: Final = Resource(group="", version="v1", plural="nodes", kind="Node", namespaced=False)
EVENT: Final = Resource(group="events.k8s.io", version="v1", plural="events", kind="Event")
LEASE: Final = Resource(group="coordination.k8s.io", version="v1", plural="leases", kind="Lease")
DISRUPTION_BUDGET: Final = Resource(
    group="policy", version="v1", plural="poddisruptionbudgets", kind="PodDisruptionBudget"
)
NETWORK_POLICY: Final = Resource(
    group="networking.k8s.io", version="v1", plural="networkpolicies", kind="NetworkPolicy"
)
CLAIM_TEMPLATE: Final = Resource(
    group="resource.k8s.io", version="v1", plural="resourceclaimtemplates", kind="ResourceClaimTemplate"
)
POD_MONITOR: Final = Resource(group="monitoring.coreos.com", version="v1", plural="podmonitors", kind="PodMonitor")

CHILDREN: Final = (
    SERVICE_ACCOUNT,
    SERVICE,
    NETWORK_POLICY,
    DISRUPTION_BUDGET,
    CLAIM_TEMPLATE,
    MODEL_ROLE,
    STATEFUL_SET,
    POD_MONITOR,
)
"""Kinds that are applied and watched. Secrets are neither: they are read by name and never listed."""

PERMANENT: Final = (SERVICE_ACCOUNT, MODEL_ROLE)
"""Children of which a model has the same ones all its life: the operator never deletes any, and may not."""

OPTIONAL: Final = (CLAIM_TEMPLATE, POD_MONITOR)
"""Kinds that a cluster may lack."""

BY_KIND: Final = {
    (resource.api_version, resource.kind): resource for resource in (*CHILDREN, SECRET, MODEL, POD, NODE, EVENT, LEASE)
}


def resource_of(manifest: dict[str, object]) -> Resource:
    """The resource of a manifest. Raises KeyError for a kind that the operator does not manage."""
    return BY_KIND[(str(manifest.get("apiVersion")), str(manifest.get("kind")))]
