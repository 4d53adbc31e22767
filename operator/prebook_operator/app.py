"""The operator process: puts the parts together, and decides who works when.

    watch thread ──records──► cache ──keys──► queue ──► workers ──► reconcile        (workers only while leading)

A standby does everything except writing: it watches, keeps its cache current and is Ready, so that taking over costs
no more than taking the lease."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from prebook_operator.cache import Cache
from prebook_operator.cluster import Capabilities, examine
from prebook_operator.decide import RenderSettings
from prebook_operator.execute import Executor
from prebook_operator.handlers import Deliveries, EventSource, WatchOptions
from prebook_operator.health import HealthServer
from prebook_operator.intake import Intake
from prebook_operator.kinds import OptionalKinds
from prebook_operator.kube.auth import Credentials
from prebook_operator.kube.client import KubeClient
from prebook_operator.kube.election import Election, LeaseSettings
from prebook_operator.kube.errors import KubeError, SchemaTooOld
from prebook_operator.kube.progress import Scope
from prebook_operator.kube.resources import Resource
from prebook_operator.kube.transport import ClusterTransport, Transport
from prebook_operator.metrics import Metrics
from prebook_operator.observe import Observer
from prebook_operator.pairs import HttpPairsReader
from prebook_operator.publish import Publisher
from prebook_operator.reconcile import Pace, Reconciler
from prebook_operator.settings import Settings
from prebook_operator.workers import Workers
from prebook_operator.workqueue import WorkQueue

logger = logging.getLogger(__name__)

RESTART_PAUSE: Final = 2.0
"""Seconds before a failed watch is started again; kopf has backed off before it failed."""
EXAMINE_PAUSE: Final = 5.0
LEASE_TIMEOUT: Final = 4.0


def user_agent() -> str:
    """How the operator introduces itself to the API server."""
    try:
        return f"prebook-operator/{version('prebook')}"
    except PackageNotFoundError:
        return "prebook-operator/0"


class Operator:
    """One operator process (or one of several in a test). `transport` replaces the connection to the cluster for
    reconciling, not for watching."""

    def __init__(self, settings: Settings, *, transport: Transport | None = None) -> None:
        self._settings = settings
        self._given_transport = transport
        self.metrics = Metrics()
        self.cache = Cache()
        self.queue = WorkQueue(debounce=settings.debounce)
        self.intake = Intake(self.cache, self.queue)
        self.synced = asyncio.Event()
        self.stopping = asyncio.Event()
        self._unlisted: set[Scope] = set()
        self._source: EventSource | None = None
        self._crew: Workers | None = None
        self._reconciler: Reconciler | None = None
        self._capabilities = Capabilities(optional=frozenset(), nodes=False)
        self._rewatch: asyncio.Queue[BaseException | None] = asyncio.Queue()
        self._waiting_for = "the API server"
        self.health = HealthServer(live=self._not_live, ready=self._not_ready, metrics=self.metrics)
        self.metrics.watch_state(self.cache, self.queue.depth)

    async def run(self) -> None:
        """Runs until SIGTERM, SIGINT or `stopping` is set. Raises NoCluster, and OSError for a port that is taken."""
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread: no signals
            for name in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(name, self.stopping.set)
        settings = self._settings
        await self.health.start(
            bind=settings.bind, health_port=settings.health_port, metrics_port=settings.metrics_port
        )
        credentials = await Credentials.load(settings.kubeconfig)
        transport = self._given_transport or ClusterTransport(credentials, user_agent=user_agent())
        lease_client = KubeClient(transport, timeout=LEASE_TIMEOUT, observer=self.metrics.observe_request)
        try:
            capabilities = await self._examined(transport)
            if capabilities is not None:
                self._capabilities = capabilities
                await self._operate(transport, lease_client)
        finally:
            await transport.close()
            await self.health.stop()

    async def _examined(self, transport: Transport) -> Capabilities | None:
        client = KubeClient(transport, timeout=self._settings.request_timeout, observer=self.metrics.observe_request)
        while not self.stopping.is_set():
            try:
                return await examine(client)
            except SchemaTooOld as error:
                self._waiting_for = error.message
                logger.error("%s", error.message)
            except KubeError as error:
                self._waiting_for = f"the API server: {error}"
                logger.warning("the cluster cannot be examined yet: %s", error)
            await self._pause(EXAMINE_PAUSE)
        return None

    async def _operate(self, transport: Transport, lease_client: KubeClient) -> None:
        settings = self._settings
        election = Election(
            lease_client,
            LeaseSettings(
                namespace=settings.lease_namespace,
                name=settings.lease_name,
                identity=settings.identity,
                duration=settings.lease_duration,
                margin=settings.lease_margin,
                period=settings.lease_period,
                look=settings.lease_look,
            ),
            on_change=self._on_leadership,
        )
        client = KubeClient(
            transport,
            timeout=settings.request_timeout,
            gate=election.remaining,
            observer=self.metrics.observe_request,
        )
        pairs = HttpPairsReader(port=settings.pod_port, pending=settings.pairing)
        workers = self._crew = self._workers(client, pairs)
        kinds = OptionalKinds(client, self._capabilities.optional, on_change=self._on_kinds, period=settings.discovery)
        tasks = [
            asyncio.create_task(self._watch(), name="watch"),
            asyncio.create_task(kinds.run(), name="kinds"),
            asyncio.create_task(election.run(), name="election"),
            asyncio.create_task(workers.run(), name="workers"),
        ]
        stop = asyncio.create_task(self.stopping.wait(), name="stop")
        try:
            done, _ = await asyncio.wait([*tasks, stop], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stop}:
                task.result()  # raises what ended it
        finally:
            self._waiting_for = "the process to end"
            await workers.drain(seconds=settings.drain)
            await _cancelled([stop, *tasks])
            await election.release()
            await pairs.close()
            if self._source is not None:
                await self._source.stop(seconds=3.0)

    def _workers(self, client: KubeClient, pairs: HttpPairsReader) -> Workers:
        settings, capabilities = self._settings, self._capabilities
        observer = Observer(self.cache, client, pairs, secret_recheck=settings.resync)
        observer.nodes_readable = capabilities.nodes
        self._reconciler = Reconciler(
            self.cache,
            observer,
            Executor(client, self.cache, observer, foreign_recheck=settings.resync),
            Publisher(client, self.cache, reporter=settings.identity),
            settings=RenderSettings(
                operator_image=settings.image,
                operator_namespace=settings.own_namespace,
                allow=settings.allow,
                has_pod_monitor=capabilities.pod_monitors,
            ),
            pace=Pace(settle=settings.settle, pairing=settings.pairing, resync=settings.resync),
        )
        return Workers(
            self._reconciler,
            self.queue,
            metrics=self.metrics,
            synced=self.synced,
            number=settings.workers,
        )

    async def _watch(self) -> None:
        deliveries = Deliveries(
            seen=self.intake.seen,
            list_begun=self.cache.begin_list,
            list_ended=self._on_list_ended,
            failed=self._rewatch.put_nowait,
        )
        while True:
            self._source = EventSource(self._watch_options(), deliveries)
            if not self.synced.is_set():
                self._unlisted = set(self._source.scopes())
                self._waiting_for = "the first lists"
            self._source.start()
            failure = await self._rewatch.get()
            if failure is None:
                await self._source.stop(seconds=3.0)  # other kinds are to be watched
                continue
            self.metrics.watch_restarts.inc()
            logger.warning("the watch has failed and is started again: %s", failure)
            await asyncio.sleep(RESTART_PAUSE)

    def _watch_options(self) -> WatchOptions:
        settings = self._settings
        return WatchOptions(
            resources=self._capabilities.watched,
            namespaces=settings.namespaces,
            kubeconfig=settings.kubeconfig,
            user_agent=user_agent(),
            server_timeout=settings.watch_timeout,
        )

    def _on_leadership(self, leading: bool) -> None:
        self.intake.lead(leading)
        if self._crew is not None:
            self._crew.lead(leading)

    def _on_list_ended(self, scope: Scope) -> None:
        self.intake.list_ended(scope)
        self._unlisted.discard(scope)
        if not self._unlisted and not self.synced.is_set():
            self._waiting_for = ""
            logger.info(
                "the cache is complete", extra={"models": len(self.cache.models), "objects": self.cache.objects()}
            )
            self.synced.set()

    def _on_kinds(self, optional: frozenset[Resource]) -> None:
        gone = self._capabilities.optional - optional
        self._capabilities = replace(self._capabilities, optional=optional)
        if self._reconciler is not None:
            self._reconciler.pod_monitors(self._capabilities.pod_monitors)
        self.intake.kinds_changed(gone)
        self._rewatch.put_nowait(None)

    def _not_live(self) -> str:
        if self._source is None:
            return ""
        silent = self._source.progress.silent(self._settings.watch_silence)
        return (
            f"no sign of life from the watch of {', '.join(sorted({scope.plural for scope in silent}))}"
            if silent
            else ""
        )

    def _not_ready(self) -> str:
        return f"waiting for {self._waiting_for}" if self._waiting_for else ""

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), timeout=seconds)


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
