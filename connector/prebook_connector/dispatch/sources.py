"""Reads peer addresses from DNS, a fixed list or a file (named as in :mod:`prebook_connector.dispatch.addresses`)."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from prebook_connector.dispatch.addresses import FileSpec, StaticSpec, is_address, parse_source

_MAX_ADDRESSES = 4096
_MAX_FILE = 1 << 20

Lookup = Callable[[str, int], Awaitable[list[str]]]


class SourceError(Exception):
    """The source gave no list this time; the message says why. The last list stays in force for a while."""


class Source(Protocol):
    """One way of discovery."""

    interval: float
    """Seconds between two reads."""

    async def read(self) -> list[str]:
        """The whole current list. Raises :class:`SourceError`."""
        ...


class StaticSource:
    """A list that never changes."""

    interval = 10.0

    def __init__(self, addresses: list[str]) -> None:
        self._addresses = addresses

    async def read(self) -> list[str]:
        """The list."""
        return list(self._addresses)


class FileSource:
    """A JSON list of addresses in a file, read when its modification time changes. A missing file is an empty list."""

    interval = 0.5

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._addresses: list[str] = []

    async def read(self) -> list[str]:
        """The list as the file has it now."""
        return await asyncio.to_thread(self._read)

    def _read(self) -> list[str]:
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
            if stamp != self._stamp:
                if status.st_size > _MAX_FILE:
                    raise SourceError(f"{self._path} is larger than {_MAX_FILE} bytes")
                self._addresses = _listed(json.loads(self._path.read_bytes()), str(self._path))
                self._stamp = stamp
        except FileNotFoundError:
            self._stamp, self._addresses = None, []
        except (OSError, ValueError, RecursionError) as error:
            raise SourceError(f"{self._path}: {type(error).__name__}") from error
        return list(self._addresses)


class DnsSource:
    """All addresses of a name, as a headless Service publishes them; resolved off the event loop."""

    def __init__(self, host: str, port: int, *, interval: float, lookup: Lookup | None = None) -> None:
        self._host = host
        self._port = port
        self._lookup = lookup or _getaddrinfo
        self.interval = interval

    async def read(self) -> list[str]:
        """The addresses that the name has now, each with the port."""
        try:
            async with asyncio.timeout(10.0):
                hosts = await self._lookup(self._host, self._port)
        except (OSError, TimeoutError, UnicodeError) as error:
            raise SourceError(f"{self._host}: {type(error).__name__}: {error}") from error
        if not hosts:
            raise SourceError(f"{self._host} has no addresses")
        unique = sorted(set(hosts))[:_MAX_ADDRESSES]
        return [f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}" for host in unique]


async def _getaddrinfo(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def _listed(value: object, where: str) -> list[str]:
    if not isinstance(value, list) or len(value) > _MAX_ADDRESSES:
        raise SourceError(f"{where}: expected a JSON list of at most {_MAX_ADDRESSES} addresses")
    wrong = next((item for item in value if not isinstance(item, str) or not is_address(item)), None)
    if wrong is not None:
        raise SourceError(f"{where}: {str(wrong)[:80]!r} is not host:port")
    return list(dict.fromkeys(value))


def open_source(text: str, *, resolve_interval: float) -> Source:
    """The source that a ``peers`` setting names. Raises ValueError with what is wrong."""
    spec = parse_source(text)
    if isinstance(spec, StaticSpec):
        return StaticSource(list(spec.addresses))
    if isinstance(spec, FileSpec):
        return FileSource(Path(spec.path))
    return DnsSource(spec.host, spec.port, interval=resolve_interval)
