"""Observe: everything that is to be known about one model, in one place.

Most of it is in the cache already. Three things are fetched: whether the peer Secret exists (its metadata only, by
name, and remembered), what decode pods say about their pairs, and, for a set that lacks pods, the Events that say
why."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from prebook_operator.api import Role
from prebook_operator.cache import Cache
from prebook_operator.kube.client import KubeClient
from prebook_operator.kube.errors import Forbidden, NotFound
from prebook_operator.kube.resources import EVENT, SECRET, SERVICE, STATEFUL_SET
from prebook_operator.pairs import PairsReader, PodPairs
from prebook_operator.records import ChildRecord, Key, ModelRecord, NodeRecord, PodRecord, SetCounts
from prebook_operator.refusals import FAILED_CREATE, Refusal, newest_note

REFUSAL_FRESH: Final = 30.0
"""Seconds for which a known refusal is not asked for again; whether pods are still missing is known without asking."""
MAX_EVENTS: Final = 50
"""Events read about one set; its controller folds repetitions into one."""


class SecretState(Enum):
    """The peer Secret, by ownership."""

    ABSENT = auto()
    OURS = auto()
    FOREIGN = auto()


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One model as observed. `children` holds foreign objects that carry its label too; `sets`, `pods` and `front`
    only its own."""

    model: ModelRecord
    children: Mapping[tuple[str, str], ChildRecord]
    sets: Mapping[tuple[Role, str], SetCounts]
    pods: tuple[PodRecord, ...]
    front: str
    role_replicas: Mapping[Role, int | None]
    nodes: tuple[NodeRecord, ...] | None
    secret: SecretState


class Observer:
    """Looks at models. `nodes_readable` is set false when the operator has no right to read nodes."""

    def __init__(
        self,
        cache: Cache,
        client: KubeClient,
        pairs: PairsReader,
        *,
        secret_recheck: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._client = client
        self._pairs = pairs
        self._recheck = secret_recheck
        self._clock = clock
        self._secrets: dict[str, float] = {}
        self._refusals: dict[str, tuple[float, str]] = {}
        self.nodes_readable = True

    async def observe(self, key: Key) -> Snapshot | None:
        """The model; None when it is gone or going, for then its objects are the garbage collector's. Raises
        KubeError."""
        model = self._cache.models.get(key)
        if model is None or model.deleting:
            return None
        children = dict(self._cache.children(key))
        own = {place: child for place, child in children.items() if child.owner == model.uid}
        sets = {
            (Role(child.role), child.revision): child.counts
            for child in own.values()
            if child.plural == STATEFUL_SET.plural and child.counts is not None and child.role and not child.deleting
        }
        set_uids = {child.uid for child in own.values() if child.plural == STATEFUL_SET.plural}
        front = own.get((SERVICE.plural, key.name))
        nodes = tuple(self._cache.nodes.values()) if model.names_hardware and self.nodes_readable else None
        return Snapshot(
            model=model,
            children=children,
            sets=sets,
            pods=tuple(pod for pod in self._cache.pods(key).values() if pod.owner in set_uids),
            front=front.selects if front is not None and not front.deleting else "",
            role_replicas={role: _role_replicas(own, role) for role in Role},
            nodes=nodes,
            secret=await self._secret(model),
        )

    async def pairs(self, snapshot: Snapshot, revision: str) -> dict[str, PodPairs]:
        """What the running decode pods of a revision say, by pod name."""
        asked = [
            pod
            for pod in snapshot.pods
            if pod.role == Role.DECODE.value
            and pod.revision == revision
            and pod.running
            and pod.ip
            and not pod.deleting
        ]
        return await self._pairs.read(asked) if asked else {}

    async def refusals(self, snapshot: Snapshot, revision: str) -> tuple[Refusal, ...]:
        """Why sets of a revision lack pods, as far as Events tell; asks only about sets that do. Raises RetryLater."""
        found = []
        for child in snapshot.children.values():
            if child.owner != snapshot.model.uid or child.deleting or child.revision != revision:
                continue
            if child.counts is None or not child.counts.current:
                continue  # no set, or its controller has not looked at it yet
            if sum(1 for pod in snapshot.pods if pod.owner == child.uid) >= child.counts.desired:
                self._refusals.pop(child.uid, None)
                continue
            note = await self._refusal(child, snapshot.model.key.namespace)
            if note:
                found.append(Refusal(role=Role(child.role), set_name=child.name, note=note))
        return tuple(sorted(found, key=lambda refusal: refusal.set_name))

    async def _refusal(self, child: ChildRecord, namespace: str) -> str:
        until, known = self._refusals.get(child.uid, (float("-inf"), ""))
        if self._clock() < until:
            return known
        fields = {"regarding.uid": child.uid, "reason": FAILED_CREATE}
        try:
            events = await self._client.list_some(EVENT, namespace=namespace, fields=fields, limit=MAX_EVENTS)
        except Forbidden as error:
            return f"the reason cannot be told, for the operator may not list Events ({error.message})"
        note = newest_note(events)
        if note:
            self._refusals[child.uid] = (self._clock() + REFUSAL_FRESH, note)
        return note

    def secret_made(self, model: ModelRecord) -> None:
        """We have just made the model's Secret."""
        self._secrets[model.uid] = self._clock() + self._recheck

    def forget(self, uid: str) -> None:
        """The model is gone."""
        self._secrets.pop(uid, None)
        self._refusals = {one: entry for one, entry in self._refusals.items() if entry[0] > self._clock()}

    async def _secret(self, model: ModelRecord) -> SecretState:
        if self._clock() < self._secrets.get(model.uid, float("-inf")):
            return SecretState.OURS
        if not int(model.parsed_status().get("observedGeneration") or 0):
            # Never reported on, so most likely brand-new: creating it and being told that it exists costs no more
            # than asking first.
            return SecretState.ABSENT
        return await self.look_at_secret(model)

    async def look_at_secret(self, model: ModelRecord) -> SecretState:
        """Asks the API server. Raises KubeError."""
        name = secret_name(model.key)
        try:
            metadata = await self._client.get_metadata(SECRET, namespace=model.key.namespace, name=name)
        except NotFound:
            return SecretState.ABSENT
        owners = metadata.get("ownerReferences") or ()
        if any(owner.get("uid") == model.uid for owner in owners):
            self.secret_made(model)
            return SecretState.OURS
        return SecretState.FOREIGN


def secret_name(key: Key) -> str:
    """Name of a model's peer Secret; `render.names.secret_name` is the same for a parsed model."""
    return f"{key.name}-peer-token"


def _role_replicas(own: Mapping[tuple[str, str], ChildRecord], role: Role) -> int | None:
    found = (child.role_replicas for child in own.values() if child.plural == "modelroles" and child.role == role.value)
    return next(found, None)
