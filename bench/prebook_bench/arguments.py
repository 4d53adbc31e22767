"""Arguments that the benchmark commands share, and the values that they stand for."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prebook_bench import fleet, load, machine, router
from prebook_bench.engines import PairOptions
from prebook_bench.load import Lengths
from prebook_bench.modes import EngineShape, FrontKind, Mode, PrebookOptions
from prebook_bench.rig import Rig, RigError, loopback, parse_rate, shaped, split_cores, why_not
from prebook_bench.setting import Setting
from prebook_operator.local.cpu import fast_bfloat16

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults shown, descriptions left as they are written."""


def add_engine_arguments(command: argparse.ArgumentParser) -> None:
    """How engines are started."""
    group = command.add_argument_group("engines")
    group.add_argument("--model", type=Path, default=None,
                       help="model folder; without it a random model with 16 KiB of KV a token, in bfloat16 where the "
                       "processor computes that fast, else in float32")  # fmt: skip
    group.add_argument("--chunk", type=positive, default=512, help="tokens per engine step (prefill chunk)")
    group.add_argument("--block-size", type=positive, default=None, help="tokens per KV block; engine's default")
    group.add_argument("--kv-cache-mib", type=positive, default=512, help="KV cache of each engine")
    group.add_argument("--max-model-len", type=positive, default=8704, help="longest prompt and answer, in tokens")
    group.add_argument("--prefill-cores", type=cores, default=None, help="cores of prefill; default: lower half")
    group.add_argument("--decode-cores", type=cores, default=None, help="cores of decode; default: upper half")


def add_link_arguments(command: argparse.ArgumentParser, *, front: FrontKind) -> None:
    """The link between the engines, and who drives the legs."""
    group = command.add_argument_group("link and front")
    group.add_argument("--rate", type=rate, default="1gbit", help="rate of the link P to D; none: loopback, no root")
    group.add_argument("--front", type=FrontKind, default=front,
                       choices=[FrontKind.DIRECT, FrontKind.DISPATCH, FrontKind.ROUTER],
                       help="who drives the two legs: this client, the dispatch middleware in decode, or for the stock "
                       "connectors vllm-router; prebook-first always has the dispatcher")  # fmt: skip
    group.add_argument("--together", choices=["auto", "yes", "no"], default="auto",
                       help="all pairs up and the idle ones frozen, or one pair after the other")  # fmt: skip
    group.add_argument("--timelines", type=Path, default=None, help="folder for Prebook's per-request timelines")


def add_output_arguments(command: argparse.ArgumentParser, *, html: bool) -> None:
    """Where the report goes."""
    group = command.add_argument_group("output")
    group.add_argument("--json", type=Path, default=None, help="write the JSON report to this file, not to stdout")
    if html:
        group.add_argument("--html", type=Path, default=None, help="also write a self-contained HTML report")


def pair_options(args: argparse.Namespace, **changes: Any) -> PairOptions:
    """Engine settings out of the arguments, with `changes`; makes the tiny model when no other is named."""
    timelines: Path | None = getattr(args, "timelines", None)
    if timelines is not None:
        timelines.mkdir(parents=True, exist_ok=True)
    shape = EngineShape(
        model=str(args.model or _random_model()),
        max_model_len=args.max_model_len,
        chunk_tokens=args.chunk,
        block_size=args.block_size,
        kv_cache_bytes=args.kv_cache_mib * 1024 * 1024,
    )
    made = PairOptions(
        shape=shape,
        front=getattr(args, "front", FrontKind.DIRECT),
        prebook=PrebookOptions(),
        timeline_dir=timelines.absolute() if timelines else None,
    )
    return dataclasses.replace(made, **changes)


