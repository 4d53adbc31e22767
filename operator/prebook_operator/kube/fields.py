"""Do the fields that we own in a live object say what we intend? Answered without keeping either object.

The API server records, per field manager, which fields an object's last server-side apply set (`managedFields`,
format FieldsV1). The live object *projected* onto our own entry is what the server made of our last intent. Its
canonical digest is a few bytes, can be computed when the watch delivers the object, and equals the digest of the
intent as long as (a) the intent has not changed and (b) nobody has taken a field from us: a field that another
manager overwrites leaves our entry, so the projection shrinks and the digest changes. Fields of other managers
(defaults, an autoscaler, a sidecar injector) are not in the projection and never start a fight (failures:
kubernetes#118725, cert-manager#8793).

Two things the server does to values are undone on both sides before digesting: quantities are rewritten ("1024Mi"
becomes "1Gi"), and empty maps, lists and strings are dropped. Defaults inside atomic values are rendered in full by
`render/`; the API-server tests prove that every rendered object has equal digests on both sides."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from prebook_operator.api.base import quantity_value

MANAGER: Final = "prebook"
"""The one field manager of this operator."""

_EMPTY: Final[tuple[object, ...]] = (None, "", {}, [])
_QUANTITY_MAPS: Final = frozenset({"limits", "requests", "capacity", "hard"})
_QUANTITY_KEYS: Final = frozenset({"sizeLimit", "divisor"})
_ATOMIC_DEFAULTS: Final[Mapping[str, tuple[str, str]]] = {
    "fieldRef": ("apiVersion", "v1"),
    "resourceFieldRef": ("divisor", "0"),
}


def owned_fields(live: Mapping[str, Any], *, manager: str = MANAGER) -> Mapping[str, Any] | None:
    """Our apply entry (FieldsV1) in an object's managedFields; None when we have never applied it. Entries of
    subresources do not count."""
    for entry in (live.get("metadata") or {}).get("managedFields") or ():
        if entry.get("manager") == manager and entry.get("operation") == "Apply" and not entry.get("subresource"):
            fields = entry.get("fieldsV1")
            return fields if isinstance(fields, dict) else {}
    return None


def project(value: Any, fields: Mapping[str, Any]) -> Any:
    """The part of `value` that FieldsV1 `fields` covers. A leaf covers its whole value; lists keep the order of the
    live object."""
    children = {key: sub for key, sub in fields.items() if key != "."}
    if not children:
        return value
    if isinstance(value, list):
        return _project_list(value, children)
    if not isinstance(value, Mapping):
        return value
    projected: dict[str, Any] = {}
    for key, sub in children.items():
        name = key[2:]
        if key.startswith("f:") and name in value:
            projected[name] = project(value[name], sub)
    return projected


def _project_list(items: list[Any], children: Mapping[str, Any]) -> list[Any]:
    picked: dict[int, Any] = {}
    for key, sub in children.items():
        kind, _, text = key.partition(":")
        wanted = json.loads(text)
        for index, item in enumerate(items):
            if kind == "k" and isinstance(item, Mapping) and _has_key(item, wanted):
                picked[index] = project(item, sub)
            elif kind == "v" and item == wanted:
                picked[index] = item
    return [picked[index] for index in sorted(picked)]


def _has_key(item: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(item.get(name) == value for name, value in wanted.items())


def canonical(value: Any, *, key: str = "", parent: str = "") -> Any:
    """`value` with quantities in one spelling, known atomic defaults filled in, and empty members dropped. Items of
    lists are never dropped. Plain JSON types only: this is the hottest function of the operator."""
    if isinstance(value, dict):
        default = _ATOMIC_DEFAULTS.get(key)
        members = {default[0]: default[1], **value} if default else value
        cleaned = {}
        for name, member in members.items():
            made = canonical(member, key=name, parent=key)
            if made not in _EMPTY:
                cleaned[name] = made
        return cleaned
    if isinstance(value, list):
        return [canonical(item) for item in value]
    if parent in _QUANTITY_MAPS or key in _QUANTITY_KEYS:
        return _quantity(value)
    return value


def _quantity(value: Any) -> Any:
    try:
        return str(quantity_value(str(value)).normalize() + Decimal(0))
    except ValueError:
        return value


def digest(value: Any) -> bytes:
    """16 bytes that identify a JSON value in canonical form."""
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def intent_body(intent: Mapping[str, Any]) -> dict[str, Any]:
    """What of a manifest ends up in FieldsV1: everything except its identity."""
    body = {name: member for name, member in intent.items() if name not in ("apiVersion", "kind", "metadata")}
    metadata = {
        name: member
        for name, member in (intent.get("metadata") or {}).items()
        if name not in ("name", "namespace", "uid", "resourceVersion")
    }
    return {**body, "metadata": metadata}


def live_body(live: Mapping[str, Any]) -> dict[str, Any] | None:
    """The live object projected onto our own fields; None when we have never applied it."""
    fields = owned_fields(live)
    if fields is None:
        return None
    projected = project({name: member for name, member in live.items() if name not in ("apiVersion", "kind")}, fields)
    return dict(projected)
