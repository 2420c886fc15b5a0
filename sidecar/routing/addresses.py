"""Where the sidecar listens and where it forwards to: parsing, and opening the listening socket."""

import ipaddress
import os
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from deploy.errors import UserError

_FIRST_INHERITED_FD = 3
BACKLOG = 1024
"""Connections that may wait to be accepted."""
_OR_GUARD = "; or set sidecar.tls_certificate, sidecar.tls_key and sidecar.require_key"


@dataclass(frozen=True)
class Address:
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True)
class Upstream:
    """The model server: ``scheme`` http or https; ``prefix`` is empty or ``/like/this``."""

    scheme: str
    address: Address
    prefix: str

    @property
    def origin(self) -> str:
        """``scheme://host:port``."""
        return f"{self.scheme}://{self.address}"

    @property
    def url(self) -> str:
        """The origin and the path prefix."""
        return self.origin + self.prefix


def parse_upstream(text: str, key: str = "sidecar.upstream") -> Upstream:
    """Parse ``http(s)://host[:port][/prefix]``; ``key`` is the configuration key to name.

    Raises:
        UserError: it is not such a URL.
    """
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise UserError(f"{key} {text!r} is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(
            f"{key} {text!r}: give the model server's URL, such as http://127.0.0.1:8000"
        )
    if parts.username is not None or parts.query or parts.fragment:
        raise UserError(
            f"{key} {parts.hostname}: leave out credentials, query and fragment; "
            "the agent's own credentials are passed on"
        )
    default = 443 if parts.scheme == "https" else 80
    address = Address(parts.hostname, default if port is None else port)
    return Upstream(parts.scheme, address, parts.path.rstrip("/"))


def parse_loopback(key: str, text: str, *, guarded: bool | None = None) -> Address:
    """Parse ``host:port`` of configuration key ``key``; the host must be a loopback address.

    Anyone who reaches the sidecar speaks to the model server in the agent's name and writes traces
    that are trained on, so other addresses are refused, unless they are ``guarded`` by TLS and run
    keys (None: can't be).

    Raises:
        UserError: it is not such an address.
    """
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None or parts.path:
        raise UserError(f"{key} {text!r}: give host and port, such as 127.0.0.1:8787")
    if not guarded and not _is_loopback(host):
        raise UserError(
            f"{key} {text!r} can be reached from other machines: use 127.0.0.1, and run the "
            "sidecar beside the agent" + ("" if guarded is None else _OR_GUARD)
        )
    return Address("127.0.0.1" if host == "localhost" else host, port)


def bind(key: str, address: Address) -> socket.socket:
    """Return a socket listening on ``address``.

    Raises:
        UserError: the port is taken or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY on what is accepted: without it the last
    # bytes of a reply, sent apart from the others, wait 40 ms for a delayed acknowledgement.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address.host, address.port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise UserError(
            f"{key} {address}: {os.strerror(error.errno or 0)}; end the program that uses the "
            "port or choose another"
        ) from None
    return sock


def inherited_socket(*, guarded: bool = False) -> socket.socket | None:
    """Return the listening socket a supervisor passed as descriptor 3, None if it passed none.

    The protocol is systemd's socket activation, sd_listen_fds(3): LISTEN_FDS counts descriptors,
    LISTEN_PID names the process they are for. A supervisor that can't know the pid before it starts
    the process leaves LISTEN_PID out. With such a socket connections wait while a sidecar that died
    is started again, instead of being refused.

    Raises:
        UserError: the descriptor is not a listening TCP socket on a loopback address, or on any
            address where ``guarded``.
    """
    count = os.environ.pop("LISTEN_FDS", "")
    pid = os.environ.pop("LISTEN_PID", "")
    if count in ("", "0") or pid not in ("", str(os.getpid())):
        return None
    try:
        sock = socket.socket(fileno=_FIRST_INHERITED_FD)
        listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        host = sock.getsockname()[0]
    except (OSError, IndexError):
        listening, host = 0, ""
    if not listening or not (guarded or _is_loopback(host)):
        raise UserError(
            "LISTEN_FDS is set but descriptor 3 is not a socket listening on 127.0.0.1: correct "
            "the socket unit, or unset LISTEN_FDS" + _OR_GUARD
        )
    sock.set_inheritable(False)
    return sock


def local_address(sock: socket.socket) -> Address:
    """Return the address a listening socket is bound to."""
    host, port, *_ = sock.getsockname()
    return Address(host, port)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
