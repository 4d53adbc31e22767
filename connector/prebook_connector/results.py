"""The way back: outcomes from the transfer thread to the engine's step."""

from __future__ import annotations

import threading
from collections import deque

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from prebook_connector.book_side import Outcome

IDLE_STEP_WAIT_SECONDS = 0.004


class Results:
    """Outcomes on their way from the transfer thread to the engine, each known id at most once.

    The EngineCore dies of an id that it does not wait for, so only ids that were handed out by :meth:`expect_sending`
    and :meth:`expect_recving` pass, and only once.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._sending: set[str] = set()
        self._recving: set[str] = set()
        self._sent: set[str] = set()
        self._outcomes: deque[Outcome] = deque()
        self._computes = False

    def begin_step(self, *, computes: bool) -> None:
        """A step begins; one that computes must not be held up."""
        self._computes = computes

    def expect_sending(self, request_id: str) -> None:
        """The scheduler keeps this request's blocks until it is reported."""
        with self._condition:
            self._sending.add(request_id)

    def expect_recving(self, request_id: str) -> None:
        """The scheduler waits for this request's KV."""
        with self._condition:
            self._recving.add(request_id)

    def sent(self, request_id: str) -> None:
        """Prefill's blocks are free."""
        with self._condition:
            if request_id in self._sending:
                self._sending.remove(request_id)
                self._sent.add(request_id)
                self._condition.notify()

    def received(self, outcome: Outcome) -> None:
        """Decode's booking has ended."""
        with self._condition:
            if outcome.request_id in self._recving:
                self._recving.remove(outcome.request_id)
                self._outcomes.append(outcome)
                self._condition.notify()

    def take(self) -> tuple[KVConnectorTransferResults, set[int]]:
        """Results and invalid block ids since the last call.

        Waits a moment for some when something is open and the step computes nothing: the engine would otherwise look
        again every millisecond, and see a result up to a millisecond late.
        """
        if not (self._sending or self._recving or self._sent or self._outcomes):
            # Read in this order, an id that moves from one to another is at worst seen by the next step.
            return KVConnectorTransferResults(), set()
        with self._condition:
            if not self._computes and not self._sent and not self._outcomes and (self._sending or self._recving):
                self._condition.wait(IDLE_STEP_WAIT_SECONDS)
            results = KVConnectorTransferResults()
            invalid: set[int] = set()
            results.finished_sending, self._sent = self._sent, set()
            while self._outcomes:
                outcome = self._outcomes.popleft()
                results.finished_recving.add(outcome.request_id)
                if outcome.failed:
                    results.failed_recving.add(outcome.request_id)
                invalid.update(outcome.invalid_blocks)
            return results, invalid
