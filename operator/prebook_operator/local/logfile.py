"""A pod's log file: appended line by line, renamed to ``.1`` when it grows beyond a bound, so that a detached run
cannot fill the disk.
"""

from __future__ import annotations

from pathlib import Path

_MAX_BYTES = 64 << 20


class LogFile:
    """Appends lines to ``path``; keeps at most two files of ``max_bytes``."""

    def __init__(self, path: Path, *, max_bytes: int = _MAX_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._size = self._file.tell()

    def write(self, line: str) -> None:
        """Appends one line, at once."""
        data = line.encode(errors="replace") + b"\n"
        if self._size + len(data) > self._max_bytes and self._size > 0:
            self._file.close()
            self.path.replace(self.path.with_suffix(self.path.suffix + ".1"))
            self._file = self.path.open("ab", buffering=0)
            self._size = 0
        self._file.write(data)
        self._size += len(data)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
