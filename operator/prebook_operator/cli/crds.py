"""`prebook crds`: the CustomResourceDefinitions, to print, to write, or to compare with written ones."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prebook_operator.api.crd import crd_files

if TYPE_CHECKING:
    from prebook_operator.cli.main import Subparsers

DESCRIPTION: Final = """\
Print the CustomResourceDefinitions of DisaggregatedModel and ModelRole, generated from the types that the operator
itself uses. The same version of prebook always gives the same text."""

EXAMPLES: Final = """\
examples:
  prebook crds | kubectl apply --server-side -f -   install or upgrade them
  prebook crds --out crds/                          write one file each
  prebook crds --check crds/                        exit 1 when the files there differ"""


def register(subparsers: Subparsers) -> None:
    """Adds `crds`."""
    parser = subparsers.add_parser(
        "crds",
        help="print the custom resource definitions",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", type=Path, metavar="FOLDER", help="write one file each into this folder")
    where.add_argument("--check", type=Path, metavar="FOLDER", help="compare with the files in this folder")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints, writes or compares."""
    files = crd_files()
    if arguments.check is not None:
        return _check(files, arguments.check)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (arguments.out / name).write_text(text, encoding="utf-8")
            print(arguments.out / name)
        return 0
    print("---\n".join(files.values()), end="")
    return 0


def _check(files: dict[str, str], folder: Path) -> int:
    stale = [name for name, text in files.items() if not _same(folder / name, text)]
    for name in stale:
        print(f"{folder / name} differs from the types: run `prebook crds --out {folder}`", file=sys.stderr)
    return 1 if stale else 0


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text
