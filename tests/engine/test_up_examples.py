"""The examples for one machine, as a user runs them: ``prebook up`` with real engines, the real connector and the
real dispatcher.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.runner_support import Sandbox, free_port, wait_until

ROOT = Path(__file__).parents[2]
START_SECONDS = 540.0
# SmolLM2-135M in float32: 30 layers x (K and V) x 3 heads x 64 x 4 bytes.
SMOLLM2_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4


class Run:
    """A detached run of an example in a sandbox of its own."""

    def __init__(self, box: Sandbox, *, example: Path, port: int) -> None:
        self.box = box
        self.example = example
        self.url = f"http://127.0.0.1:{port}"

    def pods(self) -> dict[str, dict[str, Any]]:
        """Rows of ``prebook ps`` by short name."""
        listed = json.loads(self.box.run("ps", "-o", "json").stdout)
        return {pod["short"]: pod for pod in listed[0]["pods"]} if listed else {}

    def status(self, pod: str) -> dict[str, Any]:
        """``/prebook/v1/status`` of one pod."""
        row = self.pods()[pod]
        answer: dict[str, Any] = httpx.get(f"http://{row['ip']}:{row['port']}/prebook/v1/status", timeout=30).json()
        return answer


@contextmanager
def running(name: str) -> Iterator[Run]:
    """``prebook up examples/<name> --detach``; ends it and checks that nothing is left."""
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as folder:
        box, port = Sandbox(Path(folder)), free_port()
        example = ROOT / "examples" / name
        try:
            started = box.run("up", example, f"--port={port}", "--detach", timeout=START_SECONDS)
            assert started.returncode == 0, started.stderr[-4000:]
            yield Run(box, example=example, port=port)
        finally:
            box.run("down", "--all", timeout=180)
        wait_until(lambda: not box.processes(), what="end of every process")
        assert box.leftovers() == []


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Run]:
    with running("smollm2-1p1d.yaml") as run:
        yield run


def number(pattern: str, text: str) -> float:
    match = re.search(pattern, text)
    assert match is not None, text
    return float(match.group(1).replace(",", ""))


def test_question_is_answered_and_the_prompts_kv_was_pushed(smollm2: Run) -> None:
    done = smollm2.box.run("up", smollm2.example, "--ask", "What is the capital of France?", timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout.splitlines()[0]
    assert "prefill-0" in done.stdout
    tokens = number(r"prompt +(\d+) tokens", done.stdout)
    pushed = number(r"KV pushed +([\d,]+) bytes", done.stdout)
    blocks = number(r"\((\d+) blocks?\)", done.stdout)
    block_bytes = pushed / blocks
    assert block_bytes % SMOLLM2_BYTES_PER_TOKEN == 0
    block_tokens = block_bytes / SMOLLM2_BYTES_PER_TOKEN
    # Whole blocks are pushed, the last one partly filled: as many as the prompt needs, and no more.
    assert blocks == -(-tokens // block_tokens)


def test_destination_of_a_long_prompt_is_booked_before_prefill_ends(smollm2: Run) -> None:
    question = ROOT / "examples" / "questions" / "long.txt"
    done = smollm2.box.run("up", smollm2.example, "--ask-file", question, "--max-tokens", "8", timeout=240)
    assert done.returncode == 0, done.stderr
    assert "before prefill finished" in done.stdout
    assert number(r"booked +([\d.]+) m?s before", done.stdout) > 0


def test_second_up_is_quick_and_another_port_is_refused(smollm2: Run) -> None:
    started = time.monotonic()
    again = smollm2.box.run("up", smollm2.example, "--detach")
    assert again.returncode == 0
    assert time.monotonic() - started < 15
    assert smollm2.box.run("up", smollm2.example, "--detach", f"--port={free_port()}").returncode == 2


def complete(url: str, index: int) -> httpx.Response:
    """One short completion with a prompt of its own, so that no prefix cache answers it."""
    prompt = f"{index}: " + " ".join(f"word{index}{position}" for position in range(60))
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=180)


@pytest.mark.timeout(
    900
)  # four engines start, then one once more: two starts in one test, on machines that are slow too
def test_two_by_two_serves_from_all_engines_and_survives_the_death_of_a_prefill() -> None:
    with running("tiny-2p2d.yaml") as run:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            first = list(pool.map(lambda index: complete(run.url, index), range(12)))
        assert [answer.status_code for answer in first] == [200] * 12
        used = {
            str(transfer["peer"]) for pod in ("decode-0", "decode-1") for transfer in run.status(pod)["last_transfers"]
        }
        assert len(used) == 2, "both prefill engines were used"
        assert all(run.status(pod)["requests"]["remote"] > 0 for pod in ("decode-0", "decode-1"))
        victim = run.pods()["prefill-0"]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            later = [pool.submit(complete, run.url, 100 + index) for index in range(24)]
            wait_until(lambda: sum(future.done() for future in later) >= 4, seconds=120, what="the first answers")
            os.kill(victim["pid"], signal.SIGKILL)  # the shim: the engine dies with it
            answers = [future.result() for future in later]
        assert [answer.status_code for answer in answers] == [200] * 24
        assert all(answer.json()["choices"][0]["finish_reason"] for answer in answers)
        wait_until(lambda: run.pods()["prefill-0"]["restarts"] >= 1, what="restart of the killed prefill")
