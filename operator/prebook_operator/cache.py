"""The operator's view of the cluster, fed by the watch and by the answers to its own writes.

Only records (see `records`), indexed by model, so that looking at one model never costs more when there are a
thousand. Not thread-safe: everything happens in the operator's event loop. Every method that changes something
returns the models whose picture has changed; an event that changes nothing, such as the echo of our own write or a
node's heartbeat, wakes nobody."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from prebook_operator.kube.progress import Scope
from prebook_operator.kube.resources import MODEL, NODE, POD
from prebook_operator.records import ChildRecord, Key, ModelRecord, NodeRecord, PodRecord

Name = TypeVar("Name")
Value = TypeVar("Value")
NOBODY: Final[frozenset[Key]] = frozenset()
Record = ModelRecord | ChildRecord | PodRecord | NodeRecord


@dataclass(frozen=True, slots=True)
class Seen:
    """One watch event. `owner` is the model that the object belongs to by its label; None for nodes."""

    plural: str
    owner: Key | None
    record: Record
    deleted: bool
    listed: bool


class Cache:
    """Records by model. `children` and `pods` hold foreign objects too; who owns an object is in its record."""

    def __init__(self) -> None:
        self.models: dict[Key, ModelRecord] = {}
        self.nodes: dict[str, NodeRecord] = {}
        self._children: dict[Key, dict[tuple[str, str], ChildRecord]] = {}
        self._pods: dict[Key, dict[str, PodRecord]] = {}
        self._relisting: dict[Scope, set[tuple[str, str]]] = {}

    def children(self, key: Key) -> dict[tuple[str, str], ChildRecord]:
        """Children of a model by (plural, name); empty for an unknown model."""
        return self._children.get(key, {})

    def pods(self, key: Key) -> dict[str, PodRecord]:
        """Pods of a model by name."""
        return self._pods.get(key, {})

    def objects(self) -> int:
        """Number of records, for the metric."""
        return (
            len(self.models)
            + len(self.nodes)
            + sum(map(len, self._children.values()))
            + sum(map(len, self._pods.values()))
        )

    def see(self, seen: Seen) -> frozenset[Key]:
        """Takes in a watch event."""
        if self._relisting and not seen.deleted:
            place = _place(seen.owner, seen.record)
            for scope in (Scope(seen.plural, None), Scope(seen.plural, place[0])):
                if scope in self._relisting:
                    self._relisting[scope].add(place)
        if seen.deleted:
            return self._remove(seen.plural, seen.owner, seen.record)
        return self.put(seen.plural, seen.owner, seen.record)

    def put(self, plural: str, owner: Key | None, record: Record) -> frozenset[Key]:
        """Takes in the newest state of an object, from a watch or from the answer to a write; an older state than the
        known one is ignored."""
        known = self._find(plural, owner, record)
        if known is not None and known.version >= record.version:
            return NOBODY
        self._store(owner, record)
        if known is not None and replace(known, version=record.version) == record:
            return NOBODY
        return self._affected(owner, record)

    def mark_deleting(self, owner: Key, record: ChildRecord) -> None:
        """Remembers that we have asked for the deletion, until the watch reports the end."""
        if self.children(owner).get((record.plural, record.name)) == record:
            self._store(owner, replace(record, deleting=True))

    def forget_child(self, owner: Key, record: ChildRecord) -> None:
        """Drops a record that a request has proved wrong."""
        self._remove(record.plural, owner, record)

    def forget_kind(self, plural: str) -> None:
        """The kind itself is gone, and all its objects with it."""
        for owner, record in list(self._all(plural)):
            self._remove(plural, owner, record)

    def begin_list(self, scope: Scope) -> None:
        """A full list starts; until `end_list`, what is met is noted."""
        self._relisting[scope] = set()

    def end_list(self, scope: Scope) -> frozenset[Key]:
        """The list is complete: whatever it did not contain was deleted while nobody was watching (410, a broken
        watch)."""
        met = self._relisting.pop(scope, None)
        if met is None:
            return NOBODY
        affected: set[Key] = set()
        for owner, record in list(self._all(scope.plural)):
            place = _place(owner, record)
            if scope.namespace in (None, place[0]) and place not in met:
                affected |= self._remove(scope.plural, owner, record)
        return frozenset(affected)

    def _all(self, plural: str) -> Iterator[tuple[Key | None, Record]]:
        if plural == MODEL.plural:
            yield from self.models.items()
        elif plural == NODE.plural:
            yield from ((None, node) for node in self.nodes.values())
        elif plural == POD.plural:
            yield from ((key, pod) for key, pods in self._pods.items() for pod in pods.values())
        else:
            yield from (
                (key, child)
                for key, children in self._children.items()
                for child in children.values()
                if child.plural == plural
            )

    def _find(self, plural: str, owner: Key | None, record: Record) -> Record | None:
        if isinstance(record, NodeRecord):
            return self.nodes.get(record.name)
        if owner is None:
            return None
        if isinstance(record, ModelRecord):
            return self.models.get(owner)
        if isinstance(record, PodRecord):
            return self.pods(owner).get(record.name)
        return self.children(owner).get((plural, record.name))

    def _store(self, owner: Key | None, record: Record) -> None:
        if isinstance(record, NodeRecord):
            self.nodes[record.name] = record
        elif owner is None:
            return
        elif isinstance(record, ModelRecord):
            self.models[owner] = record
        elif isinstance(record, PodRecord):
            self._pods.setdefault(owner, {})[record.name] = record
        else:
            self._children.setdefault(owner, {})[record.plural, record.name] = record

    def _remove(self, plural: str, owner: Key | None, record: Record) -> frozenset[Key]:
        known = self._find(plural, owner, record)
        if known is None or (known.version > record.version and not _same_object(known, record)):
            return NOBODY
        if isinstance(record, NodeRecord):
            del self.nodes[record.name]
        elif owner is None:
            return NOBODY
        elif isinstance(record, ModelRecord):
            del self.models[owner]
        elif isinstance(record, PodRecord):
            _drop(self._pods, owner, record.name)
        else:
            _drop(self._children, owner, (record.plural, record.name))
        return self._affected(owner, record)

    def _affected(self, owner: Key | None, record: Record) -> frozenset[Key]:
        if isinstance(record, NodeRecord):
            return frozenset(key for key, model in self.models.items() if model.names_hardware)
        return NOBODY if owner is None else frozenset((owner,))


def _drop(index: dict[Key, dict[Name, Value]], owner: Key, name: Name) -> None:
    index[owner].pop(name, None)
    if not index[owner]:
        del index[owner]


def _place(owner: Key | None, record: Record) -> tuple[str, str]:
    name = record.key.name if isinstance(record, ModelRecord) else record.name
    return (owner.namespace if owner else "", name)


def _same_object(known: Record, record: Record) -> bool:
    if isinstance(known, NodeRecord) or isinstance(record, NodeRecord):
        return True
    return known.uid == record.uid
