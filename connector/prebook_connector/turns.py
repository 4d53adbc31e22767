"""Whose WRITEs leave next when several transfers share the link to one decode engine. Pure.

A transport sends what it was handed in order, so a choice remains only for what has not been handed over: open WRITEs
are bounded per decode engine, and each is about a slice of the link's time. The transfer with the least left to write
goes first, which makes the mean wait the shortest there is; a long one that has been passed over for too long gets a
turn all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prebook_connector.push import Push

PATIENCE_SECONDS = 0.5
"""How long a transfer with something to send is passed over before it is its turn."""


def in_turn(pushes: Iterable[Push], now: float) -> list[Push]:
    """The transfers in the order in which they may post."""
    return sorted(pushes, key=lambda push: _rank(push, now))


def _rank(push: Push, now: float) -> tuple[float, int]:
    """Those that have waited too long first, the longest of them before the others; then by what is left."""
    waited = now - push.passed_over_at if push.passed_over_at else 0.0
    return (-waited if waited > PATIENCE_SECONDS else 0.0, push.remaining_blocks)


class Room:
    """How many more WRITEs may be opened to each decode engine."""

    def __init__(self, pushes: Iterable[Push], *, most: int) -> None:
        """``most``: WRITEs to one engine that may be open at once."""
        self._most = most
        self._open = Counter[str]()
        for push in pushes:
            if push.engine_id is not None:
                self._open[push.engine_id] += len(push.writes)

    def left(self, push: Push) -> bool:
        """Whether this transfer may open another WRITE."""
        return push.engine_id is not None and self._open[push.engine_id] < self._most

    def take(self, push: Push) -> None:
        """This transfer has opened one."""
        assert push.engine_id is not None
        self._open[push.engine_id] += 1
