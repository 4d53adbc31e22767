"""``prebook down``: ends what ``prebook up`` started."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from prebook_operator.local.detached import end_run, find_run
from prebook_operator.local.errors import UserError
from prebook_operator.local.state import known_runs

if TYPE_CHECKING:
    from prebook_operator.cli.main import Subparsers


def register(subparsers: Subparsers) -> None:
    """Adds `down`."""
    parser = subparsers.add_parser(
        "down",
        help="end a model that runs on this machine",
        description="Drain and end a model that `prebook up` runs.",
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="the model's name, or its file")
    parser.add_argument("--all", action="store_true", help="every model that runs")
    parser.add_argument("--now", action="store_true", help="without draining")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0: nothing of what was named runs any more; 2: nothing was named."""
    chosen = [find_run(name) for name in arguments.names]
    if arguments.all or not chosen:
        chosen = [state for state in known_runs() if state.running]
    if not arguments.names and not arguments.all and len(chosen) > 1:
        names = ", ".join(state.name for state in chosen)
        raise UserError(f"several models run: {names}", remedy="name one, or use --all")
    if not chosen:
        print("nothing runs")
    for state in chosen:
        ended = end_run(state, now=arguments.now, write=lambda text: print(text, file=sys.stderr))
        print(f"{state.name} {'ended' if ended else 'was not running'}")
    return 0
