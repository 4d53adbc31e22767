"""`prebook bench …`: the benchmarks of :mod:`prebook_bench`, under the name that users look for."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from prebook_operator.cli.main import Subparsers

DESCRIPTION: Final = """\
The benchmarks, the same as `python -m prebook_bench`. `prebook bench COMMAND --help` explains one of them.

  exposed    how much later the first token comes than prefill alone could have given it (root for the shaped link)
  idle       CPU that an idle pair uses
  ab         the same open-loop load against pull, stock push and Prebook, or against any endpoints
  operator   what the operator costs an API server
  report     HTML page out of a JSON report"""


def register(subparsers: Subparsers) -> None:
    """Adds `bench`; everything after it is prebook_bench's own command line."""
    parser = subparsers.add_parser(
        "bench",
        help="measure pull, stock push and Prebook side by side",
        description=DESCRIPTION,
        add_help=False,
        prefix_chars="\0",
    )
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="a benchmark and its arguments; none: the list")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Hands over; imported late, because it needs the `bench` extra."""
    from prebook_bench.cli import main

    return main(arguments.rest or ["--help"])
