"""Probes as a kubelet runs them: one check by HTTP, TCP or command, and the counting of successes and failures
(pure).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum

from prebook_operator.local.errors import UserError
from prebook_operator.local.httpclient import HttpError, request
from prebook_operator.local.kube import Container, HttpGet, Probe, TcpSocket

RunCommand = Callable[[list[str], float], Awaitable[tuple[int | None, str]]]


@dataclass(frozen=True)
class Outcome:
    """Result of one check, with a reason that people can read."""

    ok: bool
    reason: str


class Verdict(StrEnum):
    """What the counted results say."""

    UNKNOWN = "unknown"
    SUCCESS = "success"
    FAILURE = "failure"


@dataclass
class ProbeCounter:
    """Consecutive results against the probe's thresholds; the verdict changes only when a threshold is reached."""

    probe: Probe
    verdict: Verdict = Verdict.UNKNOWN
    reason: str = "not checked yet"
    _run: int = field(default=0, repr=False)
    _last_ok: bool | None = field(default=None, repr=False)

    def record(self, outcome: Outcome) -> Verdict:
        """Counts one result and returns the verdict after it."""
        self._run = self._run + 1 if outcome.ok == self._last_ok else 1
        self._last_ok = outcome.ok
        self.reason = outcome.reason
        if outcome.ok and self._run >= self.probe.success_threshold:
            self.verdict = Verdict.SUCCESS
        elif not outcome.ok and self._run >= self.probe.failure_threshold:
            self.verdict = Verdict.FAILURE
        return self.verdict


async def check(probe: Probe, *, container: Container, ip: str, run_command: RunCommand) -> Outcome:
    """One check within the probe's timeout; never raises for a target that is down."""
    try:
        async with asyncio.timeout(probe.timeout_seconds):
            if probe.http_get is not None:
                return await _http(probe.http_get, container=container, ip=ip)
            if probe.tcp_socket is not None:
                return await _tcp(probe.tcp_socket, container=container, ip=ip)
            if probe.exec is not None:
                status, output = await run_command(probe.exec.command, probe.timeout_seconds)
                return Outcome(ok=status == 0, reason=f"command ended with status {status}: {output[-300:]}".strip())
    except TimeoutError:
        return Outcome(ok=False, reason=f"no answer within {probe.timeout_seconds:g} s")
    raise UserError(
        f"container {container.name}: a probe without httpGet, tcpSocket or exec is not supported by the local runner"
    )


def resolve_port(port: int | str, *, container: Container) -> int:
    """A port number, or the number of the container port with that name; raises ``UserError`` for an unknown name."""
    if isinstance(port, int):
        return port
    if port.isdigit():
        return int(port)
    for candidate in container.ports:
        if candidate.name == port:
            return candidate.container_port
    raise UserError(f"container {container.name} has no port named {port!r}")


async def _http(action: HttpGet, *, container: Container, ip: str) -> Outcome:
    port = resolve_port(action.port, container=container)
    headers = {header.name: header.value for header in action.http_headers}
    try:
        async with request("GET", host=action.host or ip, port=port, path=action.path, headers=headers) as response:
            status = response.status
            detail = "" if status < 400 else (await response.body())[:300].decode(errors="replace")
    except HttpError as error:
        return Outcome(ok=False, reason=str(error))
    return Outcome(ok=200 <= status < 400, reason=f"HTTP {status} {detail}".strip())


async def _tcp(action: TcpSocket, *, container: Container, ip: str) -> Outcome:
    port = resolve_port(action.port, container=container)
    try:
        _, writer = await asyncio.open_connection(action.host or ip, port)
    except OSError as error:
        return Outcome(ok=False, reason=f"cannot connect to port {port}: {error.strerror or error}")
    writer.close()
    return Outcome(ok=True, reason=f"port {port} is open")
