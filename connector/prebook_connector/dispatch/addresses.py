"""Addresses of peers and the setting that says where they come from, as text. Pure.

An address is ``host:port`` with the host as an IP where discovery gives one; IPv6 is written in brackets. A source is
``dns:///host:port``, ``static:///a:1,b:2`` or ``file:///path``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):(\d{1,5})")


@dataclass(frozen=True)
class DnsSpec:
    """All addresses that ``host`` has, each with ``port``."""

    host: str
    port: int


@dataclass(frozen=True)
class StaticSpec:
    """These addresses."""

    addresses: tuple[str, ...]


@dataclass(frozen=True)
class FileSpec:
    """The addresses in a file, a JSON list."""

    path: str


SourceSpec = DnsSpec | StaticSpec | FileSpec


def is_address(text: str) -> bool:
    """Whether ``text`` is ``host:port`` with a port that exists."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 0 < int(match[2]) < 65536


def parse_source(text: str) -> SourceSpec:
    """What a ``peers`` setting names. Raises ValueError with what is wrong."""
    scheme, found, rest = text.partition(":///")
    if not found:
        raise ValueError(f"peers: {text!r} is none of dns:///host:port, static:///a:1,b:2, file:///path")
    if scheme == "static":
        addresses = [part.strip() for part in rest.split(",") if part.strip()]
        if wrong := next((item for item in addresses if not is_address(item)), None):
            raise ValueError(f"peers: {wrong!r} is not host:port")
        return StaticSpec(tuple(addresses))
    if scheme == "file":
        return FileSpec("/" + rest)
    if scheme == "dns":
        if not is_address(rest):
            raise ValueError(f"peers: {rest!r} is not host:port")
        host, _, port = rest.rpartition(":")
        return DnsSpec(host.strip("[]"), int(port))
    raise ValueError(f"peers: unknown scheme {scheme!r}; use dns, static or file")
