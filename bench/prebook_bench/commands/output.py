"""Where reports go: a table to the terminal, JSON to a file or to the terminal, a page beside it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from prebook_bench import html_report


def write(report: dict[str, Any], *, text: str, args: argparse.Namespace) -> None:
    """Prints the table and writes what the arguments ask for."""
    print(text)
    body = json.dumps(report, indent=2)
    if args.json is None:
        print(body)
    else:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(body + "\n", encoding="utf-8")
        print(f"\nJSON: {args.json}")
    page: Path | None = getattr(args, "html", None)
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(html_report.html(report), encoding="utf-8")
        print(f"HTML: {page}")
