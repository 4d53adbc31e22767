"""The error tree of the Kubernetes client: what to do about a failed call, not merely what its status code was.

    KubeError ├── RetryLater          nothing is wrong with the request: the server, the network or the moment is; try
    again after a pause ├── Refused             the server will refuse the same request for ever (422, 403, 400, 405,
    ...): retrying without a change is useless │   ├── Invalid         422 or 400: the object itself │   ├── Forbidden
    401 or 403: rights, quota or an admission policy │   └── NamespaceGone   the namespace is being deleted: nothing
    can be created in it any more ├── NotFound            404 ├── Conflict            409: a precondition (UID,
    resourceVersion) did not hold, or the object exists already ├── SchemaTooOld        the served schema of our own
    API lacks what this operator needs └── NotLeader           a write was attempted without a valid leader lease; it
    has not been sent

Bodies that come from the server are cut to a bounded length before they enter a message: they end up in logs and in
conditions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

MESSAGE_LIMIT: Final = 600
RETRY_STATUS: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_BEARER: Final = re.compile(r"(?i)(bearer\s+)\S+")


@dataclass(frozen=True, kw_only=True)
class Call:
    """The request that an error is about; a path only, for queries may be long."""

    method: str
    path: str

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class KubeError(Exception):
    """Base of everything that a call to the API server can end in, except an answer."""

    def __init__(self, message: str, *, call: Call | None = None, status: int | None = None) -> None:
        self.call = call
        self.status = status
        self.message = shorten(message)
        super().__init__(f"{call}: {self.message}" if call else self.message)


class RetryLater(KubeError):
    """The call may succeed later. `after` is the server's own Retry-After in seconds, if it gave one."""

    def __init__(
        self, message: str, *, call: Call | None = None, status: int | None = None, after: float | None = None
    ) -> None:
        super().__init__(message, call=call, status=status)
        self.after = after


class Refused(KubeError):
    """The server refuses this request and will go on refusing it."""


class Invalid(Refused):
    """422 or 400: the object is not acceptable."""


class Forbidden(Refused):
    """401 or 403: no right, no quota, or an admission policy."""


class NamespaceGone(Refused):
    """The namespace is terminating or gone."""


class NotFound(KubeError):
    """404."""


class Conflict(KubeError):
    """409: a precondition failed or the object exists."""


class SchemaTooOld(KubeError):
    """The API server serves a schema of our kinds that is older than this operator."""


class NotLeader(KubeError):
    """This process may not write now; the request was not sent."""


_BY_STATUS: Final[Mapping[int, type[KubeError]]] = {400: Invalid, 404: NotFound, 409: Conflict, 422: Invalid}


def shorten(text: str, *, limit: int = MESSAGE_LIMIT) -> str:
    """`text` on one line, without credentials, at most `limit` characters."""
    line = _BEARER.sub(r"\1***", " ".join(text.split()))
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def from_response(*, call: Call, status: int, headers: Mapping[str, str], body: bytes) -> KubeError:
    """The error for a response with a status of 400 or more. Never raises: a body that is no JSON is quoted, cut."""
    document = _document(body)
    message = str(document.get("message") or "") or body[:MESSAGE_LIMIT].decode("utf-8", "replace") or f"HTTP {status}"
    if status in RETRY_STATUS or status >= 500:
        return RetryLater(message, call=call, status=status, after=_retry_after(headers, document))
    if status in (401, 403):
        kind = NamespaceGone if _namespace_terminating(document) else Forbidden
        return kind(message, call=call, status=status)
    return _BY_STATUS.get(status, Refused)(message, call=call, status=status)


def _document(body: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _details(document: Mapping[str, Any]) -> Mapping[str, Any]:
    details = document.get("details")
    return details if isinstance(details, dict) else {}


def _retry_after(headers: Mapping[str, str], document: Mapping[str, Any]) -> float | None:
    given = headers.get("Retry-After") or _details(document).get("retryAfterSeconds")
    try:
        return max(0.0, float(given)) if given else None
    except (TypeError, ValueError):
        return None  # an HTTP date: our own back-off is as good


def _namespace_terminating(document: Mapping[str, Any]) -> bool:
    causes = _details(document).get("causes")
    return isinstance(causes, list) and any(
        isinstance(cause, dict) and cause.get("reason") == "NamespaceTerminating" for cause in causes
    )
