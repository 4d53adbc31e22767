"""`prebook trace FOLDER`: where the time of a request went, as a picture or a Chrome trace."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from prebook_bench.trace import command
from prebook_bench.trace.events import TraceError

if TYPE_CHECKING:
    from prebook_operator.cli.main import Subparsers


def register(subparsers: Subparsers) -> None:
    """Adds `trace`."""
    parser = subparsers.add_parser(
        "trace",
        help="show where the time of a request went",
        description=command.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Writes the output file and says what it holds."""
    try:
        print(command.run(arguments.folder, out=arguments.out, transfer=arguments.transfer, limit=arguments.limit))
    except (TraceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
