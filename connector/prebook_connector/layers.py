"""Which layers of the step under way have run, as far as the last chunks of prompts are concerned. Pure.

A prompt's last chunk is the one whose transfer nothing hides. Its KV is final layer by layer, long before the step
ends; so its WRITEs can begin while later layers compute, and only the last layers' are left when prefill is over.
"""

from __future__ import annotations

from collections.abc import Sequence

SLICES = 8
"""Parts that a last chunk is reported in, at most: each costs the engine's loop a wake-up of the transfer thread."""
MARGIN = 1.25
"""How many times the line time of what is to come must fit into the rest of the step for it to wait."""


def stride(regions: int) -> int:
    """Regions between two reports."""
    return -(-regions // SLICES)


def can_wait(regions: int, *, settled: int, posted: int, region_seconds: float, line_seconds: float) -> bool:
    """Whether what has settled of a last chunk can leave with the next report as well.

    Each WRITE takes time from the core that computes the step, so there should be few of them; and the sooner the link
    has something to do, the less is left at the step's end. What waits until the next report, and all that settles
    before the last one, must still leave while the step runs, with a margin. ``region_seconds`` is what a region takes
    to compute, ``line_seconds`` to send.
    """
    left = regions - settled - stride(regions)  # regions that the step computes after the next report
    to_come = regions - stride(regions) - posted
    return MARGIN * to_come * line_seconds < left * region_seconds


def next_part(regions: int, *, settled: int, posted: int, region_seconds: float, line_seconds: float) -> int:
    """How many regions will have settled when a part of a last chunk must be posted, ``settled`` or more."""
    while settled < regions and can_wait(
        regions, settled=settled, posted=posted, region_seconds=region_seconds, line_seconds=line_seconds
    ):
        settled += stride(regions)
    return min(settled, regions)


class LayerWatch:
    """Counts the regions (a layer's KV memory each, in order) that are final in the step under way."""

    def __init__(self, layers: Sequence[str]) -> None:
        """``layers``: the layer of each region, in order; none: layers are not watched."""
        self._position = {name: index for index, name in enumerate(layers)}
        self._stride = stride(len(layers))
        self._ran: set[int] = set()
        self._final = self._reported = 0
        self.watched: list[str] = []

    @property
    def regions(self) -> int:
        """How many there are; 0 when layers are not watched."""
        return len(self._position)

    def begin(self, request_ids: list[str]) -> None:
        """A step begins, which computes the last chunks of these requests' prompts."""
        self.watched = request_ids if self._position else []
        self._ran.clear()
        self._final = self._reported = 0

    def done(self, layer: str) -> int:
        """A layer has run. Returns the number of regions that are final when that is worth telling, else 0.

        The last region is left to the end of the step, which tells the same a moment later.
        """
        position = self._position.get(layer) if self.watched else None
        if position is None:
            return 0
        self._ran.add(position)
        while self._final in self._ran:
            self._final += 1
        if self._final - self._reported < self._stride or self._final == self.regions:
            return 0
        self._reported = self._final
        return self._final
