"""The A/B over one DisaggregatedModel: each mode is a local run (`prebook up`) of it with another connector.

Nothing but `spec.transfer` and the name differ between the variants. They run one after the other and are asked through
their front door. They do not take turns like the pairs of the rig: a run that was frozen comes back with probes, polls
and restarts of its own, which would be measured too.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

from prebook_bench import ab, machine, processes
from prebook_bench.engines import EngineError, Progress
from prebook_bench.modes import Mode

#: `spec.transfer` of each mode that a manifest can express.
TRANSFERS: Final[dict[Mode, dict[str, str]]] = {
    Mode.PULL: {"connector": "NixlPull"},
    Mode.PUSH: {"connector": "NixlPush"},
    Mode.PREBOOK: {"connector": "Prebook"},
    Mode.PREBOOK_FIRST: {"connector": "Prebook", "firstToken": "Prefill"},
}
_KIND: Final = "DisaggregatedModel"
_START_TIMEOUT_S: Final = 900.0
_STOP_TIMEOUT_S: Final = 60.0
_RUN: Final = "import sys; from prebook_operator.cli.main import main; sys.exit(main(sys.argv[1:]))"


def variant(documents: Sequence[Any], *, mode: Mode) -> list[Any]:
    """The file's documents with the model's name and transfer those of `mode`. Raises ValueError when the file does
    not hold exactly one model, or the mode cannot be written in one. Pure.
    """
    if mode not in TRANSFERS:
        raise ValueError(f"mode {mode} cannot be written as a {_KIND}; known: {', '.join(TRANSFERS)}")
    made = copy.deepcopy(list(documents))
    models = [one for one in made if isinstance(one, dict) and one.get("kind") == _KIND]
    if len(models) != 1:
        raise ValueError(f"the file holds {len(models)} {_KIND} objects; exactly one is needed")
    (model,) = models
    model["metadata"]["name"] = f"{model['metadata']['name']}-{mode}"
    transfer = model["spec"].setdefault("transfer", {})
    transfer.pop("firstToken", None)
    transfer.update(TRANSFERS[mode])
    return made


@dataclasses.dataclass(frozen=True)
class LocalRun:
    """One `prebook up` in the foreground."""

    mode: Mode
    base_url: str
    process: subprocess.Popen[bytes]
    log: Path

    def check_alive(self) -> None:
        """Raises EngineError with the end of its output when the run has ended."""
        if self.process.poll() is not None:
            tail = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:]
            raise EngineError("\n".join([f"{self.mode}: `prebook up` ended with {self.process.returncode}", *tail]))

    async def wait_answers(self, *, progress: Progress) -> None:
        """Waits until the front door lists a model. Raises EngineError when the run ends or the time is over."""
        started = spoke = time.monotonic()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while time.monotonic() - started < _START_TIMEOUT_S:
                self.check_alive()
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"{self.base_url}/v1/models") as response:
                        if response.status == 200:
                            return
                if time.monotonic() - spoke > 15:
                    spoke = time.monotonic()
                    progress(f"{self.mode}: starting ({spoke - started:.0f} s)")
                await asyncio.sleep(0.5)
        raise EngineError(f"{self.mode}: no answer at {self.base_url} after {_START_TIMEOUT_S:.0f} s")

    def stop(self) -> None:
        """Ends it the way Ctrl-C does; what is left of its processes after a minute is killed."""
        processes.send(self.process.pid, signal.SIGCONT)
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            processes.send(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextlib.asynccontextmanager
async def _running(
    documents: Sequence[Any], *, mode: Mode, folder: Path, progress: Progress
) -> AsyncIterator[LocalRun]:
    file = folder / f"{mode}.yaml"
    file.write_text(yaml.safe_dump_all(variant(documents, mode=mode)), encoding="utf-8")
    port = _free_port()
    process = _spawn([sys.executable, "-c", _RUN, "up", str(file), f"--port={port}"], log=folder / f"{mode}.log")
    run = LocalRun(mode=mode, base_url=f"http://127.0.0.1:{port}", process=process, log=folder / f"{mode}.log")
    try:
        await run.wait_answers(progress=progress)
        yield run
    finally:
        run.stop()


def read(file: Path, *, modes: Sequence[Mode]) -> list[Any]:
    """The documents of a file, of which every mode can be made. Raises ValueError when one cannot."""
    try:
        documents = [one for one in yaml.safe_load_all(file.read_text(encoding="utf-8")) if one is not None]
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not YAML: {error}") from error
    for mode in modes:
        variant(documents, mode=mode)
    return documents


async def run(
    file: Path,
    *,
    documents: Sequence[Any],
    modes: Sequence[Mode],
    options: ab.AbOptions,
    command: Sequence[str],
    progress: Progress,
) -> dict[str, Any]:
    """The A/B over the variants of a file's documents; returns the report."""
    about: dict[str, Any] = {
        "machine": machine.describe(command),
        "rig": {"file": str(file)},
        "interleaved": len(modes) == 1,
        "batches": [[str(mode)] for mode in modes],
    }
    measured = ab.Measured()
    with tempfile.TemporaryDirectory(prefix="prebook-bench-") as folder:
        for mode in modes:
            progress(f"{mode}: prebook up; output in {folder}")
            async with _running(documents, mode=mode, folder=Path(folder), progress=progress) as started:
                if not options.model:
                    options = dataclasses.replace(options, model=await ab.served_model(started.base_url))
                target = ab.endpoint(str(mode), started.base_url, options=options)
                target = dataclasses.replace(target, check=started.check_alive)
                await ab.measure([target], options=options, into=measured, progress=progress)
    return ab.report(measured, options=options, about={**about, "model": options.model})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _spawn(command: list[str], *, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
