"""The API server's own record of what it was asked: the evidence for "no writes in steady state"."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MUTATING = frozenset({"create", "update", "patch", "delete", "deletecollection"})


@dataclass(frozen=True)
class Request:
    """One request. `resource` includes a subresource (`pods/status`); `agent` is the client's User-Agent; `received`
    is a moment of RFC 3339 in microseconds."""

    verb: str
    user: str
    agent: str
    group: str
    resource: str
    namespace: str
    name: str
    status: int
    uri: str
    audit_id: str
    received: str

    @property
    def mutating(self) -> bool:
        """Whether the request may change something."""
        return self.verb in MUTATING


class AuditLog:
    """Reads an audit log; positions are byte offsets, so that a test can look at what came after a moment."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def position(self) -> int:
        """The end of the log now."""
        return self.path.stat().st_size if self.path.exists() else 0

    def requests(self, *, since: int = 0, user: str | None = None) -> list[Request]:
        """Finished requests after a position, optionally of one user (`system:serviceaccount:NAMESPACE:NAME`)."""
        return [request for request in self._read(since) if user is None or request.user == user]

    def by_verb(self, *, since: int = 0, user: str | None = None) -> Counter[str]:
        """Number of requests by verb."""
        return Counter(request.verb for request in self.requests(since=since, user=user))

    def writes(self, *, since: int = 0, user: str | None = None) -> list[Request]:
        """The mutating requests."""
        return [request for request in self.requests(since=since, user=user) if request.mutating]

    def _read(self, since: int) -> Iterator[Request]:
        if not self.path.exists():
            return
        seen: set[str] = set()
        with self.path.open("rb") as log:
            log.seek(since)
            for line in log:
                if not line.endswith(b"\n"):
                    return  # the server is writing this line
                event: dict[str, Any] = json.loads(line)
                # A watch is logged when it starts and when it ends; it is one request.
                if event["auditID"] not in seen:
                    seen.add(event["auditID"])
                    yield _request(event)


def _request(event: dict[str, Any]) -> Request:
    target = event.get("objectRef", {})
    resource, sub = target.get("resource", ""), target.get("subresource")
    return Request(
        verb=event["verb"],
        user=event["user"].get("username", ""),
        agent=event.get("userAgent", ""),
        group=target.get("apiGroup", ""),
        resource=f"{resource}/{sub}" if sub else resource,
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        status=event.get("responseStatus", {}).get("code", 0),
        uri=event["requestURI"],
        audit_id=event["auditID"],
        received=event["requestReceivedTimestamp"],
    )
