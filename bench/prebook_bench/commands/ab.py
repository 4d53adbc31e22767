"""``ab``: the same load against several targets."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prebook_bench import ab, arguments, manifest, tables
from prebook_bench.commands import output
from prebook_bench.modes import FrontKind, Mode
from prebook_bench.summary import Slo


def register(commands: arguments.Commands) -> None:
    """Adds the subcommand."""
    command = commands.add_parser(
        "ab",
        help="the same load against several targets: TTFT, TPOT, goodput",
        description=ab.__doc__,
        formatter_class=arguments.Help,
    )
    command.add_argument("--modes", type=arguments.modes, default="pull,push,prebook",
                         help="pairs to start here, or variants of FILE; 'aggregated' is one engine on the cores of "
                         "both")  # fmt: skip
    what = command.add_mutually_exclusive_group()
    what.add_argument("--endpoints", type=arguments.endpoints, default=None,
                      help="NAME=URL,… of OpenAI-compatible servers that run already")  # fmt: skip
    what.add_argument("--file", type=Path, default=None, metavar="MODEL",
                      help="a DisaggregatedModel; each mode is a local run of it with another connector")  # fmt: skip
    add_load_arguments(command)
    command.add_argument("--generator", choices=["own", "vllm"], default="own",
                         help="who offers the load: this program, or `vllm bench serve`")  # fmt: skip
    command.add_argument("--tokenizer", default=None,
                         help="model folder whose tokenizer `vllm bench serve` makes its prompts with; for pairs "
                         "started here: the model's own")  # fmt: skip
    command.add_argument("--served-model", default="", help="model name that endpoints expect; default: their first")
    command.add_argument("--vocabulary", type=arguments.positive, default=400,
                         help="prompts for endpoints are random token ids below this")  # fmt: skip
    arguments.add_link_arguments(command, front=FrontKind.DISPATCH)
    arguments.add_engine_arguments(command)
    arguments.add_output_arguments(command, html=True)
    command.set_defaults(run=run)


def add_load_arguments(
    command: argparse.ArgumentParser,
    *,
    rates: str = "0.2,0.4",
    requests: int = 40,
    rounds: int = 2,
    workload: str = "sonnet",
) -> None:
    """What is offered."""
    group = command.add_argument_group("load")
    group.add_argument("--rates", type=arguments.rates, default=rates, help="requests per second")
    group.add_argument("--requests", type=arguments.positive, default=requests, help="per target and rate")
    group.add_argument("--rounds", type=arguments.positive, default=rounds, help="turns that targets take per rate")
    group.add_argument("--workload", type=arguments.lengths, default=workload,
                       help="sonnet (512:64), sharegpt, long (4000:32), or PROMPT:OUTPUT in tokens")  # fmt: skip
    group.add_argument("--slo-ttft", type=float, default=2.0, help="seconds; for goodput")
    group.add_argument("--slo-tpot", type=float, default=0.2, help="seconds; for goodput")
    group.add_argument("--request-timeout", type=float, default=120.0, help="seconds until a request has failed")
    group.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and prompts")


def options_of(args: argparse.Namespace) -> ab.AbOptions:
    """The load of the arguments."""
    return ab.AbOptions(
        rates=args.rates,
        requests=args.requests,
        rounds=min(args.rounds, args.requests),
        lengths=args.workload,
        slo=Slo(ttft=args.slo_ttft, tpot=args.slo_tpot),
        vocabulary=getattr(args, "vocabulary", 400),
        model=getattr(args, "served_model", ""),
        timeout_s=args.request_timeout,
        seed=args.seed,
    )


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Measures; 1 when a target answered nothing at some rate."""
    options = options_of(args)
    if args.generator == "vllm":
        if args.tokenizer is None and (args.endpoints or args.file):
            raise ValueError("`vllm bench serve` makes its prompts with a tokenizer: name its folder with --tokenizer")
        options = dataclasses.replace(options, tokenizer=args.tokenizer)
    if args.endpoints:
        report = asyncio.run(
            ab.run_endpoints(args.endpoints, options=options, command=command, progress=arguments.progress)
        )
    elif args.file:
        documents = manifest.read(args.file, modes=args.modes)
        measuring = manifest.run(args.file, documents=documents, modes=args.modes, options=options, command=command,
                                 progress=arguments.progress)  # fmt: skip
        report = asyncio.run(measuring)
    else:
        report = _pairs(args, options=options, command=command)
    output.write(report, text=tables.ab_table(report), args=args)
    return 0 if report["summary"] and all(row["answered"] for row in report["summary"]) else 1


def refuse_none(modes: Sequence[Mode]) -> None:
    """Raises ValueError for two engines that are no pair."""
    if Mode.NONE in modes:
        raise ValueError("mode none is two engines that know nothing of each other: it is for `idle` only")


def _pairs(args: argparse.Namespace, *, options: ab.AbOptions, command: Sequence[str]) -> dict[str, Any]:
    refuse_none(args.modes)
    pair = arguments.pair_options(args)
    if args.generator == "vllm":
        options = dataclasses.replace(options, tokenizer=args.tokenizer or pair.shape.model)
    with arguments.setting_of(args, args.modes, pair=pair, command=command, timeout_s=args.request_timeout) as setting:
        return asyncio.run(ab.run_pairs(options, setting=setting))
