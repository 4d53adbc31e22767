"""What the connector costs the engines' loop: time per engine step under full load, against engines without one.

Three arms for each engine, in turns: no connector; Prebook's connector with plain requests, so that only its hooks in
the loop run; Prebook with every request transferred. Prefill is kept busy with several prompts at once, and a step is
one chunk: the time from its first answer to its last over the chunks computed. Decode gets a full batch, and a step is
one token of each request: the median gap between tokens while all of them run, that is, after the last of them was
transferred. For prefill the third arm includes the work of the transfer itself (copying bytes into sockets, on the
engine's only core where it has but one). A fourth tells what that is without any connector: prefill without one, while
a process on its cores sends as many bytes to decode's place over a plain socket, a prompt's worth with each answer.
Everything is started several times, for the reason that ``short-prompts`` gives.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

import aiohttp

from prebook_bench import client, fleet, link, stats
from prebook_bench.engines import Engine, Pair
from prebook_bench.fronts import prefill_body
from prebook_bench.modes import Mode, Role
from prebook_bench.setting import FAILURES, Setting, rotated, words

T = TypeVar("T")

MODES: Final = (Mode.NONE, Mode.PREBOOK)


class Arm(enum.StrEnum):
    """What an engine carries, and what is asked of it."""

    NONE = "none"
    LOADED = "connector, plain requests"
    TRANSFERRING = "connector, transferring"
    SOCKET = "none, a plain socket beside it"

    @property
    def roles(self) -> tuple[Role, ...]:
        """The engines that it is measured on."""
        return (Role.PREFILL,) if self is Arm.SOCKET else tuple(Role)


@dataclasses.dataclass(frozen=True)
class OverheadOptions:
    """How often everything is started and each arm runs then, and its load: prompts at once and their tokens for
    prefill; requests at once, their prompt tokens and output tokens for decode."""

    starts: int
    repeats: int
    prefill_prompts: int
    prefill_tokens: int
    decode_requests: int
    decode_prompt: int
    decode_output: int


@dataclasses.dataclass(frozen=True)
class Step:
    """Seconds per step of one arm in one repeat."""

    role: Role
    arm: Arm
    start: int
    repeat: int
    seconds: float


async def measure(options: OverheadOptions, *, setting: Setting) -> dict[str, Any]:
    """Runs the measurement and returns the report. Raises EngineError when an engine does not start."""
    about = setting.about()
    steps: list[Step] = []
    errors: list[dict[str, Any]] = []
    for start in range(options.starts):
        await _start(start, options=options, setting=setting, steps=steps, errors=errors)
    return {
        "measurement": "overhead",
        **about,
        "load": dataclasses.asdict(options),
        "summary": summarise(steps),
        "steps": [dataclasses.asdict(step) for step in steps],
        "errors": errors,
    }


async def _start(
    start: int, *, options: OverheadOptions, setting: Setting, steps: list[Step], errors: list[dict[str, Any]]
) -> None:
    """Starts both pairs and runs every arm; what comes of it goes into `steps` and `errors`."""
    async with (
        fleet.running_pairs(setting.modes, rig=setting.rig, options=setting.pair, progress=setting.progress) as pairs,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session,
    ):
        by_mode = {pair.mode: pair for pair in pairs}
        arms = [
            (by_mode[Mode.NONE], Arm.NONE), (by_mode[Mode.PREBOOK], Arm.LOADED),
            (by_mode[Mode.PREBOOK], Arm.TRANSFERRING), (by_mode[Mode.NONE], Arm.SOCKET),
        ]  # fmt: skip
        for repeat in range(-1, options.repeats):  # the first round warms up
            for pair, arm in rotated(arms, by=repeat):
                async with fleet.awake(pair, among=pairs):
                    for role in arm.roles:
                        run = _Run(pair=pair, arm=arm, session=session, options=options, setting=setting,
                                   name=f"{setting.seed}-{role}-{start}-{repeat}")  # fmt: skip
                        try:
                            async with asyncio.timeout(setting.timeout_s):
                                seconds = await (run.prefill() if role is Role.PREFILL else run.decode())
                        except FAILURES as error:
                            errors.append({"target": arm, "role": role, "start": start, "repeat": repeat,
                                           "error": words(error)})  # fmt: skip
                            pair.check_alive()
                            continue
                        if repeat >= 0:
                            steps.append(Step(role=role, arm=arm, start=start, repeat=repeat, seconds=seconds))
                            setting.progress(f"start {start + 1}/{options.starts}, repeat {repeat + 1}, {role}, {arm}: "
                                             f"{seconds * 1e3:.2f} ms a step")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Run:
    """One arm's load on one engine."""

    pair: Pair
    arm: Arm
    session: aiohttp.ClientSession
    options: OverheadOptions
    setting: Setting
    name: str

    async def prefill(self) -> float:
        """Seconds per chunk of a prefill engine that has another prompt waiting: from its first answer to its last.

        What it takes to bring the prompts to it is not its step, and differs between the arms.
        """
        options = self.options
        bodies = self._bodies(options.prefill_prompts, tokens=options.prefill_tokens, output=1)
        answered: list[float] = []
        kv_bytes = options.prefill_tokens * self.setting.model.kv_bytes_per_token
        with self._beside(total=kv_bytes * (len(bodies) - 1)) as send:

            async def leg(body: dict[str, Any]) -> None:
                answered.append(await self._prefill_leg(body))
                if len(answered) < len(bodies):
                    send(kv_bytes)

            await together([leg(body) for body in bodies])
        chunk = self.setting.pair.shape.chunk_tokens
        return (max(answered) - min(answered)) * chunk / ((len(bodies) - 1) * options.prefill_tokens)

    def _beside(self, *, total: int) -> contextlib.AbstractContextManager[Callable[[int], None]]:
        if self.arm is not Arm.SOCKET:
            return contextlib.nullcontext(lambda _: None)
        return link.sending(self.setting.rig, total=total)

    async def _prefill_leg(self, body: dict[str, Any]) -> float:
        """The moment at which prefill's own answer was there."""
        if self.arm is Arm.TRANSFERRING:
            started = time.perf_counter()
            outcome = await fleet.front_of(self.pair).send(self.session, body)
            return started + (outcome.prefill_leg or outcome.answer.ttft)
        await client.post(self.session, _url(self.pair.prefill), body=prefill_body(body))
        return time.perf_counter()

    async def decode(self) -> float:
        """Seconds per step of a decode engine that runs a full batch."""
        options = self.options
        bodies = self._bodies(options.decode_requests, tokens=options.decode_prompt, output=options.decode_output)
        answers = await together([self._stream(body) for body in bodies])
        return full_batch_step([[answer.sent_at + t for t in answer.arrivals] for answer in answers])

    async def _stream(self, body: dict[str, Any]) -> client.Answer:
        if self.arm is Arm.TRANSFERRING:
            return (await fleet.front_of(self.pair).send(self.session, body)).answer
        return await client.stream(self.session, _url(self.pair.decode), body=body)

    def _bodies(self, count: int, *, tokens: int, output: int) -> list[dict[str, Any]]:
        return [self.setting.body(tokens, output=output, seed=f"{self.name}-{number}") for number in range(count)]


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs all at once and returns their results; the first failure ends the others and is raised itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return [task.result() for task in tasks]


