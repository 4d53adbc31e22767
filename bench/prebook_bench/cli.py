"""Command line of the benchmarks: ``python -m prebook_bench exposed|idle|ab|report|trace`` and ``prebook bench …``."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from prebook_bench import ab, arguments, exposed, fleet, html_report, idle, machine, operator_bench, tables
from prebook_bench.client import RequestError
from prebook_bench.engines import EngineError
from prebook_bench.modes import Mode
from prebook_bench.rig import RigError
from prebook_bench.summary import Slo
from prebook_bench.trace import command as trace
from prebook_bench.workload import ModelShape

_Commands = argparse._SubParsersAction


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 done, 1 could not be measured, 2 wrong usage (argparse), 3 not possible here."""
    args = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return int(args.run(args, ["python", "-m", "prebook_bench", *argv]))
    except RigError as error:
        print(f"prebook_bench: {error}", file=sys.stderr)
        return 3
    except (EngineError, RequestError, ValueError, OSError) as error:
        print(f"prebook_bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("prebook_bench: interrupted; engines stopped, rig removed", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    root = argparse.ArgumentParser(
        prog="python -m prebook_bench",
        description="Measures pull, stock push and Prebook side by side in one run. Progress goes to stderr, "
        "a table and the JSON report to stdout.",
    )
    commands = root.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_exposed(commands)
    _add_idle(commands)
    _add_ab(commands)
    operator_bench.register(commands)
    command = commands.add_parser(
        "report", help="HTML page out of a JSON report", description="Makes the self-contained HTML page of a report."
    )
    command.add_argument("file", type=Path, metavar="JSON", help="report of `exposed` or `ab`")
    command.add_argument("--out", type=Path, default=None, help="file to write (default: JSON's name with .html)")
    command.set_defaults(run=_run_report)
    command = commands.add_parser(
        "trace", help="picture or Chrome trace of timelines", description=trace.DESCRIPTION,
        formatter_class=arguments.Help,
    )  # fmt: skip
    trace.add_arguments(command)
    command.set_defaults(run=_run_trace)
    return root


