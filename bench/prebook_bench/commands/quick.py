"""``quick``: exposed transfer and an A/B of the same pairs, small, in minutes."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from prebook_bench import ab, arguments, exposed, quick, tables
from prebook_bench.commands import output
from prebook_bench.commands.ab import add_load_arguments, options_of, refuse_none
from prebook_bench.modes import FrontKind


def register(commands: arguments.Commands) -> None:
    """Adds the subcommand."""
    command = commands.add_parser(
        "quick",
        help="exposed transfer and an A/B on the same engines, in minutes",
        description=quick.__doc__,
        formatter_class=arguments.Help,
    )
    command.add_argument("--modes", type=arguments.modes, default="pull,push,prebook", help="what to compare")
    command.add_argument("--tokens", type=arguments.whole_numbers, default="1000,2000,3000", help="prompt lengths")
    command.add_argument("--repeats", type=arguments.positive, default=2, help="measured requests per mode and length")
    add_load_arguments(command, rates="0.5,0.9", requests=4, rounds=1, workload="2000:32")
    arguments.add_link_arguments(command, front=FrontKind.DISPATCH)
    arguments.add_engine_arguments(command)
    arguments.add_output_arguments(command, html=True)
    command.set_defaults(run=run)


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Measures; 1 when a figure is missing."""
    refuse_none(args.modes)
    options = options_of(args)
    lengths = exposed.ExposedOptions(lengths=args.tokens, repeats=args.repeats)
    pair = arguments.pair_options(args)
    with arguments.setting_of(args, args.modes, pair=pair, command=command, timeout_s=args.request_timeout) as setting:
        report = asyncio.run(quick.measure(lengths, load=ab.for_setting(options, setting=setting), setting=setting))
    text = f"{tables.exposed_table(report['exposed'])}\n\n{tables.ab_table(report['ab'])}"
    output.write(report, text=text, args=args)
    moving = sum(mode.transfers for mode in args.modes)
    whole = len(report["exposed"]["summary"]) == moving * len(args.tokens)
    return 0 if whole and all(row["answered"] for row in report["ab"]["summary"]) else 1
