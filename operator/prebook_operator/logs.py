"""Log output: one JSON object a line for machines, or short lines for people."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final

_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_LEVELS: Final = {
    # kopf calls every retried request an error. What really ends a watch reaches us as an exception, and is logged by
    # us.
    "kopf": logging.CRITICAL,
    "aiohttp.access": logging.WARNING,
    "asyncio": logging.WARNING,
    "kubernetes": logging.WARNING,
}


class JsonFormatter(logging.Formatter):
    """One object a line; what callers give as `extra` becomes fields."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update({name: value for name, value in record.__dict__.items() if name not in _STANDARD})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """Time, level, message, and the extra fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        extra = "".join(f" {name}={value}" for name, value in record.__dict__.items() if name not in _STANDARD)
        time = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        text = f"{time} {record.levelname:<7} {record.getMessage()}{extra}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def configure(*, level: str, style: str) -> None:
    """Sets up the root logger: `style` is `json` or `text`. Libraries that log every request are kept at warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for name, least in _LEVELS.items():
        logging.getLogger(name).setLevel(least)
