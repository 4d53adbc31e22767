"""A few lines of HTTPS and JSON: what fixtures and tests ask of the API server themselves."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

Json = dict[str, Any]
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


class ApiError(RuntimeError):
    """The API server answered with an error status."""

    def __init__(self, method: str, path: str, status: int, body: str) -> None:
        super().__init__(f"{method} {path}: {status} {body[:600]}")
        self.status = status
        self.body = body


@dataclass(frozen=True)
class Rest:
    """Calls one API server with a bearer token. Each call has a connection of its own, so any thread may call."""

    host: str
    port: int
    token: str
    ca: Path
    timeout: float = 30.0

    def text(
        self, method: str, path: str, body: object = None, *, query: Mapping[str, str] | None = None, content: str = ""
    ) -> str:
        """Send a request, return the body. Raises ApiError for statuses from 400, OSError when nobody answers."""
        context = ssl.create_default_context(cafile=str(self.ca))
        connection = http.client.HTTPSConnection(self.host, self.port, timeout=self.timeout, context=context)
        headers = {"Authorization": f"Bearer {self.token}", "Accept": "application/json, */*"}
        if body is not None:
            headers["Content-Type"] = content or "application/json"
        target = f"{path}?{urlencode(query)}" if query else path
        try:
            connection.request(method, target, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        finally:
            connection.close()
        if response.status >= 400:
            raise ApiError(method, target, response.status, text)
        return text

    def get(self, path: str, **query: str) -> Json:
        """GET an object or a list."""
        return _object(self.text("GET", path, query=query))

    def exists(self, path: str) -> bool:
        """Whether GET finds something."""
        try:
            self.text("GET", path)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    def items(self, path: str, **query: str) -> list[Json]:
        """The items of a list."""
        items = self.get(path, **query)["items"]
        return list(items)

    def create(self, path: str, body: Json) -> Json:
        """POST an object to its collection."""
        return _object(self.text("POST", path, body))

    def merge(self, path: str, body: Json) -> Json:
        """JSON merge patch, also for a subresource such as `…/status`."""
        return _object(self.text("PATCH", path, body, content=MERGE_PATCH))

    def apply(self, path: str, body: Json, *, manager: str, force: bool = False) -> Json:
        """Server-side apply under a field manager."""
        query = {"fieldManager": manager, "force": str(force).lower()}
        return _object(self.text("PATCH", path, body, query=query, content=APPLY_PATCH))

    def delete(self, path: str, *, grace_seconds: int | None = None, propagation: str = "Background") -> None:
        """DELETE an object; absent is fine, since absent is what was wanted."""
        options: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        try:
            self.text("DELETE", path, options)
        except ApiError as error:
            if error.status != 404:
                raise


def _object(text: str) -> Json:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {text[:80]}")
    return value
