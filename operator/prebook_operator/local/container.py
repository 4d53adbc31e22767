"""The life of one container: start, probes, restart with back-off, preStop and grace period. The kubelet's rules,
for ``restartPolicy: Always``.

Knows nothing about pods, volumes or other containers: argv, environment and hooks come ready to run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from prebook_operator.local.httpclient import HttpError, request
from prebook_operator.local.kube import Container, Handler, Probe
from prebook_operator.local.probes import ProbeCounter, Verdict, check, resolve_port
from prebook_operator.local.process import Command, LineSink, Process, run_to_end

_TAIL_LINES = 400
# After a failed probe: how many seconds the engine may take to end by itself before it is killed.
_PROBE_KILL_GRACE = 10.0


class Phase(StrEnum):
    """Where a container (or a pod) is in its life, as people see it."""

    PENDING = "Pending"
    INIT = "Init"
    STARTING = "Starting"
    RUNNING = "Running"
    READY = "Ready"
    BACKOFF = "BackOff"
    STOPPING = "Stopping"
    STOPPED = "Stopped"


@dataclass(frozen=True)
class RestartPolicy:
    """Back-off of restarts, in seconds. Shorter than a kubelet's (10 s … 5 min): somebody is watching."""

    first: float = 1.0
    longest: float = 60.0
    # A container that ran this long starts its back-off afresh (a kubelet's ten minutes).
    reset_after: float = 600.0

    def delay(self, crashes: int) -> float:
        """Seconds to wait before the start that follows crash number ``crashes`` (1, 2, …) in a row."""
        return min(self.longest, self.first * 2.0 ** min(crashes - 1, 30))


@dataclass(frozen=True)
class Prepared:
    """A container made ready for this machine: ``rewrite`` maps mount paths to folders in any text."""

    container: Container
    command: Command
    ip: str
    rewrite: Callable[[str], str]


@dataclass
class ContainerStatus:
    """What is known about a container now. ``since`` is on the monotonic clock, ``exit_status`` is of the last end."""

    phase: Phase = Phase.PENDING
    since: float = field(default_factory=time.monotonic)
    restarts: int = 0
    crashes_in_a_row: int = 0
    exit_status: int | None = None
    reason: str = ""
    ever_ready: bool = False
    pid: int | None = None


