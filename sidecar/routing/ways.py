"""The ways in which an agent's traffic reaches the sidecar, and what each says of the caller.

Each way has listening sockets of its own; mitmproxy's mode for it says how a connection begins.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from mitmproxy import http
from mitmproxy.proxy.server_hooks import ServerConnectionHookData

from deploy.errors import UserError
from sidecar.access import tls
from sidecar.access.ca import Authority
from sidecar.config import SidecarConfig
from sidecar.routing import addresses
from sidecar.routing.addresses import Address
from sidecar.routing.intercept import Interception
from sidecar.traces.record import Way

_WAYS: dict[str, Way] = {
    "reverse": "base_url",
    "regular": "proxy",
    "transparent": "transparent",
    "local": "local",
}
# Of the connection between agent and proxy, not of the request (RFC 9110, sections 7.6.1, 11.7.2).
_PROXY_HEADERS = frozenset({"proxy-authorization", "proxy-connection"})


@dataclass(frozen=True)
class Listener:
    """A listening socket and what arrives there."""

    way: Way
    mode: str
    """mitmproxy's name for how its connections begin."""
    sock: socket.socket
    tls: ssl.SSLContext | None = None

    @property
    def address(self) -> Address:
        """Where it listens."""
        return addresses.local_address(self.sock)


@dataclass(frozen=True)
class Ways:
    """All ways in, what is read in them, and what signs for it (None: nothing has to be signed)."""

    listeners: Sequence[Listener]
    interception: Interception
    authority: Authority | None
    local: Sequence[str] = ()
    """Programs whose connections are captured."""

    @property
    def base_url(self) -> str:
        """The sidecar's URL for agents that take a base URL."""
        first = self.listeners[0]
        return f"{'https' if first.tls else 'http'}://{first.address}"

    def others(self) -> dict[str, Address]:
        """Return where the sidecar listens in other ways, by way."""
        return {listener.way: listener.address for listener in reversed(self.listeners[1:])}

    def report(self) -> dict[str, str]:
        """Return what a program has to know to use the ways."""
        found = {"base_url": self.base_url}
        found |= {way: str(address) for way, address in self.others().items()}
        if self.local:
            found["local"] = ",".join(self.local)
        if self.authority is not None:
            found["ca_bundle"] = str(self.authority.bundle)
            found["ca_certificate"] = str(self.authority.certificate)
        return found


class NoLoops:
    """mitmproxy addon that keeps the sidecar from connecting to itself under another name."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        own = [listener.address for listener in listeners]
        self._own = {(address.host, address.port) for address in own}
        self._ports = {address.port for address in own}

    async def server_connect(self, data: ServerConnectionHookData) -> None:
        """mitmproxy's hook: a connection is about to be opened."""
        if data.server.address is None or data.server.address[1] not in self._ports:
            return
        host, port = data.server.address[:2]
        with contextlib.suppress(OSError):
            found = await asyncio.get_running_loop().getaddrinfo(host, port)
            if any(place[:2] in self._own for *_, place in found):
                data.server.error = "this is the sidecar itself"


def open_listeners(config: SidecarConfig, origin: str, stack: ExitStack) -> list[Listener]:
    """Open the sockets of all ways that are switched on; ``stack`` closes them.

    ``origin``: scheme, host and port of the default upstream.

    Raises:
        UserError: an address is wrong or taken.
    """
    context = None
    if config.tls_certificate or config.tls_key:
        context = tls.server_context(config.tls_certificate, config.tls_key)
    guarded = context is not None and config.require_key
    listen = addresses.parse_loopback("sidecar.listen", config.listen, guarded=guarded)
    base_url = addresses.inherited_socket(guarded=guarded) or addresses.bind(
        "sidecar.listen", listen
    )
    listeners = [Listener("base_url", f"reverse:{origin}", stack.enter_context(base_url), context)]
    if config.proxy:
        address = addresses.parse_loopback("sidecar.proxy", config.proxy)
        sock = stack.enter_context(addresses.bind("sidecar.proxy", address))
        listeners.append(Listener("proxy", "regular", sock))
    if config.transparent:
        address = addresses.parse_loopback("sidecar.transparent", config.transparent)
        sock = stack.enter_context(addresses.bind("sidecar.transparent", address))
        listeners.append(Listener("transparent", "transparent", sock))
        # Redirected IPv6 connections arrive at the IPv6 loopback address, if there is one.
        other = Address("::1", addresses.local_address(sock).port)
        if address.host != other.host:
            with contextlib.suppress(UserError):
                sock = stack.enter_context(addresses.bind("sidecar.transparent", other))
                listeners.append(Listener("transparent", "transparent", sock))
    return listeners


def way_of(flow: http.HTTPFlow) -> Way:
    """Return the way in which a request came."""
    return _WAYS[flow.client_conn.proxy_mode.type_name]


def names_of(flow: http.HTTPFlow) -> Iterator[str]:
    """Yield what a request's destination is called: ``host:port`` by address, Host header, SNI."""
    request, port = flow.request, flow.request.port
    yield f"{request.host}:{port}"
    if request.host_header:
        named = request.host_header.replace("[", "").replace("]", "")
        host, _, last = request.host_header.rpartition(":")
        yield named if host and last.isdecimal() else f"{named}:{port}"
    if flow.client_conn.sni:
        yield f"{flow.client_conn.sni}:{port}"


class ProxyCredentials:
    """What agents said to the proxy about themselves, by connection.

    A client sends its proxy credentials with every plain request, but only once, with CONNECT, for
    all that follows inside a tunnel.
    """

    def __init__(self) -> None:
        self._tunnels: dict[str, str] = {}

    def connect(self, flow: http.HTTPFlow) -> None:
        """Take note of a CONNECT request."""
        value = flow.request.headers.get("proxy-authorization")
        if value is not None:
            self._tunnels[flow.client_conn.id] = value

    def forget(self, client: str) -> None:
        """Let go of a client connection that has ended."""
        self._tunnels.pop(client, None)

    def of(self, flow: http.HTTPFlow) -> str | None:
        """Return the proxy credentials of a request."""
        own = flow.request.headers.get("proxy-authorization")
        return own if own is not None else self._tunnels.get(flow.client_conn.id)

    def take(self, flow: http.HTTPFlow) -> str | None:
        """Return the proxy credentials of a request, and take from it what is for a proxy only."""
        headers = flow.request.headers
        if not any(name.decode("latin-1").lower() in _PROXY_HEADERS for name, _ in headers.fields):
            return self._tunnels.get(flow.client_conn.id)
        found = self.of(flow)
        for name in _PROXY_HEADERS:
            headers.pop(name, None)
        return found
