"""What the operator may do, and what its users may do: one table, in code, with a reason beside every line.

The chart's Roles and ClusterRoles are generated from this table (`hack/chart.py`), and the API-server tests run the
reconciler under exactly these rules. Nothing here does I/O. What the table refuses on purpose:

- no `list` or `watch` of Secrets: the operator reads the one Secret whose name it derived itself;
- no `update` of anything the operator owns: a write is a server-side apply (`patch`), a `create` that must not
  overwrite, or a `delete` with a UID precondition;
- no right on pods beyond watching them: pods are made and ended by StatefulSets;
- no right to write a `DisaggregatedModel` itself: only its status is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

GROUP = "prebook.dev"

READ = ("get", "list", "watch")
"""For people."""
FOLLOW = ("list", "watch")
"""What only the watch reads."""
KEEP = ("get", "list", "watch", "create", "patch")
"""Objects that live as long as their model: an apply that creates needs both `create` and `patch`, and `get` is the
look at an object that is in the way."""
OWN = (*KEEP, "delete")
"""Objects that come and go with a revision or a setting."""


class Reach(StrEnum):
    """Where a rule holds."""

    WATCHED = "watched"
    """In every watched namespace: a Role in each of them, or one ClusterRole when all namespaces are watched."""
    HOME = "home"
    """In the operator's own namespace only: always a Role."""
    CLUSTER = "cluster"
    """On cluster-scoped objects: a ClusterRole, left out where only Roles are wanted."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One line of the operator's rights.

    `resources` are plural names within the API group `group` ("" is the core group); `names` limits the rule to
    objects of these names. `why` is shown beside the rule in the generated chart.
    """

    reach: Reach
    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    why: str
    names: tuple[str, ...] = ()

    def manifest(self) -> dict[str, Any]:
        """This rule as an entry of `rules` in a Role."""
        rule: dict[str, Any] = {
            "apiGroups": [self.group],
            "resources": list(self.resources),
            "verbs": list(self.verbs),
        }
        if self.names:
            rule["resourceNames"] = list(self.names)
        return rule


OPERATOR: tuple[Rule, ...] = (
    Rule(
        reach=Reach.WATCHED,
        group=GROUP,
        resources=("disaggregatedmodels",),
        verbs=FOLLOW,
        why="the source of intent; never written",
    ),
    Rule(
        reach=Reach.WATCHED,
        group=GROUP,
        resources=("disaggregatedmodels/status", "modelroles/status"),
        verbs=("patch",),
        why="conditions and counts",
    ),
    Rule(
        reach=Reach.WATCHED,
        group=GROUP,
        resources=("disaggregatedmodels/finalizers",),
        verbs=("update",),
        why="owner references that block deletion, where the admission plugin asks for it; no finalizer is set",
    ),
    Rule(
        reach=Reach.WATCHED,
        group=GROUP,
        resources=("modelroles",),
        verbs=KEEP,
        why="the stable scale targets of a model; they end with it, by garbage collection",
    ),
    Rule(
        reach=Reach.WATCHED,
        group="apps",
        resources=("statefulsets",),
        verbs=OWN,
        why="one per role and revision",
    ),
    Rule(
        reach=Reach.WATCHED,
        group="",
        resources=("services",),
        verbs=OWN,
        why="front Service, and headless ones by role and revision",
    ),
    Rule(
        reach=Reach.WATCHED,
        group="",
        resources=("serviceaccounts",),
        verbs=KEEP,
        why="the engines' account without a token; it ends with the model, by garbage collection",
    ),
    Rule(
        reach=Reach.WATCHED,
        group="",
        resources=("secrets",),
        verbs=("get", "create"),
        why="the peer token, by name, made once; secrets are never listed, watched or changed",
    ),
    Rule(
        reach=Reach.WATCHED,
        group="",
        resources=("pods",),
        verbs=FOLLOW,
        why="what runs, what pods say about pairing, and why they ended",
    ),
    Rule(
        reach=Reach.WATCHED,
        group="policy",
        resources=("poddisruptionbudgets",),
        verbs=OWN,
        why="for roles with two replicas or more",
    ),
    Rule(
        reach=Reach.WATCHED,
        group="networking.k8s.io",
        resources=("networkpolicies",),
        verbs=OWN,
        why="side channel and prefill legs between a model's own pods only",
    ),
    Rule(
        reach=Reach.WATCHED,
        group="resource.k8s.io",
        resources=("resourceclaimtemplates",),
        verbs=OWN,
        why="EFA and GPU claims when spec.hardware.devices is DRA",
    ),
    Rule(
        reach=Reach.WATCHED,
        group="monitoring.coreos.com",
        resources=("podmonitors",),
        verbs=OWN,
        why="when a model asks for a PodMonitor and the CRD is there",
    ),
    Rule(
        reach=Reach.WATCHED,
        group="events.k8s.io",
        resources=("events",),
        verbs=("create", "list"),
        why="what happened to a model, for kubectl describe; listed only to learn why a set's pods are refused",
    ),
    Rule(
        reach=Reach.HOME,
        group="coordination.k8s.io",
        resources=("leases",),
        verbs=("get", "create", "update"),
        why="leader election; an update with a resourceVersion, for two replicas race for it",
    ),
    Rule(
        reach=Reach.CLUSTER,
        group="",
        resources=("nodes",),
        verbs=FOLLOW,
        why="FabricReady: which nodes have enough GPUs and EFA devices in one zone",
    ),
)


class UserRole(StrEnum):
    """The built-in roles that Prebook's user roles aggregate to."""

    VIEW = "view"
    EDIT = "edit"
    ADMIN = "admin"


@dataclass(frozen=True, kw_only=True)
class UserRule:
    """One line of what people may do.

    Each role is aggregated into the built-in role of the same name; of those, edit holds view and admin holds edit.
    """

    role: UserRole
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    why: str

    def manifest(self) -> dict[str, Any]:
        """This rule as an entry of `rules` in a ClusterRole."""
        return {"apiGroups": [GROUP], "resources": list(self.resources), "verbs": list(self.verbs)}


WRITE = ("create", "update", "patch", "delete", "deletecollection")

USERS: tuple[UserRule, ...] = (
    UserRule(
        role=UserRole.VIEW,
        resources=("disaggregatedmodels", "disaggregatedmodels/status", "modelroles", "modelroles/status"),
        verbs=READ,
        why="see models, why they do not serve, and their roles",
    ),
    UserRule(
        role=UserRole.VIEW,
        resources=("modelroles/scale",),
        verbs=("get",),
        why="see the size of a role",
    ),
    UserRule(
        role=UserRole.EDIT,
        resources=("disaggregatedmodels",),
        verbs=WRITE,
        why="run models",
    ),
    UserRule(
        role=UserRole.EDIT,
        resources=("modelroles/scale",),
        verbs=("update", "patch"),
        why="kubectl scale modelrole",
    ),
    UserRule(
        role=UserRole.ADMIN,
        resources=("modelroles",),
        verbs=WRITE,
        why="the operator makes them; whoever owns the namespace may clear them up",
    ),
)


def operator_rules(*reaches: Reach) -> list[dict[str, Any]]:
    """The operator's rules of the given reaches, in table order, as entries of `rules`."""
    return [rule.manifest() for rule in OPERATOR if rule.reach in reaches]


def user_rules(role: UserRole) -> list[dict[str, Any]]:
    """The rules of one user role, as entries of `rules`."""
    return [rule.manifest() for rule in USERS if rule.role is role]
