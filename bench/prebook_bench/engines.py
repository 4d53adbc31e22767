"""Starts, watches, freezes and stops the vLLM engines of a measurement."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Self

import aiohttp

from prebook_bench import processes
from prebook_bench.modes import (
    EngineIdentity,
    EngineShape,
    FrontKind,
    Mode,
    PrebookOptions,
    Role,
    dispatch_environment,
    engine_arguments,
    front_kind,
    kv_transfer_config,
)
from prebook_bench.rig import Place, Rig
from prebook_bench.router import Router
from prebook_bench.workload import ModelShape

Progress = Callable[[str], None]

_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 10.0
_HEARTBEAT_S = 15.0


class EngineError(RuntimeError):
    """An engine did not start or died; the message carries the end of its log."""


@dataclasses.dataclass(frozen=True)
class PairOptions:
    """How the pairs of one run are started; the same for every mode."""

    shape: EngineShape
    front: FrontKind
    prebook: PrebookOptions
    local_prefill_max_tokens: int = 0
    timeline_dir: Path | None = None

    def front_of(self, mode: Mode) -> FrontKind:
        """Who drives the legs in a mode."""
        return front_kind(mode, asked=self.front)


class Engine:
    """One vLLM API server with its child processes, in its own session, its output in a log file."""

    def __init__(
        self, identity: EngineIdentity, *, process: subprocess.Popen[bytes], cores: tuple[int, ...], log: Path
    ) -> None:
        self.identity = identity
        self.log = log
        self._cores = cores
        self._process = process

    @classmethod
    def start(
        cls, identity: EngineIdentity, *, place: Place, arguments: Sequence[str], env: dict[str, str], log: Path
    ) -> Self:
        """Starts the engine on its place's cores and returns at once; see :meth:`wait_healthy`."""
        cores = ",".join(str(core) for core in place.cores)
        command = [*place.prefix, "taskset", "-c", cores, sys.executable]
        command += ["-m", "vllm.entrypoints.openai.api_server", *arguments]
        with log.open("wb") as output:
            output.write((" ".join(command) + "\n").encode())
            output.flush()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        return cls(identity, process=process, cores=place.cores, log=log)

    @property
    def name(self) -> str:
        """For messages: mode and role."""
        return f"{self.identity.mode}/{self.identity.role}"

    @property
    def pid(self) -> int:
        """Process id of the API server, root of the engine's process tree."""
        return self._process.pid

    async def wait_healthy(self, *, timeout_s: float, progress: Progress) -> None:
        """Polls /health. Raises EngineError when the engine ends or the time is over."""
        started = time.monotonic()
        spoke = started
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while True:
                if self._process.poll() is not None:
                    raise EngineError(f"{self.name} ended with {self._process.returncode} at start\n{self.log_tail()}")
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with session.get(f"{self.identity.base_url}/health") as response:
                        if response.status == 200:
                            # vLLM's NIXL worker moves its main thread to the last core of the NUMA node
                            # (base_worker.py, "reserve different cores"): prefill would compute on decode's core.
                            processes.pin(self.pid, self._cores)
                            return
                now = time.monotonic()
                if now - started > timeout_s:
                    raise EngineError(f"{self.name} was not healthy after {timeout_s:.0f} s\n{self.log_tail()}")
                if now - spoke > _HEARTBEAT_S:
                    progress(f"{self.name}: starting ({now - started:.0f} s)")
                    spoke = now
                await asyncio.sleep(0.5)

    def check_alive(self) -> None:
        """Raises EngineError when the API server is gone."""
        if self._process.poll() is not None:
            raise EngineError(f"{self.name} ended with {self._process.returncode}\n{self.log_tail()}")

    def cpu_seconds(self) -> float:
        """CPU seconds used so far by the engine's processes."""
        return processes.cpu_seconds(self.pid)

    def freeze(self) -> None:
        """Stops the engine's processes (SIGSTOP), so that another pair can be measured undisturbed."""
        processes.send(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets a frozen engine go on."""
        processes.send(self.pid, signal.SIGCONT)

    def ask_to_stop(self) -> None:
        """SIGTERM to the API server, which ends its children."""
        self.thaw()
        self._process.terminate()

    def wait_stopped(self, *, deadline: float) -> None:
        """Waits for the end until `deadline` (monotonic clock), then kills whatever of the tree is left."""
        try:
            self._process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            processes.send(self.pid, signal.SIGKILL)
            self._process.wait()
        for process in processes.snapshot():  # orphans keep the session that the API server led
            if process.session == self.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def log_tail(self, *, lines: int = 25) -> str:
        """The end of the engine's output."""
        text = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(["--- end of " + str(self.log), *text[-lines:]])


@dataclasses.dataclass(frozen=True)
class Pair:
    """One prefill and one decode engine of a mode, and who drives the legs of their requests."""

    mode: Mode
    prefill: Engine
    decode: Engine
    front: FrontKind
    router: Router | None = None

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Prefill and decode; one engine when it is both."""
        return (self.prefill,) if self.prefill is self.decode else (self.prefill, self.decode)

    @property
    def base_url(self) -> str | None:
        """Where a client that knows nothing of legs sends its requests; None when only this client can drive them."""
        if self.router is not None:
            return self.router.base_url
        return None if self.front is FrontKind.DIRECT else self.decode.identity.base_url

    def check_alive(self) -> None:
        """Raises EngineError or RouterError when something of the pair is gone."""
        for engine in self.engines:
            engine.check_alive()
        if self.router is not None:
            self.router.check_alive()

    def freeze(self) -> None:
        """See :meth:`Engine.freeze`. A router that is awake would find its frozen engines ill."""
        if self.router is not None:
            self.router.send(signal.SIGSTOP)
        for engine in self.engines:
            engine.freeze()

    def thaw(self) -> None:
        """See :meth:`Engine.thaw`."""
        for engine in self.engines:
            engine.thaw()
        if self.router is not None:
            self.router.send(signal.SIGCONT)


def stop_all(engines: Sequence[Engine]) -> None:
    """Stops engines at the same time, within about a deadline that they share."""
    for engine in engines:
        engine.ask_to_stop()
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    for engine in engines:
        engine.wait_stopped(deadline=deadline)


def engine_environment(identity: EngineIdentity, *, place: Place) -> dict[str, str]:
    """Environment of a CPU engine: one thread per core it may use, TCP for UCX, no downloads."""
    return {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(len(place.cores)),
        "UCX_TLS": "tcp,self",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": place.address,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(identity.side_channel_port),
        "POD_IP": place.address,
    }


@contextlib.asynccontextmanager
async def running_pair(
    mode: Mode, *, rig: Rig, options: PairOptions, folder: Path, progress: Progress
) -> AsyncIterator[Pair]:
    """Starts a pair, waits until both engines are healthy, and stops it on the way out. Logs go to `folder`.

    In aggregated mode there is one engine, in decode's place and on the cores of both; it takes both parts of the pair.
    """
    places = {Role.PREFILL: rig.prefill, Role.DECODE: rig.decode}
    if mode is Mode.AGGREGATED:
        cores = tuple(sorted({*rig.prefill.cores, *rig.decode.cores}))
        places = {Role.DECODE: dataclasses.replace(rig.decode, cores=cores)}
    identities = {role: EngineIdentity(mode=mode, role=role, address=place.address) for role, place in places.items()}
    token_file = folder / "token"
    if not token_file.exists():
        token_file.write_text(secrets.token_hex(16))
    engines: list[Engine] = []
    router: Router | None = None
    front = options.front_of(mode)
    try:
        for role, place in places.items():
            engines.append(
                _start(identities, role=role, place=place, options=options, folder=folder, token_file=token_file)
            )
        await asyncio.gather(*(e.wait_healthy(timeout_s=_START_TIMEOUT_S, progress=progress) for e in engines))
        if front is FrontKind.ROUTER:
            router = await Router.start(
                prefill=engines[0].identity,
                decode=engines[-1].identity,
                host=rig.client,
                log=folder / f"{mode}-router.log",
            )
        yield Pair(mode=mode, prefill=engines[0], decode=engines[-1], front=front, router=router)
    finally:
        if router is not None:
            router.stop()
        stop_all(engines)


def _start(
    identities: dict[Role, EngineIdentity],
    *,
    role: Role,
    place: Place,
    options: PairOptions,
    folder: Path,
    token_file: Path,
) -> Engine:
    identity = identities[role]
    control = folder / f"{identity.mode}-{role}"
    control.mkdir(exist_ok=True)
    timeline = str(options.timeline_dir) if options.timeline_dir and identity.mode.ours else None
    transfer = kv_transfer_config(identity, control_dir=str(control), timeline_dir=timeline, options=options.prebook)
    dispatch = options.front_of(identity.mode) is FrontKind.DISPATCH
    env = engine_environment(identity, place=place)
    if dispatch:
        env |= dispatch_environment(
            identity,
            peer=identities[Role.DECODE if role is Role.PREFILL else Role.PREFILL],
            token_file=str(token_file),
            control_dir=str(control),
            model=options.shape.served_name,
            local_prefill_max_tokens=options.local_prefill_max_tokens,
        )
    return Engine.start(
        identity,
        place=place,
        arguments=engine_arguments(
            identity,
            shape=options.shape,
            dtype=ModelShape.of(Path(options.shape.model)).dtype,
            transfer=transfer,
            dispatch=dispatch,
        ),
        env=env,
        log=folder / f"{identity.mode}-{role}.log",
    )
