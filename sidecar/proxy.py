"""mitmproxy, embedded: the only module that knows how.

mitmproxy documents its addon hooks but not how to run it inside another program, so what is used of
it stands here in one place and setup.cfg pins the release (12.3): ``Master``, its addons for the
proxy core, ``ServerInstance.handle_stream`` behind a listening socket of ours, and the connection
table for draining. There can be one such proxy per process.
"""

import asyncio
import contextlib
import os
import socket
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mitmproxy import ctx, http, options
from mitmproxy.addons import block, core, disable_h2c, next_layer, proxyserver, tlsconfig
from mitmproxy.connection import Client, ConnectionState, Server
from mitmproxy.master import Master
from mitmproxy.proxy import layer
from mitmproxy.proxy.layers.http import HttpLayer
from mitmproxy.proxy.mode_servers import ServerInstance
from mitmproxy.proxy.server import ConnectionIO
from mitmproxy.proxy.server_hooks import ServerConnectionHookData
from mitmproxy.tls import TlsData
from OpenSSL import SSL

from sidecar.access import tls
from sidecar.access.limits import http_layers
from sidecar.capture import Capture
from sidecar.routing import replies
from sidecar.routing.addresses import BACKLOG
from sidecar.routing.ways import Listener

_POLL_SECONDS = 0.02
_QUIET_SECONDS = 2.0
"""Without a byte for so long, a connection that is not read counts as idle."""
_LEFT_SECONDS = 1.0
"""How long the ends of a client's connections may take once it has gone."""
_TLS_READ_BYTES = 65_536


