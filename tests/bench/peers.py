"""The proxies that have to be written to be compared with.

python -m tests.bench.peers (aiohttp | mitmproxy) PORT UPSTREAM
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web
from mitmproxy import http, options
from mitmproxy.addons import block, core, disable_h2c, next_layer, proxyserver
from mitmproxy.master import Master
from mitmproxy.proxy.mode_servers import ServerInstance

_HOP_BY_HOP = {"host", "content-length", "transfer-encoding", "connection", "keep-alive"}
_BACKLOG = 1024


def plain_aiohttp(port: int, upstream: str) -> None:
    """Run what one would write with aiohttp alone: forwards, streams, keeps nothing."""
    session_key = web.AppKey("session", aiohttp.ClientSession)

    async def forward(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        url = upstream + request.raw_path
        session = request.app[session_key]
        async with session.request(request.method, url, data=body, headers=headers) as reply:
            response = web.StreamResponse(
                status=reply.status,
                headers={k: v for k, v in reply.headers.items() if k.lower() not in _HOP_BY_HOP},
            )
            response.content_length = reply.content_length
            await response.prepare(request)
            async for chunk in reply.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    async def session(application: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(None),
        ) as application[session_key]:
            yield

    application = web.Application(client_max_size=1 << 30)
    application.cleanup_ctx.append(session)
    application.router.add_route("*", "/{path:.*}", forward)
    web.run_app(
        application, host="127.0.0.1", port=port, print=None, access_log=None, backlog=_BACKLOG
    )


class _Stream:
    """Addon that lets bodies stream through."""

    def __init__(self) -> None:
        self.started = asyncio.Event()

    def running(self) -> None:
        self.started.set()

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        flow.request.stream = True

    def responseheaders(self, flow: http.HTTPFlow) -> None:
        assert flow.response is not None
        flow.response.stream = True


async def bare_mitmproxy(port: int, upstream: str) -> None:
    """Run mitmproxy as the sidecar embeds it (``sidecar.proxy``), and nothing of the sidecar."""
    mode = f"reverse:{upstream}"
    master = Master(options.Options(mode=[mode], server=False))
    connections = proxyserver.Proxyserver()
    stream = _Stream()
    master.addons.add(
        core.Core(),
        block.Block(),
        disable_h2c.DisableH2C(),
        connections,
        next_layer.NextLayer(),
        stream,
    )
    master.options.update(http2=False, connection_strategy="lazy", tcp_timeout=86_400)
    instance: ServerInstance[Any] = ServerInstance.make(mode, connections)
    running = asyncio.create_task(master.run())
    await stream.started.wait()
    await asyncio.start_server(instance.handle_stream, "127.0.0.1", port, backlog=_BACKLOG)
    await running


if __name__ == "__main__":
    name, at, to = sys.argv[1:]
    if name == "aiohttp":
        plain_aiohttp(int(at), to)
    else:
        logging.basicConfig(level=logging.WARNING)
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(bare_mitmproxy(int(at), to))
