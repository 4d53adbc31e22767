"""From news to work: which models are to be looked at, and how urgently.

Only the leader queues anything. A standby would pile up keys that the leader has long dealt with, and on taking over
would do them before what is really new; instead, whoever begins to lead looks at every model once. What has visibly
not been dealt with goes first: a spec of which no report says more than that it was noticed. Everything else that a
list brings, at the start and after a broken watch, is as a rule as it was left, and waits behind what happens now."""

from __future__ import annotations

from collections.abc import Iterable

from prebook_operator.cache import Cache, Seen
from prebook_operator.kube.progress import Scope
from prebook_operator.kube.resources import Resource
from prebook_operator.records import Key, ModelRecord
from prebook_operator.workqueue import WorkQueue


class Intake:
    """Feeds the cache, and the queue while leading."""

    def __init__(self, cache: Cache, queue: WorkQueue) -> None:
        self._cache = cache
        self._queue = queue
        self._leading = False

    def lead(self, leading: bool) -> None:
        """Leadership was gained or lost. On gaining it every model is looked at once."""
        self._leading = leading
        self._look_at_all()

    def kinds_changed(self, gone: Iterable[Resource]) -> None:
        """Kinds have come or gone, which may concern any model."""
        for kind in gone:
            self._cache.forget_kind(kind.plural)
        self._look_at_all()

    def seen(self, seen: Seen) -> None:
        """A watch event."""
        is_model = isinstance(seen.record, ModelRecord)
        before = self._cache.models.get(seen.owner) if is_model and seen.owner else None
        for key in self._cache.see(seen):
            if not self._leading:
                continue
            if isinstance(seen.record, ModelRecord) and (before is None or before.generation != seen.record.generation):
                self._again(key, seen.record)
            elif seen.listed:
                self._queue.add_after(key, 0.0)
            else:
                self._queue.add(key)

    def list_ended(self, scope: Scope) -> None:
        """A list is complete; what it lacked has been deleted."""
        for key in self._cache.end_list(scope):
            if self._leading:
                self._queue.add(key)

    def _look_at_all(self) -> None:
        if self._leading:
            for key, model in self._cache.models.items():
                self._again(key, model)

    def _again(self, key: Key, model: ModelRecord) -> None:
        if model.unfinished:
            self._queue.add_fresh(key)
        else:
            self._queue.add_after(key, 0.0)
