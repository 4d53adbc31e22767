"""Waits for its parent's word; when the parent dies without one, ends what runs in the folder and removes it."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.kube.cluster import tear_down


def main() -> None:
    """Entry point: `python -m tests.kube.reaper FOLDER`, with the parent's pipe as standard input."""
    if sys.stdin.buffer.readline() != b"done\n":
        tear_down(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
