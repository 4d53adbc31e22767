"""Keeps the peer table true: reads the source of addresses, and polls every address for its identity.

Every address has a polling task of its own, so a dead peer delays nobody. Who has work under way with an engine waits
on :meth:`Discovery.watch` and hears at once when that engine is lost or was replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping

import aiohttp

from prebook_connector.dispatch import identity as identities
from prebook_connector.dispatch import metrics
from prebook_connector.dispatch.peertable import Gone, Pair, Peer, PeerState, PeerTable, PollFailure
from prebook_connector.dispatch.reasons import Failure
from prebook_connector.dispatch.settings import Timing
from prebook_connector.dispatch.sources import Source, SourceError

IDENTITY_PATH = "/prebook/v1/identity"
_MAX_IDENTITY = 64 << 10
_CHANGING_FOR = 15.0

logger = logging.getLogger(__name__)


class Discovery:
    """The only writer of a :class:`PeerTable`'s discovery and poll side."""

    def __init__(
        self,
        table: PeerTable,
        source: Source,
        *,
        timing: Timing,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.table = table
        self._source = source
        self._timing = timing
        self._on_change = on_change
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._watchers: dict[str, set[asyncio.Future[Failure]]] = {}
        self._announced = -1

    # -- for those who have work with a peer

    @contextlib.contextmanager
    def watch(self, engine_id: str) -> Iterator[asyncio.Future[Failure]]:
        """A future that gets the reason when ``engine_id`` is lost while the context lasts."""
        future: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        group = self._watchers.setdefault(engine_id, set())
        group.add(future)
        try:
            yield future
        finally:
            group.discard(future)
            if not group and self._watchers.get(engine_id) is group:
                del self._watchers[engine_id]
            future.cancel()

    def pairs_said(self, pairs: Mapping[str, Pair]) -> None:
        """The connector's view of its pairs arrived."""
        self._tell(self.table.paired(pairs, now=self._clock()))

    def refit(self) -> None:
        """This pod learnt more about itself (its compatibility hash): judge the peers again."""
        self.table.refit(now=self._clock())
        self._changed()

    # -- loops

    async def run(self) -> None:
        """Reads the source until cancelled; polling tasks are children of this call."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.5 * self._timing.poll_steady)
        timeout = aiohttp.ClientTimeout(total=self._timing.poll_timeout)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"accept-encoding": "identity"},
        ) as session:
            self._session = session
            good = self._clock()
            try:
                while True:
                    try:
                        addresses = await self._source.read()
                        good = self._clock()
                        self._resolved(addresses)
                    except SourceError as error:
                        logger.warning("peers cannot be read: %s", error)
                        if self._clock() - good > self._timing.forget_after:
                            self._resolved([])
                    await asyncio.sleep(self._source.interval)
            finally:
                await self._stop_polls()

    async def _stop_polls(self) -> None:
        for task in self._polls.values():
            task.cancel()
        await asyncio.gather(*self._polls.values(), return_exceptions=True)
        self._polls.clear()

    def _resolved(self, addresses: list[str]) -> None:
        self.table.resolved(addresses, now=self._clock())
        known = {peer.address for peer in self.table.peers()}
        for address in known - self._polls.keys():
            self._polls[address] = asyncio.create_task(self._poll_loop(address), name=f"prebook-poll-{address}")
        self._changed()

    async def _poll_loop(self, address: str) -> None:
        try:
            while (peer := self.table.get(address)) is not None:
                await self._poll(address)
                await asyncio.sleep(self._pause(self.table.get(address) or peer))
        finally:
            self._polls.pop(address, None)

    def _pause(self, peer: Peer) -> float:
        """Seconds until the next poll: short while something may change or work is under way."""
        busy = peer.in_flight > 0 or peer.failing_since is not None
        recent = self._clock() - peer.changed < _CHANGING_FOR
        settled = self.table.state(peer) in (PeerState.READY, PeerState.INCOMPATIBLE)
        return self._timing.poll_steady if settled and not busy and not recent else self._timing.poll

    async def _poll(self, address: str) -> None:
        try:
            raw = await self._fetch(address)
            answer = identities.read(raw)
        except TimeoutError:
            self._failed(address, PollFailure.TIMEOUT, "identity poll timed out")
        except identities.NotAnIdentity as error:
            self._failed(address, PollFailure.GARBAGE, f"not an identity: {error}")
        except aiohttp.ClientConnectorError as error:
            self._failed(address, PollFailure.REFUSED, f"cannot connect: {error.os_error.strerror}")
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientPayloadError):
            # The other side closed an idle connection or went down: the next poll opens a new one and will tell.
            self._failed(address, PollFailure.TIMEOUT, "connection reset")
        except (aiohttp.ClientError, ValueError) as error:
            self._failed(address, PollFailure.GARBAGE, f"not HTTP: {type(error).__name__}")
        else:
            self._tell(self.table.answered(address, answer, now=self._clock()))

    async def _fetch(self, address: str) -> bytes:
        if self._session is None:
            raise RuntimeError("discovery is not running")
        async with self._session.get(f"http://{address}{IDENTITY_PATH}", allow_redirects=False) as response:
            if response.status != 200:
                raise identities.NotAnIdentity(f"HTTP status {response.status}")
            raw = await response.content.read(_MAX_IDENTITY + 1)
            while len(raw) <= _MAX_IDENTITY and (more := await response.content.read(_MAX_IDENTITY + 1 - len(raw))):
                raw += more
            if len(raw) > _MAX_IDENTITY:
                raise identities.NotAnIdentity(f"more than {_MAX_IDENTITY} bytes")
            return raw

    def _failed(self, address: str, how: PollFailure, detail: str) -> None:
        metrics.POLL_FAILURES.labels(how.value).inc()
        self._tell(self.table.failed(address, how, detail, now=self._clock()))

    def _tell(self, gone: list[Gone]) -> None:
        for item in gone:
            logger.warning("prefill/decode peer engine %s: %s", item.engine_id, item.why)
            for future in self._watchers.get(item.engine_id, ()):
                if not future.done():
                    future.set_result(item.why)
        self._changed()

    def _changed(self) -> None:
        metrics.show_peers([self.table.state(peer) for peer in self.table.peers()])
        if self._announced != self.table.generation:
            self._announced = self.table.generation
            self._on_change()
