"""Report: writes a model's status, its roles' statuses and the Events, each only when it says something new."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime

from prebook_operator.api import ModelRoleStatus, Role
from prebook_operator.cache import Cache
from prebook_operator.events import event, news
from prebook_operator.kube.client import KubeClient
from prebook_operator.kube.errors import Conflict, NotFound, Refused, RetryLater
from prebook_operator.kube.resources import EVENT, MODEL, MODEL_ROLE
from prebook_operator.observe import Snapshot
from prebook_operator.records import MODEL_LABEL, ROLE_LABEL, ChildRecord, child_record, model_record
from prebook_operator.status import report
from prebook_operator.view import View

logger = logging.getLogger(__name__)


def _micro_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Publisher:
    """Writes reports. `reporter` is the name of this pod, for Events."""

    def __init__(
        self, client: KubeClient, cache: Cache, *, reporter: str, micro_now: Callable[[], str] = _micro_now
    ) -> None:
        self._client = client
        self._cache = cache
        self._reporter = reporter
        self._micro_now = micro_now

    async def publish(self, snapshot: Snapshot, view: View) -> None:
        """Writes what differs from `snapshot`. Raises RetryLater, Refused and NotLeader; a model that is gone
        meanwhile needs no report."""
        status = report(view)
        wire = status.to_wire()
        if wire != dict(view.previous):
            try:
                live = await self._client.apply_status(
                    MODEL, namespace=view.namespace, name=view.name, uid=snapshot.model.uid, status=wire
                )
            except (Conflict, NotFound):
                return
            self._cache.put(MODEL.plural, snapshot.model.key, model_record(live))
            for item in news(view.previous, status.conditions):
                body = event(
                    item, key=snapshot.model.key, uid=snapshot.model.uid, reporter=self._reporter, at=self._micro_now()
                )
                await self._tell(body, namespace=view.namespace)
        if view.applied:
            for child in snapshot.children.values():
                if child.plural == MODEL_ROLE.plural and child.owner == snapshot.model.uid and not child.deleting:
                    await self._publish_role(snapshot, view, child)

    async def _publish_role(self, snapshot: Snapshot, view: View, child: ChildRecord) -> None:
        role = Role(child.role)
        pods = view.pods_of(role)
        status = ModelRoleStatus(
            observed_generation=child.generation,
            replicas=len(pods),
            ready_replicas=view.ready(role),
            desired_replicas=view.desired.get(role, 0),
            selector=f"{MODEL_LABEL}={view.name},{ROLE_LABEL}={role.value}",
        ).to_wire()
        if status == json.loads(child.role_status):
            return
        try:
            live = await self._client.apply_status(
                MODEL_ROLE, namespace=view.namespace, name=child.name, uid=child.uid, status=status
            )
        except (Conflict, NotFound):
            return
        self._cache.put(MODEL_ROLE.plural, snapshot.model.key, child_record(live, MODEL_ROLE))

    async def _tell(self, body: dict[str, object], *, namespace: str) -> None:
        try:
            await self._client.create(EVENT, body, namespace=namespace)
        except Conflict:
            return  # the same news, told before
        except (Refused, RetryLater, NotFound) as error:
            # The condition says it too; a model must not be held up because an Event could not be stored.
            logger.warning("an Event was not stored: %s", error)
