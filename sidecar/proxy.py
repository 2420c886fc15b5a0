"""mitmproxy, embedded: the only module that knows how.

mitmproxy documents its addon hooks but not how to run it inside another program, so what is used of
it stands here in one place and setup.cfg pins the release (12.3): ``Master``, its addons for the
proxy core, ``ServerInstance.handle_stream`` behind a listening socket of ours, and the connection
table for draining. There can be one such proxy per process.
"""

import asyncio
import os
import socket
import tempfile
from typing import Any

from mitmproxy import ctx, http, options
from mitmproxy.addons import block, core, disable_h2c, next_layer, proxyserver, tlsconfig
from mitmproxy.master import Master
from mitmproxy.proxy.mode_servers import ServerInstance

from sidecar.addresses import Upstream
from sidecar.capture import Capture

# Seconds without a byte in either direction after which mitmproxy gives a connection up; its
# default of ten minutes would cut off long generations that are not streamed.
_TCP_TIMEOUT = 86_400
_POLL_SECONDS = 0.02


class Proxy:
    """A reverse proxy to one upstream, with ``capture`` as its addon."""

    def __init__(self, upstream: Upstream, capture: Capture) -> None:
        """Needs a running event loop."""
        mode = f"reverse:{upstream.origin}"
        self._master = Master(options.Options(mode=[mode], server=False))
        self._connections = proxyserver.Proxyserver()
        self._capture = capture
        self._ready = _Ready()
        self._master.addons.add(
            core.Core(),
            block.Block(),
            disable_h2c.DisableH2C(),
            self._connections,
            next_layer.NextLayer(),
            capture,
            self._ready,
        )
        if upstream.scheme == "https":
            # The TLS addon insists on a certificate authority of its own. The agent speaks plain
            # HTTP to the loopback address, so nothing is ever signed by it: it is not kept.
            self._master.addons.add(tlsconfig.TlsConfig())
            with tempfile.TemporaryDirectory(prefix="ridealong-") as confdir:
                self._master.options.update(confdir=confdir)
        self._master.options.update(
            # HTTP/2 towards the agent leaks upstream connections when it hangs up.
            http2=False,
            # Connecting when the request is known lets failures be seen and recorded.
            connection_strategy="lazy",
            tcp_timeout=_TCP_TIMEOUT,
            ssl_verify_upstream_trusted_ca=os.environ.get("SSL_CERT_FILE") or None,
        )
        self._instance: ServerInstance[Any] = ServerInstance.make(mode, self._connections)
        self._server: asyncio.Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, sock: socket.socket) -> None:
        """Serve connections of a listening socket."""
        self._task = asyncio.create_task(self._master.run())
        ready = asyncio.create_task(self._ready.running_now.wait())
        await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()
        # mitmproxy offers every event of every exchange to every addon.
        self._master.addons.remove(self._ready)
        self._server = await asyncio.start_server(self._instance.handle_stream, sock=sock)

    async def drain(self, seconds: float) -> None:
        """Accept nothing new, let exchanges end, close connections as they become idle.

        Returns when none is left, or after ``seconds``.
        """
        if self._server is not None:
            self._server.close()
        deadline = asyncio.get_running_loop().time() + seconds
        idle: set[str] = set()
        while self._connections.connections or self._capture.in_flight:
            if asyncio.get_running_loop().time() >= deadline:
                return
            # Twice idle in a row: the last bytes of its exchange have left mitmproxy by then.
            open_now = {str(key) for key in self._connections.connections}
            idle_now = open_now - self._capture.busy_connections()
            for connection in idle & idle_now:
                self._close(connection)
            idle = idle_now
            await asyncio.sleep(_POLL_SECONDS)

    async def stop(self) -> None:
        """End at once. What is still going on is cut off, and recorded as such."""
        if self._server is not None:
            self._server.close()
        self._capture.stop()
        await self._capture.finish_pulls()
        self._master.shutdown()
        if self._task is not None:
            await asyncio.wait({self._task})

    def _close(self, connection: str) -> None:
        handler = self._connections.connections.get(connection)
        transport = handler.transports.get(handler.client) if handler else None
        if transport is not None and isinstance(transport.writer, asyncio.StreamWriter):
            transport.writer.close()


def write_to_client(flow: http.HTTPFlow, data: bytes) -> None:
    """Send bytes of a reply's body now: in a ``response`` hook, before mitmproxy ends the reply.

    mitmproxy itself can only send what a stream callable returns, which can't wait for anything.
    """
    server = ctx.master.addons.get("proxyserver")
    handler = server.connections.get(flow.client_conn.id)
    transport = handler.transports.get(handler.client) if handler else None
    if transport is None or flow.response is None:
        return
    if "chunked" in flow.response.headers.get("transfer-encoding", "").lower():
        data = b"%x\r\n%b\r\n" % (len(data), data)
    if not transport.writer.is_closing():
        transport.writer.write(data)


class _Ready:
    """Addon that tells when mitmproxy runs."""

    def __init__(self) -> None:
        self.running_now = asyncio.Event()

    def running(self) -> None:
        self.running_now.set()
