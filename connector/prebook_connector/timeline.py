"""Per-transfer timelines: one JSON object a line, written by the transfer thread when ``timeline_dir`` is set.

``{"t": wall clock (s), "mono": monotonic (s), "engine", "role", "rank", "transfer_id", "event", "data"}``. ``prebook
trace`` turns the files of both engines into a Chrome trace and a picture. Off by default; when it is off, recording
costs one attribute look-up.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import IO, Any


class Timeline:
    """Appends events of one worker to ``<folder>/<role>-<engine>-<rank>.jsonl``."""

    def __init__(self, *, folder: Path | None, engine_id: str, role: str, rank: int) -> None:
        self._common = {"engine": engine_id, "role": role, "rank": rank}
        self._file: IO[str] | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            # Line buffered: a killed engine leaves whole lines.
            self._file = open(folder / f"{role}-{engine_id}-{rank}.jsonl", "a", buffering=1, encoding="utf-8")  # noqa: SIM115

    def record(self, event: str, transfer_id: str, **data: Any) -> None:
        """Notes ``event`` now."""
        if self._file is None:
            return
        stamp = {"t": time.time(), "mono": time.monotonic()}
        self._file.write(
            json.dumps({**stamp, **self._common, "transfer_id": transfer_id, "event": event, "data": data}) + "\n"
        )

    def close(self) -> None:
        """Closes the file; later records are dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None
