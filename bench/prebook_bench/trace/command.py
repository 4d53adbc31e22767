"""``trace``: turns a folder of timelines into a picture, a page or a Chrome trace, by the suffix of the output."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from prebook_bench.trace.chrome import chrome_trace
from prebook_bench.trace.events import TraceError, group, read_folder
from prebook_bench.trace.page import page
from prebook_bench.trace.picture import picture
from prebook_bench.trace.spans import Story, tell

DESCRIPTION = """\
Shows where the time of a request goes: prefill chunks, WRITEs, booking, COMMIT, with the engines' clocks aligned.
FOLDER holds the timelines that the connector writes when its setting timeline_dir is set (a file per engine and rank).

  --out x.json   Chrome trace, for https://ui.perfetto.dev or chrome://tracing
  --out x.svg    picture of one transfer
  --out x.html   page with the pictures of the last transfers"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command, shared by ``prebook trace`` and ``python -m prebook_bench trace``."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder with *.jsonl timelines")
    parser.add_argument("--out", type=Path, default=Path("timeline.html"), help="file to write: .html, .svg or .json")
    parser.add_argument(
        "--transfer", default="last", help="transfer id (or its beginning), 'last' or 'longest' (most tokens)"
    )
    parser.add_argument("--limit", type=int, default=12, help="most transfers on a page")


def run(folder: Path, *, out: Path, transfer: str, limit: int) -> str:
    """Writes `out` and returns one line that says what it holds. Raises TraceError."""
    stories = [tell(found) for found in group(read_folder(folder))]
    if out.suffix == ".json":
        chosen = stories if transfer in ("last", "longest") else [choose(stories, transfer)]
        text = json.dumps(chrome_trace(chosen))
    elif out.suffix == ".svg":
        chosen = [choose(stories, transfer)]
        text = picture(chosen[0])
    elif out.suffix in (".html", ".htm"):
        chosen = stories[-limit:] if transfer in ("last", "longest") else [choose(stories, transfer)]
        text = page(chosen, source=str(folder))
    else:
        raise TraceError(f"cannot tell the format of {out}: end its name in .html, .svg or .json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    return f"{out}: {len(chosen)} of {len(stories)} transfers"


def choose(stories: Sequence[Story], wanted: str) -> Story:
    """One transfer by id, the last, or the one with most tokens. Raises TraceError when there is none."""
    if not stories:
        raise TraceError("the timelines hold no transfer")
    if wanted == "last":
        return stories[-1]
    if wanted == "longest":
        return max(stories, key=lambda story: story.tokens or 0)
    found = [story for story in stories if story.transfer_id.startswith(wanted)]
    if len(found) != 1:
        known = ", ".join(story.transfer_id[:8] for story in stories[-8:])
        raise TraceError(f"{len(found)} transfers begin with {wanted!r}; the last ones are {known}")
    return found[0]
