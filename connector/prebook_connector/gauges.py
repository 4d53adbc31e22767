"""The gauges of one worker. Read on the engine's loop, where every microsecond is a token's."""

from __future__ import annotations

from prebook_connector.recorder import MemoryRecorder
from prebook_connector.transfer_thread import TransferThread

MEASURE_SECONDS = 0.1
"""How old a gauge may be while steps follow each other; whether anything is open at all is never old."""


class Gauges:
    """Sets the gauges of :data:`prebook_connector.recorder.GAUGES` from what the transfer thread holds."""

    def __init__(self, thread: TransferThread, recorder: MemoryRecorder) -> None:
        self._thread = thread
        self._recorder = recorder
        self._busy = False
        self._due = 0.0

    def measure(self, now: float) -> None:
        """To be called once a step, after the step's results were taken: an engine whose last transfer has ended may
        not step again for hours, and its gauges must say so."""
        core = self._thread.core
        busy = core.busy
        if busy is self._busy and now < self._due:
            return
        self._busy, self._due = busy, now + MEASURE_SECONDS
        if core.book is not None:
            self._recorder.gauge("booked_blocks", core.book.booked_blocks)
            self._recorder.gauge("quarantined_blocks", core.book.quarantined(now))
        if core.push is not None:
            self._recorder.gauge("open_pushes", core.push.open)
        self._recorder.gauge("queue_depth", self._thread.depth())
        self._recorder.gauge("peers_attached", sum(peer.attached for peer in list(core.peers.peers.values())))
