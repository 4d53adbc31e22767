"""``first-request``: the first request of a fresh pair."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from prebook_bench import arguments, first_request, tables
from prebook_bench.commands import output
from prebook_bench.commands.ab import refuse_none
from prebook_bench.modes import FrontKind


def register(commands: arguments.Commands) -> None:
    """Adds the subcommand."""
    command = commands.add_parser(
        "first-request",
        help="first request of a fresh pair against warm ones",
        description=first_request.__doc__,
        formatter_class=arguments.Help,
    )
    command.add_argument("--modes", type=arguments.modes, default="pull,push,prebook,aggregated", help="which pairs")
    command.add_argument("--tokens", type=arguments.positive, default=2000, help="prompt length")
    command.add_argument("--repeats", type=arguments.positive, default=3, help="fresh pairs of each mode")
    command.add_argument("--warm", type=arguments.positive, default=8, help="requests to each pair after its first")
    command.add_argument("--timeout", type=float, default=60.0, help="seconds after which a request counts as failed")
    arguments.add_link_arguments(command, front=FrontKind.DISPATCH)
    arguments.add_engine_arguments(command)
    arguments.add_output_arguments(command, html=False)
    command.set_defaults(run=run, together="no")


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Measures; 1 when a mode answered no first request."""
    refuse_none(args.modes)
    options = first_request.FirstOptions(tokens=args.tokens, repeats=args.repeats, warm=args.warm)
    pair = arguments.pair_options(args)
    with arguments.setting_of(args, args.modes, pair=pair, command=command, timeout_s=args.timeout) as setting:
        report = asyncio.run(first_request.measure(options, setting=setting))
    output.write(report, text=tables.first_table(report), args=args)
    return 0 if all(row["first_s"] is not None for row in report["summary"]) else 1
