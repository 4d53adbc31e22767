"""``python3 -m prebook_connector.install DIR``: copies this package to DIR, for the init container of an engine pod.

The engine's image stays stock vLLM; DIR is an emptyDir on its PYTHONPATH. Copying to a temporary name and renaming
makes the step safe to repeat when the kubelet restarts the container half way.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

PACKAGE = "prebook_connector"


def install(target: Path) -> Path:
    """Copies the package below ``target`` and returns the new folder. Raises OSError when it cannot be written."""
    source = Path(__file__).resolve().parent
    target.mkdir(parents=True, exist_ok=True)
    destination = target / PACKAGE
    scratch = Path(tempfile.mkdtemp(dir=target, prefix=f".{PACKAGE}-"))
    try:
        copy = scratch / PACKAGE
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if destination.exists():
            os.rename(destination, scratch / "old")
        os.rename(copy, destination)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return destination


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="prebook_connector.install", description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, help="folder that the engine has on its PYTHONPATH")
    arguments = parser.parse_args(argv)
    try:
        destination = install(arguments.target)
    except OSError as error:
        print(
            f"cannot install the connector to {arguments.target}: {error}; is the volume mounted and writable?",
            file=sys.stderr,
        )
        return 1
    print(f"connector installed to {destination}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
