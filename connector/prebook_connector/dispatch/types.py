"""ASGI's types, spelled out here so that no module depends on a web framework for a type alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


def header(scope: Scope, name: bytes) -> str | None:
    """The first value of a request header (lower-case name), or None."""
    for key, value in scope.get("headers", ()):
        if key == name:
            return bytes(value).decode("latin-1")
    return None


def replaced(headers: Headers, **changes: str | None) -> Headers:
    """``headers`` with some set (string) or removed (None); names are given with underscores."""
    names = {name.replace("_", "-").encode(): value for name, value in changes.items()}
    kept = [(key, value) for key, value in headers if key.lower() not in names]
    return kept + [(name, value.encode("latin-1")) for name, value in names.items() if value is not None]
