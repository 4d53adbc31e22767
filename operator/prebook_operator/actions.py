"""From intent and observation to the list of writes: pure, so that "the steady state writes nothing" is a property of
a function."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from prebook_operator.kube.fields import digest, intent_body
from prebook_operator.kube.resources import CHILDREN, PERMANENT, STATEFUL_SET, Resource, resource_of
from prebook_operator.kube.transport import JsonObject
from prebook_operator.records import ChildRecord, split_body

_BY_PLURAL: Final = {resource.plural: resource for resource in CHILDREN}


class Verb(StrEnum):
    """What to do with one object."""

    CREATE = "create"
    UPDATE = "update"
    CHECK_TEMPLATE = "check-template"
    DELETE = "delete"


@dataclass(frozen=True, kw_only=True)
class Action:
    """One write. `record` is what is known of the object, None only for CREATE; `intent` is None only for DELETE."""

    verb: Verb
    resource: Resource
    name: str
    intent: JsonObject | None = None
    record: ChildRecord | None = None


@dataclass(frozen=True, kw_only=True)
class Agenda:
    """Writes in the order in which they are to be sent, and objects that are in the way: of our name, but somebody
    else's."""

    actions: tuple[Action, ...]
    foreign: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of an intent, comparable to those of a ChildRecord."""

    owned: bytes
    template: bytes | None


def digests_of(intent: JsonObject) -> Digests:
    """Digests of the fields that an intent sets."""
    body = intent_body(intent)
    if resource_of(intent) is not STATEFUL_SET:
        return Digests(digest(body), None)
    rest, template = split_body(body)
    return Digests(digest(rest), digest(template))


def agenda(
    intents: Sequence[JsonObject],
    children: Mapping[tuple[str, str], ChildRecord],
    *,
    owner: str,
    keep_revisions: Collection[str],
    equivalent: Collection[tuple[bytes | None, bytes | None]] = (),
) -> Agenda:
    """Compares intents with what exists.

    `owner` is the model's UID. Children of `keep_revisions` stay even without an intent, and so do kinds that live as
    long as the model. `equivalent` are pairs of
    digests, live and intended, that differ but are known to need no write."""
    actions: list[Action] = []
    foreign: list[str] = []
    wanted: set[tuple[str, str]] = set()
    for intent in intents:
        resource, name = resource_of(intent), str(intent["metadata"]["name"])
        wanted.add((resource.plural, name))
        record = children.get((resource.plural, name))
        if record is None:
            actions.append(Action(verb=Verb.CREATE, resource=resource, name=name, intent=intent))
        elif record.owner != owner:
            foreign.append(describe(resource, name))
        elif not record.deleting and (verb := _difference(intent, record, equivalent)) is not None:
            actions.append(Action(verb=verb, resource=resource, name=name, intent=intent, record=record))
    for place, record in children.items():
        surplus = place not in wanted and record.owner == owner and not record.deleting
        resource = _BY_PLURAL[record.plural]
        if surplus and resource not in PERMANENT and not (record.revision and record.revision in keep_revisions):
            actions.append(Action(verb=Verb.DELETE, resource=resource, name=record.name, record=record))
    return Agenda(actions=tuple(actions), foreign=tuple(sorted(foreign)))


def _difference(
    intent: JsonObject, record: ChildRecord, equivalent: Collection[tuple[bytes | None, bytes | None]]
) -> Verb | None:
    wanted = digests_of(intent)
    if record.owned != wanted.owned and (record.owned, wanted.owned) not in equivalent:
        return Verb.UPDATE
    if record.template != wanted.template and (record.template, wanted.template) not in equivalent:
        return Verb.CHECK_TEMPLATE
    return None


def describe(resource: Resource, name: str) -> str:
    """An object, for people."""
    return f"{resource.kind} {name}"
