"""Entry point of `prebook`: collects the subcommands, and turns a user's mistake into a message instead of a
traceback."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final, Protocol, cast

from prebook_operator.api.errors import UserError
from prebook_operator.local.errors import LocalError

COMMANDS: Final = ("up", "ps", "logs", "down", "render", "model", "bench", "trace", "crds", "operator")
"""Modules of this package, in the order of `prebook --help`. Each has `register(subparsers)`."""

DESCRIPTION: Final = """\
Serve one large language model with prefill and decode on separate engines, the KV cache pushed into blocks that
decode booked before prefill finished."""

EXAMPLES: Final = """\
examples:
  prebook model smollm2                                 prepare a small chat model for this machine
  prebook up examples/smollm2-1p1d.yaml --ask "Hello"   start a real pair here, ask, print the answer, stop
  prebook up examples/smollm2-1p1d.yaml                 start it and keep it running until Ctrl-C
  prebook render examples/qwen3-32b-p5en.yaml           see the Kubernetes objects that the operator would make
  prebook crds | kubectl apply --server-side -f -       install the custom resources into a cluster

`prebook COMMAND --help` explains a command."""


class Subparsers(Protocol):
    """What argparse's `add_subparsers` returns, as far as commands use it."""

    def add_parser(self, name: str, **kwargs: object) -> argparse.ArgumentParser:
        """A parser for one subcommand."""


class Command(Protocol):
    """Face of a command's module. `register` sets `run` with `parser.set_defaults(run=…)`; it takes the namespace and
    gives an exit status."""

    def register(self, subparsers: Subparsers) -> None:
        """Adds the command's parser."""


def build_parser(commands: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser with the given subcommands. Their modules are loaded here, so fewer start faster."""
    parser = argparse.ArgumentParser(
        prog="prebook", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"prebook {_version()}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name in commands:
        module = importlib.import_module(f"prebook_operator.cli.{name}")
        cast(Command, module).register(cast(Subparsers, subparsers))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `prebook`. 0: done; 1: failed; 2: the user's mistake; further codes are documented by their command."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(given[:1] if given and given[0] in COMMANDS else COMMANDS)
    arguments = parser.parse_args(given)
    if arguments.command is None:
        parser.print_help()
        return 2
    try:
        return int(arguments.run(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except LocalError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone; there is nobody left to tell.
        sys.stderr.close()
        return 141


def _version() -> str:
    try:
        return version("prebook")
    except PackageNotFoundError:
        return "0+unknown"


if __name__ == "__main__":
    sys.exit(main())
