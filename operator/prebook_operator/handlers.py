"""kopf as the source of events, and nothing more.

kopf lists and watches, reconnects, and survives 410; that is used. Everything of it that writes or remembers is off:
no finalizers (only `on.event` handlers exist), no annotations and no progress (storages that store nothing), no
posting, no peering. It runs in a thread and an event loop of its own, for at its end it cancels every task of the
loop that it runs in.

In that thread an object becomes a record (see `records`) and the record is handed over to the operator's loop; the
object itself is let go at once."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import kopf

from prebook_operator.cache import Seen
from prebook_operator.kube.auth import Credentials, authenticated_session
from prebook_operator.kube.progress import Scope, WatchProgress
from prebook_operator.kube.resources import MODEL, NODE, POD, Resource
from prebook_operator.records import (
    MODEL_LABEL,
    child_record,
    key_of_child,
    key_of_model,
    model_record,
    node_record,
    pod_record,
)

logger = logging.getLogger(__name__)

OURS: Final = f"app.kubernetes.io/managed-by=prebook,{MODEL_LABEL}"
"""Selector of everything that is watched besides models and nodes."""
QUIET: Final = 0.25
"""A list is fully handed over when no object of it has been handled for this long, in a loop that does nothing else."""


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """What to watch. `namespaces` empty: all of them."""

    resources: tuple[Resource, ...]
    namespaces: tuple[str, ...]
    kubeconfig: Path | None
    user_agent: str
    server_timeout: int
    chunk: int = 100


@dataclass(frozen=True, kw_only=True)
class Deliveries:
    """Where news goes. All are called in the operator's loop, in the order in which things happened."""

    seen: Callable[[Seen], None]
    list_begun: Callable[[Scope], None]
    list_ended: Callable[[Scope], None]
    failed: Callable[[BaseException], None]


class NoDiffBase(kopf.DiffBaseStorage):
    """Remembers no last-seen state: nothing here depends on differences."""

    def build(self, **_: Any) -> Any:
        """No essence, which also spares the copy of every object."""
        return {}

    def fetch(self, **_: Any) -> Any:
        """Nothing is stored."""
        return None

    def store(self, **_: Any) -> None:
        """Stores nothing."""


class NoProgress(kopf.ProgressStorage):
    """Remembers no handler progress: handlers of raw events have none."""

    def fetch(self, **_: Any) -> Any:
        """Nothing is stored."""
        return None

    def store(self, **_: Any) -> None:
        """Stores nothing."""

    def purge(self, **_: Any) -> None:
        """There is nothing to purge."""

    def touch(self, **_: Any) -> None:
        """Touches nothing."""

    def clear(self, *, essence: Any) -> Any:
        """As it is."""
        return essence


