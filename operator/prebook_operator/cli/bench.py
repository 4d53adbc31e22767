"""`prebook bench …`: the benchmarks of :mod:`prebook_bench`, under the name that users look for."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from prebook_operator.cli.main import Subparsers

DESCRIPTION: Final = """\
The benchmarks, the same as `python -m prebook_bench`. `prebook bench COMMAND --help` explains one of them.

  quick          a first look at all of it, in minutes (root for the shaped link, like the next three)
  exposed        how much later the first token comes than prefill alone could have given it
  ab             the same open-loop load against pull, stock push and Prebook, or against any endpoints
  first-request  what the first request of a fresh pair costs
  overhead       what the connector costs the engines' loop
  short-prompts  prompts that are not worth a transfer, against one engine alone
  idle           CPU that an idle pair uses
  operator       what the operator costs an API server
  report         HTML page out of a JSON report"""


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
