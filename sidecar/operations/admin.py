"""The admin port: ``GET /healthz``, ``GET /readyz`` and ``GET /metrics``."""

import socket
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from sidecar.operations.metrics import Metrics

Health = Callable[[], dict[str, Any]]
Reasons = Callable[[], Awaitable[list[str]]]


class Admin:
    """Serves on a listening socket until closed."""

    def __init__(self, health: Health, reasons: Reasons, metrics: Metrics) -> None:
        """``health`` returns what ``/healthz`` answers, ``reasons`` why the sidecar isn't ready."""
        self._health = health
        self._reasons = reasons
        self._metrics = metrics
        app = web.Application()
        app.router.add_get("/healthz", self._get_health)
        app.router.add_get("/readyz", self._get_ready)
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

    async def _get_ready(self, _: web.Request) -> web.Response:
        reasons = await self._reasons()
        answer = {"status": "not ready" if reasons else "ready", "reasons": reasons}
        return web.json_response(answer, status=503 if reasons else 200)

    async def _get_metrics(self, _: web.Request) -> web.Response:
        text = generate_latest(self._metrics.registry)
        return web.Response(body=text, headers={"content-type": CONTENT_TYPE_LATEST})
