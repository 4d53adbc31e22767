"""One HTTP request to the API server, and nothing else. The seam at which tests inject faults.

The official asynchronous client does the connection handling; its generated models are not used, for turning a
thousand objects into them and back costs more than all the rest of a reconciliation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client.rest import RESTClientObject

from prebook_operator.kube.auth import Credentials
from prebook_operator.kube.errors import Call, RetryLater

JsonObject = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request below the server's base URL. `timeout` covers the whole exchange, in seconds."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Any | None
    timeout: float


@dataclass(frozen=True, kw_only=True)
class Response:
    """The whole response; headers are case-insensitive."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> JsonObject:
        """The body as an object. Raises RetryLater when a proxy has answered with something else."""
        try:
            document = json.loads(self.body)
        except ValueError as error:
            raise RetryLater(f"the answer is not JSON: {error}", status=self.status) from error
        if not isinstance(document, dict):
            raise RetryLater("the answer is not a JSON object", status=self.status)
        return document


class Transport(Protocol):
    """Sends requests. Raises RetryLater when no complete answer came; an answer of any status is returned."""

    async def send(self, request: Request) -> Response:
        """One exchange."""
        ...

    async def close(self) -> None:
        """Ends all connections."""
        ...


class ClusterTransport:
    """Transport over the official client's connection pool. On 401 the credentials are read again, once per request."""

    def __init__(self, credentials: Credentials, *, user_agent: str) -> None:
        self._credentials = credentials
        self._user_agent = user_agent
        self._rest = RESTClientObject(credentials.configuration)

    async def send(self, request: Request) -> Response:
        """See Transport."""
        response = await self._exchange(request)
        if response.status == 401:
            await self._credentials.reload()
            stale, self._rest = self._rest, RESTClientObject(self._credentials.configuration)
            await stale.close()
            response = await self._exchange(request)
        return response

    async def _exchange(self, request: Request) -> Response:
        call = Call(method=request.method, path=request.path)
        headers = {"Accept": "application/json", "User-Agent": self._user_agent, **request.headers}
        query = f"?{urlencode(request.query)}" if request.query else ""
        try:
            authorization = await self._credentials.authorization()
            if authorization is not None:
                headers["Authorization"] = authorization
            answer = await self._rest.request(
                request.method,
                f"{self._credentials.server}{request.path}{query}",
                headers=headers,
                body=request.body,
                _request_timeout=aiohttp.ClientTimeout(total=request.timeout),
            )
            body = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            # Whether the server has acted is unknown. Every write is idempotent, so asking again is right either way.
            raise RetryLater(f"no answer: {type(error).__name__}: {error}", call=call) from error
        return Response(status=answer.status, headers=answer.headers, body=body or b"")

    async def close(self) -> None:
        """See Transport."""
        await self._rest.close()
