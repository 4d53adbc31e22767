"""A few lines of API server for unit tests: objects by path, resource versions, preconditions. Proves nothing about
Kubernetes; the API-server tier does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from prebook_operator.kube.transport import Request, Response


class FakeServer:
    """Stores what it is sent. `answer` may be set to reply in its place."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.requests: list[Request] = []
        self.answer: Callable[[Request], Response | None] = lambda _request: None
        self._version = 10

    async def send(self, request: Request) -> Response:
        self.requests.append(request)
        return self.answer(request) or self._serve(request)

    async def close(self) -> None:
        return

    def _serve(self, request: Request) -> Response:
        if request.method == "POST":
            path = f"{request.path}/{request.body['metadata']['name']}"  # type: ignore[index]
            return respond(409, {"message": "exists"}) if path in self.objects else self._store(path, request.body, 201)
        known = self.objects.get(request.path)
        if known is None:
            return respond(404, {"message": "not found"})
        if request.method == "GET":
            return respond(200, known)
        if request.method == "PUT":
            given = request.body["metadata"].get("resourceVersion")  # type: ignore[index]
            if given not in (None, known["metadata"]["resourceVersion"]):
                return respond(409, {"message": "modified"})
            return self._store(request.path, request.body, 200)
        return respond(405, {"message": "not here"})

    def _store(self, path: str, body: Any, status: int) -> Response:
        self._version += 1
        stored = json.loads(json.dumps(body))
        stored["metadata"]["resourceVersion"] = str(self._version)
        self.objects[path] = stored
        return respond(status, stored)


def respond(status: int, body: Any, **headers: str) -> Response:
    """A JSON response."""
    return Response(status=status, headers=headers, body=json.dumps(body).encode())
