"""What the operator was started to allow beyond the restricted pod template."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Allow:
    """Permissions given on the operator's command line; all are off by default, because a model's author gets the
    pods' privileges."""

    host_path: bool = False
    """Volumes and caches in a folder of the node."""
    host_namespaces: bool = False
    """hostNetwork, hostPID, hostIPC."""
    privileged: bool = False
    """Privileged containers."""
    capabilities: frozenset[str] = frozenset()
    """Linux capabilities that may be added."""
    service_accounts: frozenset[str] = frozenset()
    """Foreign service accounts that pods may run under."""


NOTHING = Allow()
"""The default: the restricted template."""
