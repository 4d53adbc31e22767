"""``overhead``: what the connector costs the engines' loop."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from prebook_bench import arguments, overhead, tables
from prebook_bench.commands import output
from prebook_bench.modes import FrontKind


def register(commands: arguments.Commands) -> None:
    """Adds the subcommand."""
    command = commands.add_parser(
        "overhead",
        help="time per engine step with Prebook's connector against none",
        description=overhead.__doc__,
        formatter_class=arguments.Help,
    )
    command.add_argument("--starts", type=arguments.positive, default=4, help="times that both pairs are started")
    command.add_argument("--repeats", type=arguments.positive, default=4, help="turns of each arm per start")
    command.add_argument("--prefill-prompts", type=arguments.several, default=4, help="prompts at once for prefill")
    command.add_argument("--prefill-tokens", type=arguments.positive, default=2048, help="tokens of each")
    command.add_argument("--decode-requests", type=arguments.positive, default=8, help="requests at once for decode")
    command.add_argument("--decode-prompt", type=arguments.positive, default=256, help="prompt tokens of each")
    command.add_argument("--decode-output", type=arguments.positive, default=256, help="output tokens of each")
    command.add_argument("--timeout", type=float, default=120.0, help="seconds after which a turn has failed")
    command.add_argument("--rate", type=arguments.rate, default="1gbit", help="rate of the link; none: loopback")
    arguments.add_engine_arguments(command)
    arguments.add_output_arguments(command, html=False)
    command.set_defaults(run=run, together="yes", front=FrontKind.DIRECT)


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Measures; 1 when an arm has no figure."""
    options = overhead.OverheadOptions(
        starts=args.starts,
        repeats=args.repeats,
        prefill_prompts=args.prefill_prompts,
        prefill_tokens=args.prefill_tokens,
        decode_requests=args.decode_requests,
        decode_prompt=args.decode_prompt,
        decode_output=args.decode_output,
    )
    pair = arguments.pair_options(args)
    with arguments.setting_of(args, overhead.MODES, pair=pair, command=command, timeout_s=args.timeout) as setting:
        report = asyncio.run(overhead.measure(options, setting=setting))
    output.write(report, text=tables.overhead_table(report), args=args)
    return 0 if len(report["summary"]) == sum(len(arm.roles) for arm in overhead.Arm) else 1
