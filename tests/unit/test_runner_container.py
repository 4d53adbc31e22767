"""A container's life under probes, crashes and stops. Real child processes, short periods."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from prebook_operator.local.addresses import claim_address
from prebook_operator.local.container import ContainerRunner, Phase, Prepared, RestartPolicy
from prebook_operator.local.errors import UserError
from prebook_operator.local.kube import Container
from prebook_operator.local.process import Command
from tests.unit.runner_support import ENGINE, alive

POLICY = RestartPolicy(first=0.05, longest=0.4, reset_after=60)
FAST = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 0.05, "timeoutSeconds": 2}


@contextlib.asynccontextmanager
async def running(
    folder: Path, *args: str, reasons: list[str] | None = None, **fields: Any
) -> AsyncIterator[ContainerRunner]:
    """A fake engine under a ContainerRunner; it is killed at the end of the block."""
    address = claim_address(ports=[8000])
    container = Container.model_validate(
        {"name": "engine", "ports": [{"name": "http", "containerPort": 8000}], **fields}
    )
    env = {"PATH": os.environ["PATH"], "POD_IP": address.ip, "DIR": str(folder)}
    command = Command([sys.executable, str(ENGINE), "--dir", str(folder), *args], env)
    prepared = Prepared(container=container, command=command, ip=address.ip, rewrite=lambda text: text)

    def changed() -> None:
        if reasons is not None:
            reasons.append(runner.status.reason)

    runner = ContainerRunner(prepared, policy=POLICY, on_line=lambda _: None, on_change=changed)
    task = asyncio.create_task(runner.run())
    try:
        yield runner
    finally:
        runner.kill()
        await asyncio.wait_for(task, 10)
        address.release()


async def reach(runner: ContainerRunner, phase: Phase, *, seconds: float = 15) -> None:
    await until(lambda: runner.status.phase is phase, seconds=seconds)


async def until(condition: Callable[[], bool], *, seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


def events(folder: Path, name: str) -> list[str]:
    path = folder / f"{name}-"
    return path.read_text().splitlines() if path.exists() else []


async def test_startup_then_readiness_follow_the_probes(tmp_path: Path) -> None:
    (tmp_path / "unready").touch()
    readiness = {"httpGet": {"path": "/prebook/v1/ready", "port": "http"}, "periodSeconds": 0.05, "failureThreshold": 2}
    async with running(
        tmp_path, "--delay=0.3", startupProbe={**FAST, "failureThreshold": 200}, readinessProbe=readiness
    ) as runner:
        await reach(runner, Phase.RUNNING)
        assert not runner.ready
        await asyncio.sleep(0.3)
        assert "told to be unready" in runner.status.reason
        (tmp_path / "unready").unlink()
        await reach(runner, Phase.READY)
        (tmp_path / "unready").touch()
        await reach(runner, Phase.RUNNING)
        assert "not ready" in runner.status.reason
        assert len(events(tmp_path, "started")) == 1


async def test_no_probe_means_ready_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, "--delay=30") as runner:
        await reach(runner, Phase.READY)


async def test_crashes_back_off_exponentially_and_are_counted(tmp_path: Path) -> None:
    reasons: list[str] = []
    async with running(
        tmp_path, "--crash=0", reasons=reasons, startupProbe={**FAST, "failureThreshold": 200}
    ) as runner:
        await until(lambda: runner.status.restarts >= 4)
        assert runner.status.exit_status == 1
        assert any("told to crash" in line for line in runner.tail)
    delays = [reason.partition("next start in ")[2] for reason in reasons if "next start" in reason]
    assert delays[:4] == ["0.05 s", "0.1 s", "0.2 s", "0.4 s"]
    assert len(events(tmp_path, "started")) >= 4


@pytest.mark.parametrize(("crashes", "seconds"), [(1, 1), (2, 2), (5, 16), (7, 60), (1000, 60)])
def test_delay_doubles_up_to_its_bound(crashes: int, seconds: float) -> None:
    assert RestartPolicy().delay(crashes) == seconds


async def test_startup_that_takes_too_long_is_restarted(tmp_path: Path) -> None:
    async with running(tmp_path, "--delay=60", startupProbe={**FAST, "failureThreshold": 3}) as runner:
        await reach(runner, Phase.BACKOFF)
        assert "startup probe failed" in runner.status.reason


async def test_sick_container_is_restarted_and_recovers(tmp_path: Path) -> None:
    async with running(
        tmp_path, startupProbe={**FAST, "failureThreshold": 200}, livenessProbe={**FAST, "failureThreshold": 2}
    ) as runner:
        await reach(runner, Phase.READY)
        (tmp_path / "sick").touch()
        await reach(runner, Phase.BACKOFF)
        assert "liveness probe failed: HTTP 500" in runner.status.reason
        (tmp_path / "sick").unlink()
        await reach(runner, Phase.READY)
        assert runner.status.restarts == 1
        assert len(events(tmp_path, "term")) == 1  # it was asked before it was killed


async def test_probe_by_command_and_by_tcp(tmp_path: Path) -> None:
    command = {
        "exec": {"command": ["sh", "-c", 'test -e "$DIR/go"']},
        "periodSeconds": 0.05,
        "timeoutSeconds": 5,
        "failureThreshold": 500,
    }
    tcp = {"tcpSocket": {"port": 8000}, "periodSeconds": 0.05}
    async with running(tmp_path, startupProbe=command, readinessProbe=tcp) as runner:
        await asyncio.sleep(0.5)
        assert runner.status.phase is Phase.STARTING
        (tmp_path / "go").touch()
        await reach(runner, Phase.READY)


async def test_command_probe_that_hangs_is_a_failure(tmp_path: Path) -> None:
    probe = {"exec": {"command": ["sleep", "60"]}, "periodSeconds": 0.05, "timeoutSeconds": 0.3, "failureThreshold": 1}
    async with running(tmp_path, startupProbe=probe) as runner:
        await reach(runner, Phase.BACKOFF)
        assert "no answer within 0.3 s" in runner.status.reason


async def test_stop_runs_prestop_before_sigterm(tmp_path: Path) -> None:
    hook = {"preStop": {"exec": {"command": ["sh", "-c", 'ls "$DIR" > "$DIR/hook"']}}}
    async with running(tmp_path, startupProbe={**FAST, "failureThreshold": 200}, lifecycle=hook) as runner:
        await reach(runner, Phase.READY)
        await runner.stop(grace=10)
        await reach(runner, Phase.STOPPED)
    assert "term-" not in (tmp_path / "hook").read_text()
    assert len(events(tmp_path, "term")) == 1
    assert runner.status.restarts == 0


async def test_grace_period_covers_prestop_and_ends_in_a_kill(tmp_path: Path) -> None:
    hook = {"preStop": {"exec": {"command": ["sleep", "60"]}}}
    started = 0.0
    async with running(
        tmp_path, "--ignore-term", startupProbe={**FAST, "failureThreshold": 200}, lifecycle=hook
    ) as runner:
        await reach(runner, Phase.READY)
        started = time.monotonic()
        await runner.stop(grace=0.5)
        assert 0.4 < time.monotonic() - started < 4
        await reach(runner, Phase.STOPPED)
        assert runner.status.exit_status == 137


async def test_children_end_with_their_container(tmp_path: Path) -> None:
    async with running(tmp_path, "--child", startupProbe={**FAST, "failureThreshold": 200}) as runner:
        await reach(runner, Phase.READY)
        child = int(next(line for line in runner.tail if line.startswith("child")).split()[1])
        assert alive(child)
        await runner.stop(grace=10)
        await asyncio.wait_for(runner.gone.wait(), 10)
        assert not alive(child)


async def test_probe_with_an_unknown_port_name_is_an_error_at_once(tmp_path: Path) -> None:
    probe = {"httpGet": {"port": "metrics"}, "periodSeconds": 0.05}

    async def run() -> None:
        async with running(tmp_path, readinessProbe=probe) as runner:
            await until(lambda: runner.status.exit_status is not None)

    with pytest.raises(UserError, match="no port named 'metrics'"):
        await run()
