"""Optional kinds that come and go while the operator runs: somebody installs the Prometheus operator next week, or
takes it away.

Asked of discovery, not watched: CRDs are cluster-wide, and a namespaced operator may not list them. Discovery is open
to every client and costs one small request a kind and period."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from prebook_operator.cluster import optional_kinds
from prebook_operator.kube.client import KubeClient
from prebook_operator.kube.errors import KubeError
from prebook_operator.kube.resources import Resource

logger = logging.getLogger(__name__)


class OptionalKinds:
    """Calls `on_change` with the kinds that are served whenever that set has changed. `period` is in seconds."""

    def __init__(
        self,
        client: KubeClient,
        served: frozenset[Resource],
        *,
        on_change: Callable[[frozenset[Resource]], None],
        period: float,
    ) -> None:
        self._client = client
        self._served = served
        self._on_change = on_change
        self._period = period

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            await asyncio.sleep(self._period)
            await self.look()

    async def look(self) -> None:
        """One look. A server that does not answer changes nothing."""
        try:
            served = await optional_kinds(self._client)
        except KubeError as error:
            logger.info("optional kinds could not be looked up: %s", error)
            return
        if served == self._served:
            return
        logger.info(
            "optional kinds have changed",
            extra={"come": _names(served - self._served), "gone": _names(self._served - served)},
        )
        self._served = served
        self._on_change(served)


def _names(kinds: frozenset[Resource]) -> list[str]:
    return sorted(kind.kind for kind in kinds)