def full_batch_step(arrivals: Sequence[Sequence[float]]) -> float:
    """The median gap between a request's tokens, over the time in which all requests were being decoded: from the last
    first token to the first last token. `arrivals` are moments on one clock. Raises RequestError without such gaps.
    """
    begin, end = max(one[0] for one in arrivals), min(one[-1] for one in arrivals)
    gaps = [
        later - earlier
        for one in arrivals
        for earlier, later in itertools.pairwise(one)
        if earlier >= begin and later <= end
    ]
    if not gaps:
        raise client.RequestError("the requests never ran all at once: ask for longer answers")
    return stats.median(gaps)


def summarise(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """One row per engine and arm: median step, and its ratio to the arm without a connector. Pure.

    A ratio is taken within a repeat; see :func:`stats.bootstrap_groups`, the starts being the groups. `starts_differ`:
    the arm's slowest start over its fastest.
    """
    rows = []
    for role in Role:
        base = {(step.start, step.repeat): step.seconds for step in steps if step.role is role and step.arm is Arm.NONE}
        for arm in Arm:
            mine = [step for step in steps if step.role is role and step.arm is arm]
            if not mine:
                continue
            starts = stats.medians(mine, key=lambda step: step.start, value=lambda step: step.seconds)
            ratios: dict[int, list[float]] = {}
            for step in mine:
                if (step.start, step.repeat) in base:
                    ratios.setdefault(step.start, []).append(step.seconds / base[step.start, step.repeat])
            interval = stats.bootstrap_groups(list(ratios.values())) if ratios else None
            rows.append(
                {
                    "role": role,
                    "arm": arm,
                    "starts": len(starts),
                    "repeats": len(mine),
                    "step_s": stats.median([step.seconds for step in mine]),
                    "to_none": dataclasses.asdict(interval) if interval else None,
                    "starts_differ": max(starts.values()) / min(starts.values()),
                }
            )
    return rows


def _url(engine: Engine) -> str:
    return f"{engine.identity.base_url}/v1/completions"
