"""What the client saw of a request, written beside the engines' timelines in the same format."""

from __future__ import annotations

import json
import time
from pathlib import Path

from prebook_bench.fronts import Outcome


def record(folder: Path, outcome: Outcome) -> None:
    """Appends the sending of the request and its first token; nothing when the request has no transfer id."""
    if outcome.transfer_id is None:
        return
    # perf_counter and monotonic are one clock on Linux; the wall clock only places this process among the others.
    wall = time.time() - time.perf_counter()
    answer = outcome.answer
    moments = (("request_sent", answer.sent_at), ("first_token", answer.sent_at + answer.ttft))
    with (folder / "client.jsonl").open("a", encoding="utf-8") as file:
        for event, at in moments:
            line = {"t": wall + at, "mono": at, "engine": "client", "role": "client", "rank": 0,
                    "transfer_id": outcome.transfer_id, "event": event, "data": {}}  # fmt: skip
            file.write(json.dumps(line) + "\n")
