"""First tokens on their way from the dispatcher to the sampler of one worker process.

The dispatcher offers prefill's token when it wants to show it to the client before decode has sampled; the sampler
takes what was offered at the moment at which it samples a request's first token. Whoever comes first decides: an
offer after the sampler has looked is refused, and then the client waits for decode's own token. So a token that a
client has seen is always the one that decode goes on from.
"""

from __future__ import annotations

import threading

KEPT = 16_384
"""Transfers remembered; a token is needed for about as long as one request waits for its KV."""


class TokenStore:
    """One worker's first tokens by transfer id. Thread-safe."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._tokens: dict[str, int | None] = {}  # None: sampled without an offer

    def offer(self, transfer_id: str, token: int) -> bool:
        """Hands in prefill's token. False when decode has already sampled without it."""
        with self._lock:
            if self._tokens.get(transfer_id, token) is None:
                return False
            self._put(transfer_id, token)
            return True

    def take(self, transfer_id: str) -> int | None:
        """The token to sample now; None closes the transfer for later offers. Repeatable."""
        with self._lock:
            token = self._tokens.get(transfer_id)
            self._put(transfer_id, token)
            return token

    def _put(self, transfer_id: str, token: int | None) -> None:
        self._tokens[transfer_id] = token
        while len(self._tokens) > self._kept:
            del self._tokens[next(iter(self._tokens))]


TOKENS = TokenStore()
"""This process's store: vLLM makes the sampler's processors and the connector apart from each other."""