class Proxy:
    """A proxy with ``addons``, in the order in which they see mitmproxy's events."""

    def __init__(
        self,
        capture: Capture,
        addons: Sequence[object],
        *,
        read_hosts: Sequence[str],
        key_folder: Path | None,
        tls_upstream: bool,
        timeout_seconds: int,
    ) -> None:
        """Needs a running event loop.

        ``read_hosts``: regular expressions over ``host:port`` of the connections that are read; all
        others pass as bytes. ``key_folder``: of the certificate authority that signs for these
        hosts, None where agents only speak plain HTTP. ``tls_upstream``: there are https upstreams.
        """
        replies.install()
        self._master = Master(options.Options(mode=[], server=False))
        self._connections = proxyserver.Proxyserver()
        self._capture = capture
        self._ready = _Ready()
        self._no_authority: tempfile.TemporaryDirectory[str] | None = None
        self._master.addons.add(
            _Together(
                core.Core(),
                block.Block(),
                disable_h2c.DisableH2C(),
                self._connections,
                next_layer.NextLayer(),
                _Connections(self._connections),
                capture,
                *addons,
            ),
            self._ready,
        )
        if key_folder is None and tls_upstream:
            # The TLS addon insists on a certificate authority of its own. Where the agent speaks
            # plain HTTP, nothing is ever signed by it: it is not kept.
            self._no_authority = tempfile.TemporaryDirectory(prefix="ridealong-")
            key_folder = Path(self._no_authority.name)
        if key_folder is not None:
            self._master.addons.add(tlsconfig.TlsConfig())
            self._master.options.update(confdir=str(key_folder))
        self._master.options.update(
            # HTTP/2 towards the agent leaks upstream connections when it hangs up.
            http2=False,
            # Connecting when the request is known lets failures be seen and recorded.
            connection_strategy="lazy",
            # Each request's upstream, and so its Host header, is our choice.
            keep_host_header=True,
            tcp_timeout=timeout_seconds,
            allow_hosts=list(read_hosts),
            ssl_verify_upstream_trusted_ca=os.environ.get("SSL_CERT_FILE") or None,
        )
        self._servers: list[asyncio.Server] = []
        self._task: asyncio.Task[None] | None = None

    async def start(self, listeners: Sequence[Listener]) -> None:
        """Serve the connections of listening sockets."""
        self._task = asyncio.create_task(self._master.run())
        ready = asyncio.create_task(self._ready.running_now.wait())
        await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()
        # mitmproxy offers every event of every exchange to every addon.
        self._master.addons.remove(self._ready)
        for listener in listeners:
            instance: ServerInstance[Any] = ServerInstance.make(listener.mode, self._connections)
            handle = _ending_quietly(instance.handle_stream)
            if listener.tls is None:
                server = asyncio.start_server(handle, sock=listener.sock, backlog=BACKLOG)
            else:
                server = asyncio.start_server(
                    tls.without_half_close(handle),
                    sock=listener.sock,
                    backlog=BACKLOG,
                    ssl=listener.tls,
                    ssl_handshake_timeout=tls.HANDSHAKE_SECONDS,
                    ssl_shutdown_timeout=tls.SHUTDOWN_SECONDS,
                )
            self._servers.append(await server)

    @property
    def listening(self) -> bool:
        """Connections are accepted."""
        return any(server.is_serving() for server in self._servers)

    async def drain(self, seconds: float) -> None:
        """Accept nothing new, let exchanges end, close connections as they become idle.

        What passes unread is taken for idle when nothing has come for two seconds.

        Returns when none is left, or after ``seconds``.
        """
        self._stop_listening()
        deadline = asyncio.get_running_loop().time() + seconds
        idle: set[str] = set()
        while self._connections.connections or self._capture.in_flight:
            if asyncio.get_running_loop().time() >= deadline:
                return
            # Twice idle in a row: the last bytes of its exchange have left mitmproxy by then.
            idle_now = self._capture.idle_connections() | self._quiet_connections()
            for connection in idle & idle_now:
                self._close(connection)
            idle = idle_now
            await asyncio.sleep(_POLL_SECONDS)

    async def stop(self) -> None:
        """End at once. What is still going on is cut off, and recorded as such."""
        self._stop_listening()
        self._capture.stop()
        await self._capture.finish_pulls()
        self._master.shutdown()
        if self._task is not None:
            await asyncio.wait({self._task})
        if self._no_authority is not None:
            self._no_authority.cleanup()

    def _stop_listening(self) -> None:
        for server in self._servers:
            server.close()

    def _quiet_connections(self) -> set[str]:
        """Return the connections without exchanges of ours on which nothing has come for a while.

        What passes unread may be in the middle of anything.
        """
        since = time.time() - _QUIET_SECONDS
        quiet = {
            str(key)
            for key, handler in self._connections.connections.items()
            if handler.timeout_watchdog.last_activity < since
        }
        return quiet - self._capture.busy_connections()

    def _close(self, connection: str) -> None:
        handler = self._connections.connections.get(connection)
        transport = handler.transports.get(handler.client) if handler else None
        if transport is not None and isinstance(transport.writer, asyncio.StreamWriter):
            transport.writer.close()


def _ending_quietly(handle: tls.Handler) -> tls.Handler:
    """Wrap a stream handler that is cancelled at the end: asyncio would log a traceback."""

    async def handle_stream(reader: Any, writer: Any) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await handle(reader, writer)

    return handle_stream


def write_to_client(flow: http.HTTPFlow, data: bytes) -> None:
    """Send bytes of a reply's body now: in a ``response`` hook, before mitmproxy ends the reply.

    mitmproxy itself can only send what a stream callable returns, which can't wait for anything.
    """
    writer = _client_writer(flow.client_conn)
    if writer is None or flow.response is None:
        return
    if "chunked" in flow.response.headers.get("transfer-encoding", "").lower():
        data = b"%x\r\n%b\r\n" % (len(data), data)
    known = ctx.master.addons.get(_Connections.name)
    for connection in reversed(known.tls(flow.client_conn)):
        data = _encrypted(connection, data)
    if not writer.is_closing():
        writer.write(data)


def _client_writer(client: Client) -> Any:
    """Return what writes to a client's connection, None if it has ended."""
    handler = ctx.master.addons.get("proxyserver").connections.get(client.id)
    transport = handler.transports.get(handler.client) if handler else None
    return transport.writer if transport is not None else None


