"""``short-prompts``: prompts that decode prefills itself, against one engine alone."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from prebook_bench import arguments, short_prompts, tables
from prebook_bench.commands import output
from prebook_bench.modes import FrontKind


def register(commands: arguments.Commands) -> None:
    """Adds the subcommand."""
    command = commands.add_parser(
        "short-prompts",
        help="short prompts through Prebook against one engine alone",
        description=short_prompts.__doc__,
        formatter_class=arguments.Help,
    )
    command.add_argument("--tokens", type=arguments.whole_numbers, default="16,60", help="prompt lengths")
    command.add_argument("--output", type=arguments.positive, default=16, help="tokens of each answer")
    command.add_argument("--starts", type=arguments.positive, default=4, help="times that both engines are started")
    command.add_argument("--blocks", type=arguments.positive, default=4, help="turns of each mode per start")
    command.add_argument("--requests", type=arguments.positive, default=10, help="per turn and length")
    command.add_argument("--local-prefill-max-tokens", type=arguments.positive, default=64,
                         help="what decode computes itself")  # fmt: skip
    command.add_argument("--timeout", type=float, default=60.0, help="seconds after which a request counts as failed")
    arguments.add_engine_arguments(command)
    arguments.add_output_arguments(command, html=False)
    command.set_defaults(run=run, rate=None, together="yes", front=FrontKind.DISPATCH)


def run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Measures; 1 when there is nothing to compare."""
    if max(args.tokens) > args.local_prefill_max_tokens:
        raise ValueError(f"prompts of more than {args.local_prefill_max_tokens} tokens are not prefilled by decode")
    options = short_prompts.ShortOptions(
        lengths=args.tokens, output=args.output, starts=args.starts, blocks=args.blocks, requests=args.requests
    )
    pair = arguments.pair_options(args, local_prefill_max_tokens=args.local_prefill_max_tokens)
    with arguments.setting_of(args, short_prompts.MODES, pair=pair, command=command, timeout_s=args.timeout) as setting:
        report = asyncio.run(short_prompts.measure(options, setting=setting))
    output.write(report, text=tables.short_table(report), args=args)
    return 0 if report["summary"] else 1
