"""A self-contained HTML page with the pictures of several transfers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from prebook_bench.trace.picture import picture
from prebook_bench.trace.spans import Story

_STYLE = """
body { font-family: system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem; color: #1f2933;
  background: #f5f7fa; line-height: 1.45; }
figure { margin: 1.2rem 0; background: #fff; border: 1px solid #e1e7ec; border-radius: 8px; padding: .6rem;
  overflow-x: auto; }
figure svg { min-width: 38rem; display: block; }
figcaption { font-size: .85rem; color: #52606d; overflow-wrap: anywhere; }
"""


def page(stories: Sequence[Story], *, source: str) -> str:
    """The page; `source` says where the timelines came from."""
    figures = "\n".join(
        f"<figure>{picture(story)}<figcaption>transfer {escape(story.transfer_id)}</figcaption></figure>"
        for story in stories
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Prebook timelines</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>Timelines</h1><p>{len(stories)} transfers from {escape(source)}. Bars show a tooltip with their "
        f"details.</p>\n{figures}\n</body></html>\n"
    )
