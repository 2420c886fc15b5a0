"""The admin port: ``GET /healthz`` and ``GET /metrics``."""

import socket
from collections.abc import Callable
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from sidecar.metrics import Metrics

Health = Callable[[], dict[str, Any]]


class Admin:
    """Serves on a listening socket until closed."""

    def __init__(self, health: Health, metrics: Metrics) -> None:
        """``health`` returns what ``/healthz`` answers."""
        self._health = health
        self._metrics = metrics
        app = web.Application()
        app.router.add_get("/healthz", self._get_health)
        app.router.add_get("/metrics", self._get_metrics)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)

    async def start(self, sock: socket.socket) -> None:
        """Start serving."""
        await self._runner.setup()
        await web.SockSite(self._runner, sock, shutdown_timeout=1).start()

    async def close(self) -> None:
        """Stop serving."""
        await self._runner.cleanup()

    async def _get_health(self, _: web.Request) -> web.Response:
        # 200 even when degraded: the agent's traffic goes on, a restart would only cut it.
        return web.json_response(self._health())

    async def _get_metrics(self, _: web.Request) -> web.Response:
        text = generate_latest(self._metrics.registry)
        return web.Response(body=text, headers={"content-type": CONTENT_TYPE_LATEST})
