"""One pod: its folders, its init containers, its containers, and one word for all of it.

``PodRunner`` owns what belongs to the pod (address, volumes, log file) and leaves the life of each container to
``ContainerRunner``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from prebook_operator.local.addresses import PodAddress
from prebook_operator.local.container import ContainerRunner, Phase, Prepared, RestartPolicy
from prebook_operator.local.environment import PodFacts, container_environment
from prebook_operator.local.expand import expand_references, path_rewriter
from prebook_operator.local.kube import Container
from prebook_operator.local.logfile import LogFile
from prebook_operator.local.process import Command
from prebook_operator.local.volumes import mounts_of, prepare_volumes
from prebook_operator.local.workload import PodPlan, Workload

# Exit statuses after which another start cannot help: usage errors (argparse), a command that cannot be executed.
_HOPELESS = frozenset({2, 126, 127})


@dataclass(frozen=True)
class Site:
    """Where the pod runs: folders and the parts of the machine that it may see."""

    volumes: Path
    claims: Path
    node: str
    machine: Mapping[str, str]
    extra_env: Mapping[str, str]
    policy: RestartPolicy


@dataclass(frozen=True)
class PodSnapshot:
    """What a pod is doing now; ``age`` in seconds since its phase began."""

    name: str
    short: str
    role: str
    ip: str
    port: int
    phase: Phase
    reason: str
    restarts: int
    ever_ready: bool
    age: float
    exit_status: int | None
    pid: int | None
    last_line: str


class PodRunner:
    """Runs one pod until ``stop``."""

    def __init__(
        self,
        plan: PodPlan,
        *,
        workload: Workload,
        address: PodAddress,
        site: Site,
        log: LogFile,
        on_line: Callable[[PodPlan, str], None],
        on_change: Callable[[], None],
    ) -> None:
        self.plan = plan
        self.address = address
        self.log = log
        self._on_line = on_line
        self._on_change = on_change
        self._site = site
        self._facts = PodFacts(pod=plan, ip=address.ip, node=site.node)
        self._workload = workload
        self._last_line = ""
        self._volumes = prepare_volumes(facts=self._facts, workload=workload, folder=site.volumes, claims=site.claims)
        self._inits = [self._runner(container) for container in plan.spec.init_containers]
        self._mains = [self._runner(container) for container in plan.spec.containers]
        self._stopping = False

    async def run(self) -> None:
        """Init containers one after the other, then all containers, until ``stop``."""
        for init in self._inits:
            if not await init.run_init():
                return
        if self._stopping:
            return
        async with asyncio.TaskGroup() as group:
            for main in self._mains:
                group.create_task(main.run())

    async def stop(self) -> None:
        """Ends every container within the pod's grace period; the first call decides, later ones return at once."""
        self._stopping = True
        grace = self.plan.spec.termination_grace_period_seconds
        await asyncio.gather(*(runner.stop(grace=grace) for runner in (*self._inits, *self._mains)))

    def kill(self) -> None:
        """Ends every container now."""
        self._stopping = True
        for runner in (*self._inits, *self._mains):
            runner.kill()

    async def gone(self) -> None:
        """Waits until no process of the pod is left; to be called after ``stop`` or ``kill``."""
        await asyncio.gather(*(runner.gone.wait() for runner in (*self._inits, *self._mains)))

    @property
    def tail(self) -> list[str]:
        """The last lines of the container that matters: the one that failed last, else the first."""
        runner = self._current()
        return list(runner.tail)

    @property
    def hopeless(self) -> bool:
        """Whether another start cannot help (a usage error, a command that does not exist)."""
        status = self._current().status
        return status.phase is Phase.BACKOFF and status.exit_status in _HOPELESS

    def snapshot(self) -> PodSnapshot:
        """The pod as one row."""
        current = self._current()
        status = current.status
        phase = status.phase
        if current in self._inits:
            phase = phase if phase in {Phase.BACKOFF, Phase.STOPPING} else Phase.INIT
        elif all(main.ready for main in self._mains):
            phase = Phase.READY
        return PodSnapshot(
            name=self.plan.name,
            short=self.plan.short,
            role=self.plan.role,
            ip=self.address.ip,
            port=self.plan.port,
            phase=phase,
            reason=status.reason,
            restarts=sum(r.status.restarts for r in (*self._inits, *self._mains)),
            ever_ready=all(main.status.ever_ready for main in self._mains),
            age=time.monotonic() - status.since,
            exit_status=status.exit_status,
            pid=status.pid,
            last_line=self._last_line,
        )

    def _current(self) -> ContainerRunner:
        """The container that explains the pod's state: the init container at work, else the first container that is
        not ready, else the first.
        """
        for init in self._inits:
            if not (init.status.phase is Phase.STOPPED and init.status.exit_status == 0):
                return init
        for main in self._mains:
            if not main.ready:
                return main
        return self._mains[0]

    def _runner(self, container: Container) -> ContainerRunner:
        mounts = mounts_of(container, volumes=self._volumes)
        rewrite = path_rewriter(mounts)
        declared = container_environment(
            container,
            facts=self._facts,
            workload=self._workload,
            machine=self._site.machine,
            extra=self._site.extra_env,
        )
        argv = [rewrite(expand_references(word, variables=declared)) for word in (*container.command, *container.args)]
        names = {variable.name for variable in container.env}
        env = {name: rewrite(value) if name in names else value for name, value in declared.items()}
        prepared = Prepared(
            container=container,
            command=Command(argv=argv, env=env, cwd=rewrite(container.working_dir) if container.working_dir else None),
            ip=self.address.ip,
            rewrite=rewrite,
        )
        return ContainerRunner(prepared, policy=self._site.policy, on_line=self._line, on_change=self._on_change)

    def _line(self, line: str) -> None:
        if line.strip():
            self._last_line = line
        self.log.write(line)
        self._on_line(self.plan, line)
