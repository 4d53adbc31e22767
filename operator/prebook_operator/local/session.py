"""``prebook up`` from beginning to end, in the foreground: file → manifests → checks → pods → question or waiting →
nothing left.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prebook_operator.local import preflight
from prebook_operator.local.ask import ask, describe_account, fetch_account
from prebook_operator.local.display import Display
from prebook_operator.local.services import PeersFiles
from prebook_operator.local.source import Source, render_source, resolve_model
from prebook_operator.local.state import RunState, StateFolder, claims_root
from prebook_operator.local.supervisor import RunOptions, Supervisor, make_run_folder
from prebook_operator.local.workload import PodPlan, Workload, build_workload

# After all pods are ready: how many seconds a pair may take to handshake before the question is asked anyway.
PAIR_TIMEOUT = 60.0


@dataclass(frozen=True)
class Question:
    """What ``--ask`` asks."""

    text: str
    max_tokens: int


@dataclass(frozen=True)
class UpOptions:
    """Options of ``prebook up`` that matter to a run in the foreground."""

    port: int
    question: Question | None = None
    force: bool = False
    share_gpus: bool = False
    timeline_dir: Path | None = None


def run_foreground(source: Source, *, options: UpOptions, state: StateFolder, display: Display) -> int:
    """Runs ``source`` until its question is answered, Ctrl-C, SIGTERM or a failure; returns the exit status.

    The caller holds the lock of ``state``. Raises ``LocalError``; whatever was started has ended by then.
    """
    source = resolve_model(source, progress=display.line)
    folder = make_run_folder()
    try:
        peers = PeersFiles(folder / "peers")
        timelines = None
        if options.timeline_dir is not None:
            options.timeline_dir.mkdir(parents=True, exist_ok=True)
            timelines = str(options.timeline_dir.absolute())
        manifests = render_source(source, peer_source=peers.source, timeline_dir=timelines)
        workload = build_workload(manifests, new_token=lambda: secrets.token_hex(32))
        extra_env = check_machine(workload, model_uri=source.model_uri, options=options, warn=display.line)
        shutil.rmtree(state.logs, ignore_errors=True)
        run_options = RunOptions(
            name=source.name,
            file=source.path.absolute(),
            digest=source.digest,
            logs=state.logs,
            claims=claims_root(),
            port=options.port,
            machine=machine_environment(),
            extra_env=extra_env,
        )
        return asyncio.run(
            _run(
                workload,
                options=run_options,
                question=options.question,
                folder=folder,
                peers=peers,
                state=state,
                display=display,
            )
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_machine(
    workload: Workload, *, model_uri: str, options: UpOptions, warn: Callable[[str], None]
) -> Mapping[str, Mapping[str, str]]:
    """Everything that can be known to fail before it is started; returns the variables that the runner adds, by pod
    name.
    """
    preflight.check_engine(workload.pods)
    needs_gpus = any(preflight.extended_resources(pod).get(preflight.GPU) for pod in workload.pods)
    present = preflight.gpus_present() if needs_gpus else 0
    gpus = preflight.assign_gpus(workload.pods, present=present, shared=options.share_gpus)
    available = preflight.available_memory()
    needs = preflight.memory_needs(workload.pods, weights=preflight.weights_size(model_uri))
    if available is None:
        warn("memory is not checked: this system does not say how much is available")
    elif not options.force:
        preflight.check_memory(needs, available=available)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (warning := preflight.slow_dtype(workload.pods, cpuinfo=cpuinfo.read_text("utf-8"))):
        warn(warning)
    offline = {"HF_HUB_OFFLINE": "1"} if model_uri.startswith("file://") else {}
    return {pod.name: {**offline, **_gpu_choice(gpus.get(pod.name, ()))} for pod in workload.pods}


def machine_environment() -> dict[str, str]:
    """The runner's own environment, with its Python first on PATH: ``python3`` in a pod's command means this one."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PATH": path}


async def _run(
    workload: Workload,
    *,
    options: RunOptions,
    question: Question | None,
    folder: Path,
    peers: PeersFiles,
    state: StateFolder,
    display: Display,
) -> int:
    def publish(newest: RunState) -> None:
        state.write(newest)
        display.state(newest)

    def on_log(pod: PodPlan, line: str) -> None:
        display.log(pod.short, line)

    supervisor = Supervisor(workload, options=options, folder=folder, peers=peers, publish=publish, on_log=on_log)
    with StopSignals() as stop:
        try:
            work = asyncio.create_task(_serve(supervisor, question=question, display=display))
            either: set[asyncio.Future[int]] = {work, stop.first}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return 128 + stop.first.result()
        finally:
            display.pause()
            display.line("stopping (an interrupt ends everything at once, without draining)")
            ending = asyncio.create_task(supervisor.stop())
            ends: set[asyncio.Future[Any]] = {ending, stop.second}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                await supervisor.kill()
            await ending


async def _serve(supervisor: Supervisor, *, question: Question | None, display: Display) -> int:
    await supervisor.start()
    pods = ", ".join(pod.short for pod in supervisor.workload.pods)
    display.line(f"starting {supervisor.options.name}: {pods}; logs in {supervisor.options.logs}")
    await supervisor.wait_ready()
    if question is None:
        display.line(f"ready: {supervisor.state().endpoint}/v1")
        await supervisor.wait_failed()
        return 1
    if not await supervisor.wait_paired(within=PAIR_TIMEOUT):
        display.line(f"warning: not every pair is handshaken after {PAIR_TIMEOUT:.0f} s; asking anyway")
    display.pause()
    failed = asyncio.create_task(supervisor.wait_failed())
    asking = asyncio.create_task(ask_and_tell(question, state=supervisor.state))
    try:
        await asyncio.wait({failed, asking}, return_when=asyncio.FIRST_COMPLETED)
        await (asking if asking.done() else failed)
        return 0
    finally:
        failed.cancel()
        asking.cancel()
        await asyncio.gather(failed, asking, return_exceptions=True)


async def ask_and_tell(question: Question, *, state: Callable[[], RunState]) -> None:
    """Asks through the front door of a run; the answer, as it streams, and then its account go to standard output."""
    now = state()
    answer = await ask(question.text, host=now.host, port=now.port, max_tokens=question.max_tokens, on_text=_to_stdout)
    _to_stdout("\n\n")
    pods = state().pods
    transfer = await fetch_account(answer.transfer_id, pods=pods) if answer.transfer_id else None
    _to_stdout("\n".join(describe_account(answer, transfer=transfer, pods=pods)) + "\n")


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP as two futures: the first asks to stop, the second to stop at once. Each holds the
    signal's number.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.first: asyncio.Future[int] = self._loop.create_future()
        self.second: asyncio.Future[int] = self._loop.create_future()

    def __enter__(self) -> StopSignals:
        for number in _STOP:
            self._loop.add_signal_handler(number, self._received, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in _STOP:
            self._loop.remove_signal_handler(number)

    def _received(self, number: int) -> None:
        for future in (self.first, self.second):
            if not future.done():
                future.set_result(number)
                return


_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _gpu_choice(indices: tuple[int, ...]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in indices)} if indices else {}
