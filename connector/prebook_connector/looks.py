"""How soon prefill's WRITEs have to be looked at again. Pure.

A look moves what the transport has not taken yet, and finds what has ended. Each takes time from the engine's own
thread: the link needs them only as often as its buffers run empty, and an end is worth hurrying for only when somebody
waits for it and it may have come.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from prebook_connector.push import Push


def urgent(pushes: Iterable[Push], now: float) -> bool:
    """Whether an end that somebody waits for may come any moment: decode, or whoever needs the blocks."""
    return any(_drains(push) or (push.completed_at > 0 and now >= push.due_at) for push in pushes if push.writes)


def until_next(pushes: Iterable[Push], now: float, *, stride: float) -> float:
    """Seconds until the next look; infinite without open WRITEs. ``stride``: those in which the buffers run empty."""
    writing = [push for push in pushes if push.writes]
    if not writing:
        return math.inf
    ends = [push.due_at - now for push in writing if push.completed_at]
    return max(0.0, min([stride, *ends]))


def _drains(push: Push) -> bool:
    return bool(push.failure or (push.ledger is not None and push.ledger.draining))
