"""`vllm bench serve` as the load generator, so that the figures are the ones that vLLM's users know.

It offers its own plan: Poisson arrivals, random prompts of a fixed length, all from one seed and therefore the same for
every target. Its clock starts when a request is sent, not when it was due. vLLM's CPU build is a distribution of
another name, on which the `vllm` command fails; the same code is called without that command.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from prebook_bench.client import RequestError
from prebook_bench.load import Arrival, Lengths, Record

_RUN: Final = """
import argparse, json, sys
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""


@dataclasses.dataclass(frozen=True)
class Ask:
    """What is asked of one run."""

    base_url: str
    model: str
    tokenizer: str
    rate: float
    count: int
    lengths: Lengths
    seed: int


def arguments(ask: Ask, *, folder: str, file: str) -> list[str]:
    """Arguments of `vllm bench serve`. Raises ValueError for lengths that it would not draw as we do. Pure."""
    if ask.lengths.kind != "fixed":
        raise ValueError(f"`vllm bench serve` gets workloads of fixed length only, not {ask.lengths.name}")
    return [
        "--backend=openai",
        f"--base-url={ask.base_url}",
        "--endpoint=/v1/completions",
        f"--model={ask.model}",
        f"--served-model-name={ask.model}",
        f"--tokenizer={ask.tokenizer}",
        "--dataset-name=random",
        f"--random-input-len={ask.lengths.prompt}",
        f"--random-output-len={ask.lengths.output}",
        f"--num-prompts={ask.count}",
        f"--request-rate={ask.rate}",
        f"--seed={ask.seed}",
        "--ignore-eos",
        "--temperature=0",
        "--disable-tqdm",
        "--save-result",
        "--save-detailed",
        f"--result-dir={folder}",
        f"--result-filename={file}",
    ]


async def offer(ask: Ask) -> tuple[list[Record], float]:
    """Runs it; returns the requests and the seconds they took by its own clock. Raises RequestError when it fails."""
    with tempfile.TemporaryDirectory(prefix="prebook-bench-serve-") as folder:
        command = [sys.executable, "-c", _RUN, *arguments(ask, folder=folder, file="result.json")]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        result = Path(folder) / "result.json"
        if process.returncode != 0 or not result.exists():
            tail = output.decode(errors="replace").splitlines()[-15:]
            raise RequestError("`vllm bench serve` failed:\n" + "\n".join(tail))
        answer = json.loads(result.read_text(encoding="utf-8"))
    return records(answer, ask=ask), float(answer["duration"])


def records(result: dict[str, Any], *, ask: Ask) -> list[Record]:
    """Its detailed result as our records. Pure."""
    first = min(result["start_times"], default=0.0)
    made = []
    rows = zip(
        result["start_times"], result["input_lens"], result["output_lens"], result["ttfts"], result["itls"],
        result["errors"], strict=True,
    )  # fmt: skip
    for number, (start, prompt, output, ttft, gaps, error) in enumerate(rows):
        arrival = Arrival(
            at=start - first, prompt_tokens=prompt, output_tokens=ask.lengths.output, seed=f"{ask.seed}-{number}"
        )
        if error or not output:
            said = str(error or "no output").strip().splitlines()[-1][:200]
            made.append(Record(arrival=arrival, late=0.0, error=f"vllm bench: {said}"))
            continue
        rest = sum(gaps)
        made.append(
            Record(
                arrival=arrival,
                late=0.0,
                ttft=ttft,
                tpot=rest / (output - 1) if output > 1 else None,
                itl=tuple(gaps),
                e2e=ttft + rest,
                tokens=output,
            )
        )
    return made
