"""Command line of the benchmarks: ``python -m prebook_bench COMMAND`` and ``prebook bench COMMAND``."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from prebook_bench import arguments, html_report, operator_bench
from prebook_bench.client import RequestError
from prebook_bench.commands import ab, exposed, first_request, idle, overhead, quick, short_prompts
from prebook_bench.engines import EngineError
from prebook_bench.rig import RigError
from prebook_bench.router import RouterError
from prebook_bench.trace import command as trace


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 done, 1 could not be measured, 2 wrong usage (argparse), 3 not possible here."""
    args = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return int(args.run(args, ["python", "-m", "prebook_bench", *argv]))
    except RigError as error:
        print(f"prebook_bench: {error}", file=sys.stderr)
        return 3
    except (EngineError, RouterError, RequestError, ValueError, OSError) as error:
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
    for module in (quick, exposed, ab, first_request, overhead, short_prompts, idle, operator_bench):
        module.register(commands)
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


def _run_report(args: argparse.Namespace, _: Sequence[str]) -> int:
    out = args.out or args.file.with_suffix(".html")
    out.write_text(html_report.html(json.loads(args.file.read_text(encoding="utf-8"))), encoding="utf-8")
    print(out)
    return 0


def _run_trace(args: argparse.Namespace, _: Sequence[str]) -> int:
    print(trace.run(args.folder, out=args.out, transfer=args.transfer, limit=args.limit))
    return 0


def _terminate(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM ends the run the way Ctrl-C does, so that engines and rig are cleaned up."""
    signal.raise_signal(signal.SIGINT)
