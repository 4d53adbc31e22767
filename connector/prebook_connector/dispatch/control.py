"""Client of the control sockets that this pod's connector opens, one per worker and one per scheduler.

Newline-delimited JSON over a Unix socket: one request, one response, in order. The desired list of peers is
level-triggered: it is sent whole, whenever it changed and on every new connection, so a restarted worker is told
without anybody noticing that it restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from prebook_connector.dispatch import metrics
from prebook_connector.dispatch.identity import Identity
from prebook_connector.dispatch.peertable import Pair, Peer, PeerTable
from prebook_connector.dispatch.settings import Settings

logger = logging.getLogger(__name__)

_MAX_LINE = 4 << 20
_TICK_SETTLED = 1.0
_TICK_CHANGING = 0.25
_WORD_HOLDS = 6.0

Answer = dict[str, Any]


class ControlError(Exception):
    """A control socket did not answer, or answered with an error; the message is one line."""


class Link:
    """One control socket. Requests queue up; a broken connection is opened again by the next request."""

    def __init__(self, path: Path, *, timeout: float) -> None:
        self._path = path
        self._timeout = timeout
        self._lock = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.told: int | None = None
        """Generation of the peer list that this connection was given, None for a new connection."""

    async def call(self, request: Mapping[str, object]) -> Answer:
        """Sends one request and returns its answer. Raises :class:`ControlError`."""
        async with self._lock:
            try:
                async with asyncio.timeout(self._timeout):
                    return await self._exchange(request)
            except (OSError, TimeoutError, ValueError, RecursionError, EOFError, asyncio.LimitOverrunError) as error:
                # After a time-out an old answer could be taken for the next one: start over with a new connection.
                self.close()
                metrics.CONTROL_ERRORS.inc()
                raise ControlError(f"{self._path.name}: {type(error).__name__}: {error}") from error

    async def _exchange(self, request: Mapping[str, object]) -> Answer:
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(str(self._path), limit=_MAX_LINE)
            self.told = None
        reader, writer = self._streams
        writer.write(json.dumps(request).encode() + b"\n")
        await writer.drain()
        answer = json.loads(await reader.readuntil(b"\n"))
        if not isinstance(answer, dict):
            raise ValueError("the answer is not an object")
        if answer.get("ok") is not True:
            raise ControlError(f"{self._path.name}: {str(answer.get('error'))[:200]}")
        return answer

    def close(self) -> None:
        """Closes the connection, if there is one."""
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None
        self.told = None


class Control:
    """All control sockets of this pod, and the loop that keeps the workers' peers and our view of pairs current."""

    def __init__(
        self,
        settings: Settings,
        table: PeerTable,
        *,
        on_pairs: Callable[[Mapping[str, Pair]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._table = table
        self._on_pairs = on_pairs
        self._clock = clock
        self._links: dict[Path, Link] = {}
        self._heard: dict[str, float] = {}
        self._wake = asyncio.Event()
        self.workers: dict[str, Answer] = {}
        """Last status of every worker, by socket name; one that was silent for some seconds is missing."""

    # -- what others ask

    @property
    def complete(self) -> bool:
        """Whether every worker of this pod was heard in the last round."""
        return len(self.workers) >= self._settings.workers

    @property
    def draining(self) -> bool:
        """Whether some worker says that it drains."""
        return any(status.get("draining") is True for status in self.workers.values())

    @property
    def compat_hash(self) -> str | None:
        """The compatibility hash of this engine, once its workers said it."""
        found = [status.get("compat_hash") for status in self.workers.values()]
        return next((value for value in found if isinstance(value, str)), None)

    def transfers(self) -> dict[str, int]:
        """Booked, pushing and quarantined counts, summed over the workers."""
        total = {"booked": 0, "pushing": 0, "quarantined_blocks": 0}
        for status in self.workers.values():
            counts = status.get("transfers")
            for key in total:
                value = counts.get(key) if isinstance(counts, dict) else None
                total[key] += value if isinstance(value, int) else 0
        return total

    def wake(self) -> None:
        """Starts the next round now (the peer list changed)."""
        self._wake.set()

    async def fail(self, transfer_id: str, reason: str) -> bool:
        """Tells every worker that a prefill leg failed. True when all of them took note."""
        answers = await self._all({"op": "fail", "transfer_id": transfer_id, "reason": reason})
        return len(answers) >= self._settings.workers

    async def offer_first_token(self, transfer_id: str, token: int) -> bool | None:
        """Offers prefill's first token to every sampler of this pod.

        True when all of them will begin with it, False when none will, None when they disagree: then the decode leg
        must not go on.
        """
        answers = await self._all({"op": "first_token", "transfer_id": transfer_id, "token": token})
        held = [answer.get("held") is True for answer in answers.values()]
        if all(held) and len(held) >= self._settings.workers:
            return True
        return None if any(held) else False

    async def transfer(self, transfer_id: str) -> Answer | None:
        """The account of one transfer, merged over the workers, or None when no worker knows it."""
        answers = await self._all({"op": "transfer", "transfer_id": transfer_id})
        return merge_accounts([answer for answer in answers.values() if answer.get("known") is True])

    async def drain(self) -> None:
        """Tells every worker to drain, then refreshes the statuses."""
        await self._all({"op": "drain"})
        await self.round()

    # -- the loop

    async def run(self) -> None:
        """Rounds until cancelled."""
        while True:
            await self.round()
            ready, possible = self._table.count()
            settled = self.complete and ready == possible
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_SETTLED if settled else _TICK_CHANGING):
                    await self._wake.wait()

    async def round(self) -> None:
        """One round: tell what changed, ask every worker's status, hand on what they say about pairs.

        A worker may be busy for a moment, so its last word holds for a while; when its socket is gone it does not.
        """
        await self._tell()
        answers = await self._all({"op": "status"})
        now = self._clock()
        self._heard.update(dict.fromkeys(answers, now))
        present = {path.name for path in self._links}
        latest = {**self.workers, **answers}
        self.workers = {
            name: status
            for name, status in latest.items()
            if name in present and now - self._heard[name] <= _WORD_HOLDS
        }
        self._on_pairs(merge_pairs(self.workers.values(), expected=self._settings.workers))

    async def _tell(self) -> None:
        generation = self._table.generation
        peers = [entry for peer in self._table.desired() for entry in entries(peer)]
        due = [link for link in self._found().values() if link.told != generation]

        async def tell(link: Link) -> None:
            try:
                await link.call({"op": "peers", "peers": peers})
            except ControlError as error:
                logger.debug("peers not delivered: %s", error)
            else:
                link.told = generation

        await asyncio.gather(*(tell(link) for link in due))

    async def _all(self, request: Mapping[str, object]) -> dict[str, Answer]:
        async def ask(link: Link) -> Answer | None:
            try:
                return await link.call(request)
            except ControlError as error:
                logger.debug("control: %s", error)
                return None

        links = self._found()
        answers = await asyncio.gather(*(ask(link) for link in links.values()))
        pairs = zip(links, answers, strict=True)
        return {path.name: answer for path, answer in pairs if answer is not None}

    def _found(self) -> dict[Path, Link]:
        paths = set(self._settings.control_dir.glob("worker-*.sock"))
        for path in self._links.keys() - paths:
            self._links.pop(path).close()
        for path in paths - self._links.keys():
            self._links[path] = Link(path, timeout=self._settings.timing.control)
        return dict(sorted(self._links.items()))

    def close(self) -> None:
        """Closes every connection."""
        for link in self._links.values():
            link.close()
        self._links.clear()


def entries(peer: Peer) -> list[dict[str, object]]:
    """A peer as the ``peers`` message lists it: one entry per data-parallel rank."""
    identity = peer.identity
    if identity is None:
        return []
    return [_entry(identity, peer.address, rank) for rank in range(identity.dp_size)]


def _entry(identity: Identity, address: str, rank: int) -> dict[str, object]:
    return {
        "engine_id": identity.rank_engine_id(rank),
        "host": identity.side_channel.host,
        "port": identity.side_channel.port + rank,
        "tp_size": identity.tp_size,
        "pp_size": identity.pp_size,
        "dp_rank": rank,
        "role": identity.role.value,
        "address": address,
    }


def merge_pairs(statuses: Iterable[Answer], *, expected: int) -> dict[str, Pair]:
    """One word per engine out of all workers' words: ready only when all say so, failed when one does."""
    words: dict[str, list[Pair]] = {}
    count = 0
    for status in statuses:
        count += 1
        pairs = status.get("pairs")
        for engine_id, word in pairs.items() if isinstance(pairs, dict) else ():
            if isinstance(word, dict):
                error = word.get("error")
                pair = Pair(str(word.get("state")), None if error is None else str(error)[:200])
                words.setdefault(str(engine_id), []).append(pair)
    merged: dict[str, Pair] = {}
    for engine_id, said in words.items():
        failed = next((pair for pair in said if pair.state == "failed"), None)
        everybody = count >= expected and len(said) == count and all(pair.state == "ready" for pair in said)
        merged[engine_id] = failed or Pair("ready" if everybody else "connecting")
    return merged


def merge_accounts(answers: list[Answer]) -> Answer | None:
    """One account per transfer: sums for what moved, the worst for times, the first for the rest."""
    if not answers:
        return None
    merged = {key: value for key, value in answers[0].items() if key not in ("ok", "known")}
    states = {str(answer.get("state")) for answer in answers}
    for state in ("quarantined", "failed", "booked"):
        if state in states:
            merged["state"] = state
            break
    for key, pick in (("bytes", sum), ("writes", sum), ("lead_s", min), ("exposed_s", max), ("overlap", min),
                      ("booked_at", min), ("ended_at", max)):  # fmt: skip
        values = [answer[key] for answer in answers if isinstance(answer.get(key), int | float)]
        if values:
            merged[key] = pick(values)
    return merged
