"""Open-loop load: requests arrive when a schedule says so, whether or not earlier ones have been answered.

Latency is counted from the scheduled arrival, not from when the generator got round to sending, so that a slow server
cannot slow the load down and look better for it (coordinated omission). How late the generator itself was is reported.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import aiohttp

from prebook_bench import client


@dataclasses.dataclass(frozen=True)
class Lengths:
    """A distribution of prompt and output lengths, in tokens. `kind` "fixed" ignores the sigmas.

    "lognormal": medians `prompt` and `output` with the given sigma of the logarithm, cut to [16, limit] and [1, limit].
    """

    name: str
    kind: str
    prompt: int
    output: int
    prompt_sigma: float = 0.0
    output_sigma: float = 0.0
    limit: int = 8192

    def draw(self, source: random.Random) -> tuple[int, int]:
        """One pair of prompt and output length."""
        if self.kind == "fixed":
            return self.prompt, self.output
        prompt = math.exp(source.gauss(math.log(self.prompt), self.prompt_sigma))
        output = math.exp(source.gauss(math.log(self.output), self.output_sigma))
        return min(max(16, round(prompt)), self.limit), min(max(1, round(output)), self.limit)


#: Named workloads. `sonnet`: the 512 in, 64 out of the article that started this project. `sharegpt`: a log-normal with
#: medians and spread like chat conversations (short, long-tailed). `long`: documents.
WORKLOADS: Final = {
    "sonnet": Lengths("sonnet", "fixed", prompt=512, output=64),
    "sharegpt": Lengths("sharegpt", "lognormal", prompt=120, output=90, prompt_sigma=1.3, output_sigma=1.1, limit=4096),
    "long": Lengths("long", "fixed", prompt=4000, output=32),
}


def parse_lengths(text: str) -> Lengths:
    """A name of :data:`WORKLOADS` or ``PROMPT:OUTPUT``. Raises ValueError for anything else."""
    if text in WORKLOADS:
        return WORKLOADS[text]
    prompt, colon, output = text.partition(":")
    if colon and prompt.isdigit() and output.isdigit() and int(prompt) > 0 and int(output) > 0:
        return Lengths(text, "fixed", prompt=int(prompt), output=int(output))
    raise ValueError(f"not a workload: {text!r} (known: {', '.join(WORKLOADS)}, or PROMPT:OUTPUT such as 2000:16)")


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One planned request: seconds after the start of the block, lengths, seed of its prompt."""

    at: float
    prompt_tokens: int
    output_tokens: int
    seed: str


def plan(*, rate: float, count: int, lengths: Lengths, seed: int) -> list[Arrival]:
    """`count` Poisson arrivals at `rate` per second. The same seed gives the same plan, for every target alike."""
    if rate <= 0 or count < 1:
        raise ValueError("rate and count must be positive")
    source = random.Random(f"{seed}-{rate}-{lengths.name}")
    at = 0.0
    arrivals = []
    for number in range(count):
        at += source.expovariate(rate)
        prompt, output = lengths.draw(source)
        arrivals.append(Arrival(at=at, prompt_tokens=prompt, output_tokens=output, seed=f"{seed}-{number}"))
    return arrivals


@dataclasses.dataclass(frozen=True)
class Record:
    """What became of one request. Seconds from the scheduled arrival; `late` is how late it was sent."""

    arrival: Arrival
    late: float
    ttft: float | None = None
    tpot: float | None = None
    itl: tuple[float, ...] = ()
    e2e: float | None = None
    tokens: int = 0
    remote: bool | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the request was answered."""
        return self.error is None


Send = Callable[[aiohttp.ClientSession, Arrival], Awaitable[client.Answer]]


async def offer(
    arrivals: Sequence[Arrival], *, send: Send, session: aiohttp.ClientSession, timeout_s: float
) -> list[Record]:
    """Offers the load and waits for every answer; failures become records with an error."""
    started = time.perf_counter()
    tasks: list[asyncio.Task[Record]] = []
    try:
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, started + arrival.at - time.perf_counter()))
            tasks.append(asyncio.create_task(_one(arrival, send=send, session=session, due=started + arrival.at,
                                                  timeout_s=timeout_s)))  # fmt: skip
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _one(arrival: Arrival, *, send: Send, session: aiohttp.ClientSession, due: float, timeout_s: float) -> Record:
    late = time.perf_counter() - due
    try:
        async with asyncio.timeout(timeout_s):
            answer = await send(session, arrival)
    except (aiohttp.ClientError, TimeoutError, client.RequestError) as error:
        return Record(
            arrival=arrival, late=late, error=f"{type(error).__name__}: {str(error) or 'no answer in time'}"[:200]
        )
    return record_of(answer, arrival=arrival, late=late)


def record_of(answer: client.Answer, *, arrival: Arrival, late: float) -> Record:
    """The record of an answered request; `late` is added to what is counted from the scheduled arrival."""
    gaps = tuple(b - a for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False))
    remote: bool | None = None
    if "x-prebook-transfer" in answer.headers:
        remote = True
    elif "x-prebook-local" in answer.headers:
        remote = False
    return Record(
        arrival=arrival,
        late=late,
        ttft=answer.ttft + late,
        tpot=answer.tpot,
        itl=gaps,
        e2e=answer.end + late,
        tokens=answer.tokens,
        remote=remote,
    )
