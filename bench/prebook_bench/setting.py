"""What all measurements over pairs that are started here share: the setting of a run, the requests, the warm-up, and
the head of the report.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp

from prebook_bench import client, machine, router
from prebook_bench.engines import PairOptions, Progress
from prebook_bench.link import measure_bits_per_second
from prebook_bench.modes import FrontKind, Mode
from prebook_bench.rig import Rig, parse_rate
from prebook_bench.workload import ModelShape, token_prompt

T = TypeVar("T")

_ATTEMPTS: Final = 6
_GOOD: Final = 2

#: What a request that failed raises. Anything else is a mistake of ours and ends the run.
FAILURES: Final = (aiohttp.ClientError, TimeoutError, client.RequestError)


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where and on what a run measures. `batches` are the modes that are up at the same time and take turns.

    A request may take `timeout_s` seconds before it counts as failed.
    """

    batches: tuple[tuple[Mode, ...], ...]
    pair: PairOptions
    rig: Rig
    command: tuple[str, ...]
    progress: Progress
    timeout_s: float = 60.0
    seed: int = 0

    @property
    def modes(self) -> tuple[Mode, ...]:
        """All modes of the run."""
        return tuple(mode for batch in self.batches for mode in batch)

    @cached_property
    def model(self) -> ModelShape:
        """The model under test."""
        return ModelShape.of(Path(self.pair.shape.model))

    @property
    def bits_per_second(self) -> float | None:
        """The link's nominal rate; None where it is not shaped."""
        return parse_rate(self.rig.rate) if self.rig.rate else None

    def body(self, tokens: int, *, output: int, seed: str) -> dict[str, Any]:
        """A greedy completion request with a prompt that nobody has sent before."""
        return completion(
            self.pair.shape.served_name, tokens=tokens, output=output, vocabulary=self.model.vocabulary, seed=seed
        )

    def about(self) -> dict[str, Any]:
        """The head of the report, as JSON values. To be called before anything is started: the load of the machine and
        the rate of the link belong to the state before."""
        fronts = {str(mode): str(self.pair.front_of(mode)) for mode in self.modes}
        if FrontKind.ROUTER in fronts.values():
            fronts = {mode: f"vllm-router {router.version()}" if front == FrontKind.ROUTER else front
                      for mode, front in fronts.items()}  # fmt: skip
        rate = measure_bits_per_second(self.rig) if self.rig.rate else None
        return {
            "machine": machine.describe(self.command),
            "rig": {**self.rig.describe(), "measured_bits_per_second": rate},
            "fronts": fronts,
            "interleaved": len(self.batches) == 1,
            "batches": [[str(mode) for mode in batch] for batch in self.batches],
            "model": f"{Path(self.pair.shape.model).name}, {self.model.dtype}",
            "kv_bytes_per_token": self.model.kv_bytes_per_token,
            "chunk_tokens": self.pair.shape.chunk_tokens,
            "seed": self.seed,
        }


def completion(model: str, *, tokens: int, output: int, vocabulary: int, seed: str) -> dict[str, Any]:
    """A completion request: token ids, a fixed number of output tokens, greedy."""
    return {
        "model": model,
        "prompt": token_prompt(tokens, vocabulary=vocabulary, seed=seed),
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
    }


def words(error: BaseException) -> str:
    """One line for a report."""
    return f"{type(error).__name__}: {str(error) or 'no answer in time'}"[:300]


async def warm_up(
    name: str,
    attempt: Callable[[int], Awaitable[None]],
    *,
    check: Callable[[], None],
    timeout_s: float,
    progress: Progress,
) -> list[dict[str, Any]]:
    """First requests of a target (handshakes, first allocations) until two were good; returns those that failed.

    Stock connectors fail some of them. A target that never warms up is measured all the same: what it fails then is a
    result. `check` raises when the target has died.
    """
    failures: list[dict[str, Any]] = []
    good = 0
    for number in range(_ATTEMPTS):
        try:
            async with asyncio.timeout(timeout_s):
                await attempt(number)
            good += 1
        except FAILURES as error:
            failures.append({"target": name, "phase": "warm-up", "attempt": number, "error": words(error)})
            progress(f"{name}: warm-up request {number + 1} failed: {words(error)}")
        check()
        if good == _GOOD:
            break
    else:
        progress(f"{name}: no {_GOOD} of {_ATTEMPTS} warm-up requests succeeded; it is measured as it is")
    return failures


def rotated(items: Sequence[T], *, by: int) -> list[T]:
    """The items beginning with another one: turns are taken in a new order each round."""
    turn = by % len(items)
    return [*items[turn:], *items[:turn]]