@contextlib.contextmanager
def setting_of(
    args: argparse.Namespace, modes: Sequence[Mode], *, pair: PairOptions, command: Sequence[str], timeout_s: float
) -> Iterator[Setting]:
    """The rig set up, and the modes divided into those that fit into memory at the same time."""
    if FrontKind.ROUTER in {pair.front_of(mode) for mode in modes}:
        router.find()  # says what is missing before minutes are spent on starting engines
    together: str = getattr(args, "together", "auto")
    free = machine.meminfo(Path("/proc/meminfo").read_text(encoding="utf-8"))["MemAvailable"]
    if together == "auto":
        batches = fleet.batches(modes, available_bytes=free, kv_cache_bytes=pair.shape.kv_cache_bytes)
    else:
        batches = (tuple(modes),) if together == "yes" else tuple((mode,) for mode in modes)
    with rig_of(args, rate=args.rate) as made:
        yield Setting(
            batches=batches,
            pair=pair,
            rig=made,
            command=tuple(command),
            progress=progress,
            timeout_s=timeout_s,
            seed=getattr(args, "seed", 0),
        )


def rig_of(args: argparse.Namespace, *, rate: str | None) -> AbstractContextManager[Rig]:
    """The rig of the arguments. Raises RigError when a shaped link was asked for and cannot be had."""
    lower, upper = split_cores(sorted(os.sched_getaffinity(0)))
    groups = (args.prefill_cores or lower, args.decode_cores or upper)
    if rate is None:
        return loopback(cores=groups)
    if reason := why_not():
        raise RigError(f"the shaped link cannot be set up: {reason}")
    return shaped(rate=rate, cores=groups)


def progress(line: str) -> None:
    """Progress goes to stderr; stdout holds the result alone."""
    print(line, file=sys.stderr, flush=True)


def _random_model() -> Path:
    from prebook_operator.local.models import ModelError, ensure_model

    name = model_for(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    try:
        return ensure_model(name, progress=progress)
    except ModelError as error:
        raise ValueError(f"the model {name} cannot be prepared: {error}") from error


def model_for(cpuinfo: str) -> str:
    """The random model that this processor computes fast. Both have 16 KiB of KV a token: one line time."""
    return "tiny" if fast_bfloat16(cpuinfo) else "tiny-kv4-f32"


def modes(text: str) -> tuple[Mode, ...]:
    """Comma-separated modes."""
    try:
        return tuple(dict.fromkeys(Mode(word.strip()) for word in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; known: {', '.join(Mode)}") from error


def whole_numbers(text: str) -> tuple[int, ...]:
    """Comma-separated positive whole numbers."""
    return tuple(positive(word) for word in text.split(","))


def rates(text: str) -> tuple[float, ...]:
    """Comma-separated positive numbers."""
    try:
        values = tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not a list of rates: {text!r} (write it as 0.5,1,2)") from error
    if any(not 0 < value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"rates must be positive: {text!r}")
    return values


def lengths(text: str) -> Lengths:
    """A workload."""
    try:
        return load.parse_lengths(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def endpoints(text: str) -> dict[str, str]:
    """``NAME=URL,…`` in order."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, url = part.partition("=")
        if not equals or not name or not url.startswith(("http://", "https://")):
            raise argparse.ArgumentTypeError(f"not NAME=URL: {part!r} (write it as pull=http://host:8000)")
        if name in found:
            raise argparse.ArgumentTypeError(f"two endpoints are called {name!r}")
        found[name] = url
    return found


def positive(text: str) -> int:
    """A positive whole number."""
    return _at_least(1, text)


def several(text: str) -> int:
    """A whole number of at least 2."""
    return _at_least(2, text)


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not a whole number: {text!r}") from error
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, not {value}")
    return value


def rate(text: str) -> str | None:
    """A link rate in tc's words, or None for ``none``."""
    if text == "none":
        return None
    try:
        parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def cores(text: str) -> tuple[int, ...]:
    """Cores as taskset writes them: ``0,2-3``."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise argparse.ArgumentTypeError(f"not a list of cores: {text!r} (write it as 0,2-3)")
        found.extend(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(set(found)))
