"""``prebook ps``: what ``prebook up`` runs on this machine."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

from prebook_operator.local.display import age, table
from prebook_operator.local.state import RunState, known_runs

if TYPE_CHECKING:
    from prebook_operator.cli.main import Subparsers


def register(subparsers: Subparsers) -> None:
    """Adds `ps`."""
    parser = subparsers.add_parser(
        "ps",
        help="show the models that run on this machine",
        description="Show the models that `prebook up` runs, and their pods.",
    )
    parser.add_argument(
        "--output", "-o", choices=["text", "json"], default="text", help="format (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints every run that is alive; 0 also when there is none."""
    # A state whose lock nobody holds is that of a run that ended.
    runs = [found for folder in known_runs() if folder.running and (found := folder.read()) is not None]
    if arguments.output == "json":
        print(json.dumps([found.model_dump(mode="json") for found in runs], indent=2))
        return 0
    if not runs:
        print("nothing runs")
    for found in runs:
        print("\n".join(describe(found, now=time.time())))
    return 0


def describe(found: RunState, *, now: float) -> list[str]:
    """One run: its headline and its pods."""
    headline = f"{found.name}  {found.phase}  {found.endpoint}/v1  up {age(now - found.started_at)}  {found.file}"
    return [headline, *(f"  {row}" for row in table(found.pods))]