def _encrypted(connection: SSL.Connection, data: bytes) -> bytes:
    """Return what has to be sent so that ``data`` arrives inside a TLS connection."""
    connection.sendall(data)
    found = []
    with contextlib.suppress(SSL.WantReadError):  # There is no more.
        while True:
            found.append(connection.bio_read(_TLS_READ_BYTES))
    return b"".join(found)


def pass_reset_on(flow: http.HTTPFlow) -> bool:
    """Where the upstream has reset its connection, make the client's end with a reset too.

    In a hook before mitmproxy closes the client's connection; it would close it in good order, and
    a broken reply would look like one that ended. Says whether there was a reset.
    """
    handler = ctx.master.addons.get("proxyserver").connections.get(flow.client_conn.id)
    upstream = handler.transports.get(flow.server_conn) if handler else None
    if upstream is None or not isinstance(upstream.reader, asyncio.StreamReader):
        return False
    reset = isinstance(upstream.reader.exception(), ConnectionResetError)
    if reset:
        _end_with_reset(flow.client_conn)
    return reset


def _end_with_reset(client: Client) -> None:
    """Let a client's connection, when it is closed, be reset."""
    writer = _client_writer(client)
    if isinstance(writer, asyncio.StreamWriter):
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def forget_closed(known: HttpLayer) -> None:
    """Drop upstream connections that have ended; between two requests of a client.

    mitmproxy keeps them as long as the client's connection lasts, and looks through them for every
    request. Those that failed to open stay: it tells by them.
    """
    for connection in [*known.connections]:
        if (
            isinstance(connection, Server)
            and connection.state is ConnectionState.CLOSED
            and connection.timestamp_end is not None
            and connection is not known.context.server
        ):
            del known.connections[connection]


def close_left(transports: Mapping[Any, ConnectionIO]) -> None:
    """Close the connections whose handler has ended without doing so.

    mitmproxy's does when it is cancelled while it waits to report what it has just read, and the
    other side would wait for an end that never comes.
    """
    for transport in transports.values():
        if transport.writer is not None and transport.handler and transport.handler.done():
            transport.writer.close()


class _Together:
    """Addons that mitmproxy calls in one go: guarding each of its calls costs it more than most of
    them do. An addon that fails ends the event for those behind it.
    """

    name = "ridealong"

    def __init__(self, *addons: object) -> None:
        self.addons = addons


class _Connections:
    """Addon that sees connections come and go."""

    name = "ridealong-connections"

    def __init__(self, table: proxyserver.Proxyserver) -> None:
        self._table = table
        self._tls: dict[str, list[SSL.Connection]] = {}
        self._http: dict[str, list[HttpLayer]] = {}

    def tls(self, client: Client) -> list[SSL.Connection]:
        """Return a client's TLS connections that mitmproxy itself ends; a later one is inside the
        earlier.
        """
        return self._tls.get(client.id, [])

    def next_layer(self, choice: layer.NextLayer) -> None:
        """Note what speaks HTTP with a client, one inside the other in a tunnel."""
        for chosen in http_layers(choice):
            self._http.setdefault(chosen.context.client.id, []).append(chosen)

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        for known in self._http.get(flow.client_conn.id, []):
            forget_closed(known)

    def server_connect_error(self, data: ServerConnectionHookData) -> None:
        """Make a refused connection a reset one: nearest to what it would be without us."""
        _end_with_reset(data.client)

    def tls_established_client(self, data: TlsData) -> None:
        assert data.ssl_conn is not None
        self._tls.setdefault(data.conn.id, []).append(data.ssl_conn)

    def client_disconnected(self, client: Client) -> None:
        self._tls.pop(client.id, None)
        self._http.pop(client.id, None)
        handler = self._table.connections.get(client.id)
        if handler is not None:
            close_left(handler.transports)
            loop = asyncio.get_running_loop()
            loop.call_later(_LEFT_SECONDS, close_left, handler.transports)


class _Ready:
    """Addon that tells when mitmproxy runs."""

    def __init__(self) -> None:
        self.running_now = asyncio.Event()

    def running(self) -> None:
        self.running_now.set()
