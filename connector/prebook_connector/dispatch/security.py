"""The peer token: which requests to a prefill pod are legs of this model's own decode pods.

The token lives in a file (a mounted Secret) and is read again when the file changes. After a change the previous token
is accepted for a while, because the kubelet updates the volumes of different pods at different moments.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable
from pathlib import Path

from prebook_connector.dispatch.reasons import Refusal

TOKEN_HEADER = "x-prebook-token"
_RECHECK_SECONDS = 5.0
_ROTATION_SECONDS = 180.0
_MAX_TOKEN_BYTES = 4096

logger = logging.getLogger(__name__)


class PeerToken:
    """The token of this model, as the file has it. Never empty: without a token every leg is refused."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._checked = float("-inf")
        self._stamp: tuple[int, int] | None = None
        self._current = b""
        self._previous = b""
        self._previous_until = float("-inf")

    def current(self) -> str:
        """The token to send, or an empty string when there is none."""
        self._refresh()
        return self._current.decode("latin-1")

    def check(self, presented: str | None) -> Refusal | None:
        """None when ``presented`` is the token, else why it is refused. Takes the same time for every wrong token."""
        self._refresh()
        if presented is None:
            return Refusal.NO_TOKEN
        if not self._current:
            return Refusal.NO_TOKEN_CONFIGURED
        candidate = presented.encode("latin-1", "replace")
        right = hmac.compare_digest(candidate, self._current)
        old = hmac.compare_digest(candidate, self._previous or self._current)
        if right or (old and bool(self._previous) and self._clock() < self._previous_until):
            return None
        return Refusal.WRONG_TOKEN

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._checked < _RECHECK_SECONDS and self._current:
            return
        self._checked = now
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp == self._stamp:
                return
            with self._path.open("rb") as file:
                token = file.read(_MAX_TOKEN_BYTES).strip()
        except OSError as error:
            # A Secret volume is swapped by renaming a symlink, so a miss is short; the token in memory stays valid.
            logger.warning("peer token %s cannot be read: %s", self._path, error.strerror)
            return
        self._stamp = stamp
        if token != self._current:
            self._previous, self._previous_until = self._current, now + _ROTATION_SECONDS
            self._current = token
