"""``exposed``: how much of the transfer a client sees."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from prebook_bench import arguments, exposed, tables
from prebook_bench.commands import output
from prebook_bench.modes import FrontKind, Mode


def register(commands: arguments.Commands) -> None:
    """Adds the subcommand."""
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
    arguments.add_link_arguments(command, front=FrontKind.DIRECT)
    arguments.add_engine_arguments(command)
    arguments.add_output_arguments(command, html=True)
    command.set_defaults(run=run)


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Measures; 1 when a mode has no figure for a length."""
    refuse_plain(args.modes)
    options = exposed.ExposedOptions(lengths=args.tokens, repeats=args.repeats)
    pair = arguments.pair_options(args)
    with arguments.setting_of(args, args.modes, pair=pair, command=command, timeout_s=args.timeout) as setting:
        report = asyncio.run(exposed.measure(options, setting=setting))
    output.write(report, text=tables.exposed_table(report), args=args)
    return 0 if len(report["summary"]) == len(args.modes) * len(args.tokens) else 1


def refuse_plain(modes: Sequence[Mode]) -> None:
    """Raises ValueError for modes in which nothing moves."""
    if unfit := [mode for mode in modes if not mode.transfers]:
        raise ValueError(f"nothing is transferred in mode {', '.join(unfit)}: it cannot be measured here")