def _add_exposed(commands: _Commands[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "exposed",
        help="exposed transfer: TTFT minus the bare prefill leg",
        description=exposed.__doc__,
        formatter_class=arguments.Help,
    )
    command.add_argument("--modes", type=arguments.modes, default="pull,push,prebook", help="what to compare")
    command.add_argument("--tokens", type=arguments.whole_numbers, default="2000,4000", help="prompt lengths in tokens")
    command.add_argument("--repeats", type=arguments.positive, default=5, help="measured requests per mode and length")
    command.add_argument("--timeout", type=float, default=60.0, help="seconds after which a request counts as failed")
    command.add_argument("--order", choices=["auto", "together", "apart"], default="auto",
                         help="all pairs up and the idle ones frozen, or one pair after the other")  # fmt: skip
    arguments.add_link_arguments(command, front="direct")
    arguments.add_engine_arguments(command)
    arguments.add_output_arguments(command, html=True)
    command.set_defaults(run=_run_exposed)


def _add_idle(commands: _Commands[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "idle", help="CPU that an idle pair uses", description=idle.__doc__, formatter_class=arguments.Help
    )
    command.add_argument("--modes", type=arguments.modes, default="none,push,prebook", help="which pairs")
    command.add_argument("--seconds", type=float, default=20.0, help="how long each idle pair is watched")
    arguments.add_engine_arguments(command)
    arguments.add_output_arguments(command, html=False)
    command.set_defaults(run=_run_idle)


def _add_ab(commands: _Commands[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "ab",
        help="the same load against several targets: TTFT, TPOT, goodput",
        description=ab.__doc__,
        formatter_class=arguments.Help,
    )
    what = command.add_mutually_exclusive_group()
    what.add_argument("--modes", type=arguments.modes, default="pull,push,prebook",
                      help="pairs to start here; 'aggregated' is one engine on the cores of both")  # fmt: skip
    what.add_argument("--endpoints", type=arguments.endpoints, default=None,
                      help="NAME=URL,… of OpenAI-compatible servers that run already")  # fmt: skip
    command.add_argument("--rates", type=arguments.rates, default="0.2,0.4", help="requests per second")
    command.add_argument("--requests", type=arguments.positive, default=40, help="per target and rate")
    command.add_argument("--rounds", type=arguments.positive, default=2, help="turns that the targets take per rate")
    command.add_argument("--workload", type=arguments.lengths, default="sonnet",
                         help="sonnet (512:64), sharegpt, long (4000:32), or PROMPT:OUTPUT in tokens")  # fmt: skip
    command.add_argument("--slo-ttft", type=float, default=2.0, help="seconds; for goodput")
    command.add_argument("--slo-tpot", type=float, default=0.2, help="seconds; for goodput")
    command.add_argument("--served-model", default="", help="model name that endpoints expect; default: their first")
    command.add_argument("--vocabulary", type=arguments.positive, default=20000,
                         help="prompts for endpoints are random token ids below this")  # fmt: skip
    command.add_argument("--seed", type=int, default=0, help="of arrivals, lengths and prompts")
    arguments.add_link_arguments(command, front="dispatch")
    arguments.add_engine_arguments(command)
    arguments.add_output_arguments(command, html=True)
    command.set_defaults(run=_run_ab)


def _run_exposed(args: argparse.Namespace, command: Sequence[str]) -> int:
    unfit = [mode for mode in args.modes if not mode.transfers]
    if unfit:
        raise ValueError(f"nothing is transferred in mode {', '.join(unfit)}: it cannot be measured here")
    pair = arguments.pair_options(args)
    free = machine.meminfo(Path("/proc/meminfo").read_text(encoding="utf-8"))["MemAvailable"]
    fits = fleet.fits_together(len(args.modes), available_bytes=free, kv_cache_bytes=pair.shape.kv_cache_bytes)
    options = exposed.ExposedOptions(
        modes=args.modes,
        lengths=args.tokens,
        repeats=args.repeats,
        pair=pair,
        timeout_s=args.timeout,
        together=fits if args.order == "auto" else args.order == "together",
    )
    with arguments.rig_of(args, rate=args.rate) as rig:
        report = asyncio.run(exposed.measure(options, rig=rig, command=command, progress=arguments.progress))
    _print(report, text=tables.exposed_table(report), args=args)
    return 0 if len(report["summary"]) == len(args.modes) * len(args.tokens) else 1


def _run_idle(args: argparse.Namespace, command: Sequence[str]) -> int:
    if Mode.AGGREGATED in args.modes:
        raise ValueError("mode aggregated is no pair: it cannot be measured here")
    pair = arguments.pair_options(args)
    with arguments.rig_of(args, rate=None) as rig:
        report = asyncio.run(
            idle.measure(
                args.modes,
                seconds=args.seconds,
                rig=rig,
                options=pair,
                command=command,
                progress=arguments.progress,
            )
        )
    _print(report, text=tables.idle_table(report), args=args)
    return 0


def _run_ab(args: argparse.Namespace, command: Sequence[str]) -> int:
    options = ab.AbOptions(
        rates=args.rates,
        requests=args.requests,
        rounds=min(args.rounds, args.requests),
        lengths=args.workload,
        slo=Slo(ttft=args.slo_ttft, tpot=args.slo_tpot),
        vocabulary=args.vocabulary,
        model=args.served_model,
        seed=args.seed,
    )
    if args.endpoints:
        report = asyncio.run(
            ab.run_endpoints(args.endpoints, options=options, command=command, progress=arguments.progress)
        )
    else:
        report = _ab_pairs(args, options=options, command=command)
    _print(report, text=tables.ab_table(report), args=args)
    return 0 if all(row["answered"] for row in report["summary"]) else 1


def _ab_pairs(args: argparse.Namespace, *, options: ab.AbOptions, command: Sequence[str]) -> dict[str, Any]:
    if Mode.NONE in args.modes:
        raise ValueError("mode none is two engines that know nothing of each other: it is for `idle` only")
    pair = arguments.pair_options(args)
    options = dataclasses.replace(
        options, model=pair.shape.served_name, vocabulary=ModelShape.of(Path(pair.shape.model)).vocabulary
    )
    with arguments.rig_of(args, rate=args.rate) as rig:
        return asyncio.run(
            ab.run_pairs(args.modes, rig=rig, pair=pair, options=options, command=command, progress=arguments.progress)
        )


def _run_report(args: argparse.Namespace, _: Sequence[str]) -> int:
    out = args.out or args.file.with_suffix(".html")
    out.write_text(html_report.html(json.loads(args.file.read_text(encoding="utf-8"))), encoding="utf-8")
    print(out)
    return 0


def _run_trace(args: argparse.Namespace, _: Sequence[str]) -> int:
    print(trace.run(args.folder, out=args.out, transfer=args.transfer, limit=args.limit))
    return 0


def _print(report: dict[str, Any], *, text: str, args: argparse.Namespace) -> None:
    print(text)
    body = json.dumps(report, indent=2)
    if args.json is None:
        print(body)
    else:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(body + "\n", encoding="utf-8")
        print(f"\nJSON: {args.json}")
    page: Path | None = getattr(args, "html", None)
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(html_report.html(report), encoding="utf-8")
        print(f"HTML: {page}")


def _terminate(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM ends the run the way Ctrl-C does, so that engines and rig are cleaned up."""
    signal.raise_signal(signal.SIGINT)
