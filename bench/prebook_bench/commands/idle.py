"""``idle``: CPU that an idle pair uses."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from prebook_bench import arguments, idle, tables
from prebook_bench.commands import output
from prebook_bench.modes import Mode


def register(commands: arguments.Commands) -> None:
    """Adds the subcommand."""
    command = commands.add_parser(
        "idle", help="CPU that an idle pair uses", description=idle.__doc__, formatter_class=arguments.Help
    )
    command.add_argument("--modes", type=arguments.modes, default="none,push,prebook", help="which pairs")
    command.add_argument("--seconds", type=float, default=20.0, help="how long each idle pair is watched")
    arguments.add_engine_arguments(command)
    arguments.add_output_arguments(command, html=False)
    command.set_defaults(run=run)


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Measures."""
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
    output.write(report, text=tables.idle_table(report), args=args)
    return 0
