"""One run: all pods of a model, its Services, and what others may know about it.

The supervisor starts every pod at once (podManagementPolicy Parallel: a decode pod needs peers to become ready),
keeps peers files and the balancer in step with what the pods are, polls their status, and publishes one ``RunState``
after every change.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prebook_operator.local import progress
from prebook_operator.local.addresses import PodAddress, claim_address
from prebook_operator.local.balancer import Balancer
from prebook_operator.local.container import Phase, RestartPolicy
from prebook_operator.local.errors import StartError
from prebook_operator.local.logfile import LogFile
from prebook_operator.local.pod import PodRunner, PodSnapshot, Site
from prebook_operator.local.podstatus import PodStatus, fetch_all
from prebook_operator.local.services import PeersFiles, selected, target_port
from prebook_operator.local.state import RUN_FOLDER_PREFIX, PodRow, RunPhase, RunState
from prebook_operator.local.workload import PodPlan, ServicePlan, Workload

_STATUS_PERIOD = 2.0
_PUBLISH_PERIOD = 1.0
# A Unix socket's path has at most 107 bytes; control sockets live in the volumes and have names of up to 30.
_LONGEST_RUN_FOLDER = 40
SIDE_CHANNEL_PORT = 5600


@dataclass(frozen=True)
class RunOptions:
    """How a run differs from its file. ``extra_env`` by pod name is what the runner adds (GPU choice, offline
    switches).
    """

    name: str
    file: Path
    digest: str
    logs: Path
    claims: Path
    host: str = "127.0.0.1"
    port: int = 8000
    machine: Mapping[str, str] = field(default_factory=dict)
    extra_env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    # Crashes in a row before a pod was ever ready after which the run is given up.
    give_up_after: int = 3


def make_run_folder() -> Path:
    """A private folder with a short path, for volumes and peers files."""
    base = tempfile.gettempdir()
    if len(base) > _LONGEST_RUN_FOLDER - len(RUN_FOLDER_PREFIX) - 9:
        base = "/tmp"  # a long TMPDIR would make the control sockets' paths too long
    return Path(tempfile.mkdtemp(prefix=RUN_FOLDER_PREFIX, dir=base))


class Supervisor:
    """Runs a workload from ``start`` to ``stop``. ``publish`` gets the state after every change, ``on_log`` every
    line of every pod.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        options: RunOptions,
        folder: Path,
        peers: PeersFiles,
        publish: Callable[[RunState], None],
        on_log: Callable[[PodPlan, str], None],
    ) -> None:
        self.workload = workload
        self.options = options
        self._folder = folder
        self._peers = peers
        self._publish = publish
        self._on_log = on_log
        self._phase: RunPhase = "starting"
        self._error = ""
        self._started_at = time.time()
        self._statuses: dict[str, PodStatus] = {}
        self._pods: list[PodRunner] = []
        self._addresses: list[PodAddress] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._front: ServicePlan = workload.front
        self.balancer = Balancer(host=options.host, port=options.port, backends=self._backends)

    async def start(self) -> None:
        """Opens the front port, claims addresses, prepares volumes and starts every pod. Raises ``LocalError``
        before anything runs.
        """
        await self.balancer.start()
        for index, plan in enumerate(self.workload.pods):
            ports = {port.container_port for container in plan.spec.containers for port in container.ports}
            address = claim_address(ports=ports | {SIDE_CHANNEL_PORT})
            self._addresses.append(address)
            self._pods.append(self._pod(plan, index=index, address=address))
        self._update_peers()
        for pod in self._pods:
            self._spawn(pod.run())
        self._spawn(self._watch())
        self._spawn(self._poll_statuses())

    async def wait_ready(self) -> None:
        """Returns when all pods are ready at the same time; raises ``StartError`` when one cannot be brought up."""
        await self._until(lambda: all(pod.snapshot().phase is Phase.READY for pod in self._pods))

    async def wait_paired(self, *, within: float) -> bool:
        """Waits up to ``within`` seconds until every possible pair is handshaken; False when that did not happen."""
        try:
            async with asyncio.timeout(within):
                await self._until(self._paired)
        except TimeoutError:
            return False
        return True

    async def wait_failed(self) -> None:
        """Never returns; raises when the run failed."""
        await asyncio.shield(self._failure)

    async def stop(self) -> None:
        """Drains and ends all pods within their grace periods, then everything else; removes the run's folder."""
        self._phase = "failed" if self._error else "stopping"
        self._publish(self.state())
        try:
            await asyncio.gather(*(pod.stop() for pod in self._pods))
        finally:
            await self.kill()

    async def kill(self) -> None:
        """Ends everything now; safe to call at any time and more than once."""
        for pod in self._pods:
            pod.kill()
        await self.balancer.stop()
        await asyncio.gather(*(pod.gone() for pod in self._pods))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for address in self._addresses:
            address.release()
        for pod in self._pods:
            pod.log.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._phase = "failed" if self._error else "ended"
        self._publish(self.state())

    def state(self) -> RunState:
        """The run as others see it."""
        return RunState(
            name=self.options.name,
            pid=os.getpid(),
            digest=self.options.digest,
            file=str(self.options.file),
            host=self.options.host,
            port=self.balancer.port,
            phase=self._phase,
            error=self._error,
            run_folder=str(self._folder),
            started_at=self._started_at,
            pods=tuple(self._row(pod) for pod in self._pods),
        )

    def _pod(self, plan: PodPlan, *, index: int, address: PodAddress) -> PodRunner:
        site = Site(
            volumes=self._folder / str(index),
            claims=self.options.claims,
            node=platform.node(),
            machine=self.options.machine,
            extra_env=self.options.extra_env.get(plan.name, {}),
            policy=self.options.policy,
        )
        log = LogFile(self.options.logs / f"{plan.name}.log")
        return PodRunner(
            plan,
            workload=self.workload,
            address=address,
            site=site,
            log=log,
            on_line=self._on_log,
            on_change=self._changed.set,
        )

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._failure.done():
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._error = str(error)
        self._failure.set_exception(error)
        self._failure.exception()  # whoever waits gets it; nobody waiting is no fault
        self._changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            tick = asyncio.ensure_future(asyncio.sleep(0.2))
            try:
                await asyncio.wait({tick, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                tick.cancel()
            if self._failure.done():
                self._failure.result()

    async def _watch(self) -> None:
        """After every change (at most ten times a second), and at least once a second: peers, give-up rule, state."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _PUBLISH_PERIOD)
            self._changed.clear()
            self._update_peers()
            self._judge()
            self._publish(self.state())
            await asyncio.sleep(0.1)

    def _judge(self) -> None:
        snapshots = [pod.snapshot() for pod in self._pods]
        if self._phase == "starting" and all(snapshot.phase is Phase.READY for snapshot in snapshots):
            self._phase = "ready"
        if self._phase != "starting" or self._failure.done():
            return
        for pod, snapshot in zip(self._pods, snapshots, strict=True):
            if snapshot.ever_ready or snapshot.phase is not Phase.BACKOFF:
                continue
            if pod.hopeless or snapshot.restarts >= self.options.give_up_after:
                self._fail(crash_error(pod, snapshot))
                return

    async def _poll_statuses(self) -> None:
        while True:
            up = [
                s for s in (pod.snapshot() for pod in self._pods) if s.phase in {Phase.RUNNING, Phase.READY} and s.port
            ]
            self._statuses = await fetch_all(up)
            self._changed.set()
            await asyncio.sleep(_STATUS_PERIOD)

    def _paired(self) -> bool:
        pairs = [status.pairs for status in self._statuses.values() if status.role == "decode"]
        decodes = [pod for pod in self._pods if pod.plan.role == "decode"]
        return len(pairs) == len(decodes) and all(pair.possible > 0 and pair.ready >= pair.possible for pair in pairs)

    def _update_peers(self) -> None:
        for service in self.workload.services:
            if service.name not in self._peers.services:
                continue
            ips = [
                pod.address.ip
                for pod in self._pods
                if selected(service, labels=pod.plan.labels)
                and (service.spec.publish_not_ready_addresses or pod.snapshot().phase is Phase.READY)
            ]
            self._peers.update(service.name, addresses=ips)

    def _backends(self) -> Sequence[tuple[str, int]]:
        port = self._front.spec.ports[0]
        return [
            (pod.address.ip, target_port(port, pod=pod.plan))
            for pod in self._pods
            if selected(self._front, labels=pod.plan.labels) and pod.snapshot().phase is Phase.READY
        ]

    def _row(self, pod: PodRunner) -> PodRow:
        snapshot = pod.snapshot()
        status = self._statuses.get(snapshot.name)
        return PodRow(
            name=snapshot.name,
            short=snapshot.short,
            role=snapshot.role,
            ip=snapshot.ip,
            port=snapshot.port,
            phase=snapshot.phase.value,
            reason=snapshot.reason,
            restarts=snapshot.restarts,
            age=snapshot.age,
            waiting_for=waiting_for(pod, snapshot, status=status),
            last_line=progress.clean(snapshot.last_line),
            pid=snapshot.pid,
            engine_id=(status.engine_id or "") if status else "",
            pairs_ready=status.pairs.ready if status else None,
            pairs_possible=status.pairs.possible if status else None,
            requests=status.requests.total if status else None,
        )


def waiting_for(pod: PodRunner, snapshot: PodSnapshot, *, status: PodStatus | None) -> str:
    """Why the pod is not ready yet, in a few words; an empty string when it is."""
    match snapshot.phase:
        case Phase.READY | Phase.STOPPED:
            return ""
        case Phase.INIT:
            return "its init container"
        case Phase.STARTING:
            return progress.stage(pod.tail) or "starting Python"
        case Phase.RUNNING:
            return (status.reason if status else "") or progress.clean(snapshot.reason) or "its readiness"
        case _:
            return snapshot.reason


def crash_error(pod: PodRunner, snapshot: PodSnapshot) -> StartError:
    """Says why a pod is given up: its last useful lines, where the log is, and what to do."""
    lines = "\n".join(f"    {line}" for line in progress.useful_tail(pod.tail))
    times = "once" if snapshot.restarts == 1 else f"{snapshot.restarts} times"
    return StartError(
        f"{snapshot.short} ended {times} before it was ever ready ({snapshot.reason.split(';')[0]}):\n"
        f"{lines}\n    log: {pod.log.path}",
        remedy=progress.remedy(pod.tail, exit_status=snapshot.exit_status),
    )