class ContainerRunner:
    """Runs one container until ``stop``; ``on_change`` is called after every change of ``status``."""

    def __init__(
        self, prepared: Prepared, *, policy: RestartPolicy, on_line: LineSink, on_change: Callable[[], None]
    ) -> None:
        self.prepared = prepared
        self.status = ContainerStatus()
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._policy = policy
        self._on_line = on_line
        self._on_change = on_change
        # Set while no process of this container exists.
        self.gone = asyncio.Event()
        self.gone.set()
        self._stopping = asyncio.Event()
        self._process: Process | None = None
        self._kill_reason = ""

    @property
    def ready(self) -> bool:
        """Whether the readiness probe says so."""
        return self.status.phase is Phase.READY

    async def run_init(self) -> bool:
        """Runs as an init container: repeats with back-off until it succeeds; False when ``stop`` came first."""
        while not self._stopping.is_set():
            if await self._run_once(probed=False) == 0:
                self._set(Phase.STOPPED, reason="done")
                return True
            await self._back_off(ran_for=0)
        return False

    async def run(self) -> None:
        """Runs the container, again and again, until ``stop``."""
        while not self._stopping.is_set():
            started = time.monotonic()
            await self._run_once(probed=True)
            if not self._stopping.is_set():
                await self._back_off(ran_for=time.monotonic() - started)
        self._set(Phase.STOPPED)

    async def stop(self, *, grace: float) -> None:
        """preStop, SIGTERM, and SIGKILL when ``grace`` seconds (counted from now, as in Kubernetes) have passed."""
        self._stopping.set()
        process = self._process
        if process is None:
            return
        self._set(Phase.STOPPING)
        await self._end(process, grace=grace)

    def kill(self) -> None:
        """Ends it now, without preStop and grace."""
        self._stopping.set()
        if self._process is not None:
            self._process.kill()

    async def run_command(self, argv: list[str], within: float) -> tuple[int | None, str]:
        """Runs a probe's or hook's command in the container's environment; returns its status (None: timed out) and
        output.
        """
        lines: list[str] = []
        command = Command(
            [self.prepared.rewrite(word) for word in argv], self.prepared.command.env, self.prepared.command.cwd
        )
        status = await run_to_end(command, within=within, on_line=lines.append)
        return status, "\n".join(lines)

    async def _run_once(self, *, probed: bool) -> int:
        self._kill_reason = ""
        self._set(Phase.STARTING)
        self.gone.clear()
        process = await Process.start(self.prepared.command, on_line=self._line)
        self._process = process
        self.status.pid = process.pid
        probing = asyncio.create_task(self._probe(process)) if probed else None
        if probing is not None:
            probing.add_done_callback(lambda task: _kill_on_error(task, process))
        if self._stopping.is_set():
            process.kill()
        try:
            status = await process.wait()
            self.status.exit_status = status
        finally:
            self._process = None
            self.status.pid = None
            process.kill()
            self.gone.set()
            if probing is not None:
                probing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await probing
        return status

    async def _back_off(self, *, ran_for: float) -> None:
        status = self.status
        status.restarts += 1
        status.crashes_in_a_row = 1 if ran_for > self._policy.reset_after else status.crashes_in_a_row + 1
        delay = self._policy.delay(status.crashes_in_a_row)
        reason = self._kill_reason or f"ended with status {status.exit_status}"
        self._set(Phase.BACKOFF, reason=f"{reason}; next start in {delay:g} s")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay)

    async def _probe(self, process: Process) -> None:
        container = self.prepared.container
        if container.startup_probe is not None:
            counter = await self._until_verdict(container.startup_probe)
            if counter.verdict is Verdict.FAILURE:
                await self._fail(process, f"startup probe failed: {counter.reason}")
                return
        if self._stopping.is_set():
            return
        self._set(Phase.RUNNING)
        await asyncio.gather(self._readiness(), self._liveness(process))

    async def _until_verdict(self, probe: Probe) -> ProbeCounter:
        counter = ProbeCounter(probe)
        await asyncio.sleep(probe.initial_delay_seconds)
        while True:
            outcome = await check(
                probe, container=self.prepared.container, ip=self.prepared.ip, run_command=self.run_command
            )
            self.status.reason = outcome.reason
            if counter.record(outcome) is not Verdict.UNKNOWN:
                return counter
            await asyncio.sleep(probe.period_seconds)

    async def _readiness(self) -> None:
        probe = self.prepared.container.readiness_probe
        if probe is None:
            self._became_ready()
            return
        counter = ProbeCounter(probe)
        await asyncio.sleep(probe.initial_delay_seconds)
        while not self._stopping.is_set():
            outcome = await check(
                probe, container=self.prepared.container, ip=self.prepared.ip, run_command=self.run_command
            )
            verdict = counter.record(outcome)
            if self._stopping.is_set():
                return
            if verdict is Verdict.SUCCESS and not self.ready:
                self._became_ready()
            elif verdict is Verdict.FAILURE and self.ready:
                self._set(Phase.RUNNING, reason=f"not ready: {counter.reason}")
            elif not self.ready and outcome.reason != self.status.reason:
                self.status.reason = outcome.reason
                self._on_change()
            await asyncio.sleep(probe.period_seconds)

    async def _liveness(self, process: Process) -> None:
        probe = self.prepared.container.liveness_probe
        if probe is None:
            return
        counter = ProbeCounter(probe)
        await asyncio.sleep(probe.initial_delay_seconds)
        while not self._stopping.is_set():
            outcome = await check(
                probe, container=self.prepared.container, ip=self.prepared.ip, run_command=self.run_command
            )
            if counter.record(outcome) is Verdict.FAILURE:
                await self._fail(process, f"liveness probe failed: {counter.reason}")
                return
            await asyncio.sleep(probe.period_seconds)

    async def _fail(self, process: Process, reason: str) -> None:
        """Ends a container whose probe failed; the main loop restarts it."""
        self._kill_reason = reason
        self._set(Phase.STOPPING, reason=reason)
        # Not this task's own end: it is cancelled as soon as the process has gone.
        process.terminate()
        await asyncio.sleep(_PROBE_KILL_GRACE)
        process.kill()

    async def _end(self, process: Process, *, grace: float) -> None:
        deadline = time.monotonic() + grace
        lifecycle = self.prepared.container.lifecycle
        if lifecycle is not None and lifecycle.pre_stop is not None:
            with contextlib.suppress(
                TimeoutError
            ):  # the grace period is over: SIGTERM follows at once, as in Kubernetes
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + grace):
                    await self._hook(lifecycle.pre_stop, within=grace)
        process.terminate()
        waiting = asyncio.ensure_future(process.wait())
        _, late = await asyncio.wait({waiting}, timeout=max(0.0, deadline - time.monotonic()))
        if late:
            self._line(f"[prebook] still running after its grace period of {grace:g} s: killed")
            process.kill()
            await waiting

    async def _hook(self, hook: Handler, *, within: float) -> None:
        if hook.sleep is not None:
            await asyncio.sleep(hook.sleep.seconds)
        elif hook.exec is not None:
            status, output = await self.run_command(hook.exec.command, within)
            if status != 0:
                self._line(f"[prebook] preStop ended with status {status}: {output[-500:]}")
        elif hook.http_get is not None:
            port = resolve_port(hook.http_get.port, container=self.prepared.container)
            try:
                async with request(
                    "GET", host=hook.http_get.host or self.prepared.ip, port=port, path=hook.http_get.path
                ) as response:
                    await response.body()
            except HttpError as error:
                self._line(f"[prebook] preStop: {error}")

    def _became_ready(self) -> None:
        self.status.ever_ready = True
        self.status.crashes_in_a_row = 0
        self._set(Phase.READY)

    def _set(self, phase: Phase, *, reason: str = "") -> None:
        if (phase, reason) != (self.status.phase, self.status.reason):
            if phase is not self.status.phase:
                self.status.since = time.monotonic()
            self.status.phase, self.status.reason = phase, reason
            self._on_change()

    def _line(self, line: str) -> None:
        self.tail.append(line)
        self._on_line(line)


def _kill_on_error(probing: asyncio.Task[None], process: Process) -> None:
    """A probe that cannot be run at all (an unknown port name) ends the container, so that the error surfaces now
    and not at the next restart.
    """
    if not probing.cancelled() and probing.exception() is not None:
        process.kill()
