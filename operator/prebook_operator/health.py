"""Health and metrics endpoints.

/healthz fails when the process had better be restarted: a watch gives no sign of life. /readyz is about being usable,
and a standby is: it watches and could take over at once. Neither says anything about models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from prebook_operator.metrics import Metrics

Probe = Callable[[], str]
"""Returns what is wrong, empty when nothing is."""


class HealthServer:
    """Serves /healthz, /readyz on one port and /metrics on another; port 0 takes any free one."""

    def __init__(self, *, live: Probe, ready: Probe, metrics: Metrics) -> None:
        self._live = live
        self._ready = ready
        self._metrics = metrics
        self._runners: list[web.AppRunner] = []
        self.ports: dict[str, int] = {}

    async def start(self, *, bind: str, health_port: int, metrics_port: int) -> None:
        """Listens. Raises OSError when a port is taken."""
        health = web.Application()
        health.router.add_get("/healthz", self._probe(self._live))
        health.router.add_get("/readyz", self._probe(self._ready))
        metrics = web.Application()
        metrics.router.add_get("/metrics", self._serve_metrics)
        for name, app, port in (("health", health, health_port), ("metrics", metrics, metrics_port)):
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, bind, port)
            await site.start()
            self._runners.append(runner)
            self.ports[name] = runner.addresses[0][1]

    async def stop(self) -> None:
        """Stops listening."""
        for runner in self._runners:
            await runner.cleanup()

    def _probe(self, probe: Probe) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(_: web.Request) -> web.StreamResponse:
            wrong = probe()
            return web.Response(text=wrong or "ok", status=503 if wrong else 200)

        return answer

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})