class EventSource:
    """Runs kopf in a thread until stopped or failed."""

    def __init__(self, options: WatchOptions, deliveries: Deliveries) -> None:
        self._options = options
        self._deliveries = deliveries
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._handled: dict[Scope, float] = {}
        self.progress = WatchProgress(
            frozenset(resource.plural for resource in options.resources),
            on_list=self._list_begun,
            on_watch=self._watch_begun,
        )

    def start(self) -> None:
        """Starts watching."""
        self.progress.expect(self.scopes())
        self._thread.start()

    async def stop(self, *, seconds: float) -> None:
        """Stops watching; what hangs is left behind, for the process is about to end."""
        self._stop.set()
        await asyncio.to_thread(self._thread.join, seconds)

    def scopes(self) -> list[Scope]:
        """Every collection that is to be watched."""
        return [
            Scope(resource.plural, namespace)
            for resource in self._options.resources
            for namespace in (self._options.namespaces if resource.namespaced and self._options.namespaces else (None,))
        ]

    def _run(self) -> None:
        error: BaseException
        try:
            asyncio.run(self._operate())
        except Exception as failure:
            error = failure
        else:
            if self._stop.is_set():
                return
            error = RuntimeError("the watch ended by itself")
        self._hand_over(self._deliveries.failed, error)

    async def _operate(self) -> None:
        await kopf.operator(
            registry=self._registry(),
            settings=self._settings(),
            standalone=True,
            clusterwide=not self._options.namespaces,
            namespaces=list(self._options.namespaces),
            stop_flag=self._stop,
        )

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        async def login(**_: Any) -> kopf.AiohttpSession:
            # kopf closes a session whose credentials were refused, and asks for another.
            credentials = await Credentials.load(self._options.kubeconfig)
            session = authenticated_session(
                credentials, user_agent=self._options.user_agent, observe=self.progress.middleware
            )
            return kopf.AiohttpSession(server=credentials.server, aiohttp_session=session)

        kopf.on.login(registry=registry)(login)
        for resource in self._options.resources:
            handler = self._handler(resource)
            kopf.on.event(
                group=resource.group,
                version=resource.version,
                plural=resource.plural,
                id=resource.plural,
                registry=registry,
            )(handler)
        return registry

    def _handler(self, resource: Resource) -> Callable[..., Any]:
        async def on_event(event: Mapping[str, Any], **_: Any) -> None:
            listed = event["type"] is None
            if listed:
                self._note_handled(resource, event["object"])
            try:
                seen = seen_of(resource, event)
            except Exception:
                # kopf would ignore it: an object that we cannot read must at least be heard of.
                name = (event["object"].get("metadata") or {}).get("name")
                logger.exception(
                    "an object cannot be read and is left out", extra={"kind": resource.kind, "object": name}
                )
                return
            if seen is not None:
                self._hand_over(self._deliveries.seen, seen)

        return on_event

    def _note_handled(self, resource: Resource, raw: Mapping[str, Any]) -> None:
        namespace = raw["metadata"].get("namespace") if resource.namespaced and self._options.namespaces else None
        self._handled[Scope(resource.plural, namespace)] = asyncio.get_running_loop().time()

    def _settings(self) -> kopf.OperatorSettings:
        settings = kopf.OperatorSettings()
        # Otherwise a thread that was stopped is answered by SIGKILL to the whole process, minutes later.
        settings.process.ultimate_exiting_timeout = None
        settings.posting.enabled = False
        settings.scanning.disabled = True
        settings.persistence.diffbase_storage = NoDiffBase()
        settings.persistence.progress_storage = NoProgress()
        settings.networking.request_timeout = 60
        settings.networking.connect_timeout = 10
        settings.networking.error_backoffs = (0.2, 0.5, 1, 2, 3, 5)
        settings.watching.server_timeout = self._options.server_timeout
        settings.watching.client_timeout = self._options.server_timeout + 30
        settings.watching.connect_timeout = 10
        settings.watching.reconnect_backoff = 0.5
        settings.watching.chunk_size = self._options.chunk
        # A worker keeps the last object of its stream alive until it ends.
        settings.queueing.idle_timeout = 0.1
        for resource in self._options.resources:
            if resource not in (MODEL, NODE):
                settings.watching.label_selectors[resource.group, resource.version, resource.plural] = OURS
        return settings

    def _list_begun(self, scope: Scope) -> None:
        self._handled.pop(scope, None)
        self._hand_over(self._deliveries.list_begun, scope)

    def _watch_begun(self, scope: Scope) -> None:
        self._end_when_quiet(scope, asyncio.get_running_loop())

    def _end_when_quiet(self, scope: Scope, loop: asyncio.AbstractEventLoop) -> None:
        def check() -> None:
            if loop.time() - self._handled.get(scope, float("-inf")) < QUIET:
                loop.call_later(QUIET, check)
            else:
                self._hand_over(self._deliveries.list_ended, scope)

        loop.call_later(QUIET, check)

    def _hand_over(self, deliver: Callable[[Any], None], item: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(deliver, item)
        except RuntimeError:
            logger.debug("the operator's loop has ended; nobody needs the news")


def seen_of(resource: Resource, event: Mapping[str, Any]) -> Seen | None:
    """A raw watch event as a Seen; None for an object that belongs to no model."""
    raw, kind = event["object"], event["type"]
    deleted, listed = kind == "DELETED", kind is None
    if resource is MODEL:
        return Seen(resource.plural, key_of_model(raw), model_record(raw), deleted, listed)
    if resource is NODE:
        return Seen(resource.plural, None, node_record(raw), deleted, listed)
    key = key_of_child(raw)
    if key is None:
        return None
    record = pod_record(raw) if resource is POD else child_record(raw, resource)
    return Seen(resource.plural, key, record, deleted, listed)
