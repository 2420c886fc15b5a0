"""Which hosts' traffic is read where the sidecar is a proxy. Pure.

Everything else passes as it is: connections with TLS and unknown protocols as bytes, under the
host's own certificate; plain HTTP requests to a proxy streamed and unrecorded.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import translate

from deploy.errors import UserError
from sidecar.config import Destination, InterceptConfig
from sidecar.routing.addresses import Address

_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^:/\s\[\]]+))(?::(?P<port>\d{1,5}))?")

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class _Entry:
    pattern: str
    """Regular expression over ``host:port``, an IPv6 host without brackets."""
    to: Destination


class Interception:
    """The hosts that are read, and where their requests go."""

    def __init__(
        self,
        entries: Iterable[InterceptConfig],
        upstreams: Iterable[Address],
        own: Iterable[Address],
    ) -> None:
        """``upstreams``: the model servers; ``own``: where the sidecar itself listens.

        A request to the sidecar itself, such as from an agent that was given a proxy's address as
        base URL, goes where it would go to ``sidecar.listen``; one to a model server likewise.

        Raises:
            UserError: a host can't be right.
        """
        always = [*own, *upstreams]
        self._entries = [
            *(_Entry(_exactly(name), "routes") for a in always for name in _names(a)),
            *(_Entry(_pattern(entry.host), entry.to) for entry in entries),
        ]

    def patterns(self) -> list[str]:
        """Return regular expressions over ``host:port`` that find what is read."""
        return [entry.pattern for entry in self._entries]

    def destination(self, names: Iterable[str]) -> Destination | None:
        """Return where a request goes that is addressed by any of ``names`` (``host:port``).

        None: it is not ours to read.
        """
        known = list(names)
        for entry in self._entries:
            if any(re.search(entry.pattern, name, re.IGNORECASE) for name in known):
                return entry.to
        return None


def _names(address: Address) -> list[str]:
    hosts = _LOOPBACK if address.host in _LOOPBACK else (address.host,)
    return [f"{host}:{address.port}" for host in hosts]


def _exactly(name: str) -> str:
    return f"^{re.escape(name)}$"


def _pattern(host: str) -> str:
    match = _HOST.fullmatch(host)
    if match is None:
        raise UserError(
            f"sidecar.intercept host {host!r}: give a host or host:port, such as api.openai.com"
        )
    name = match["v6"] or match["host"]
    glob = translate(name).removesuffix(r"\Z")
    # A name with a final dot is the same host.
    return f"^{glob}\\.?:{match['port'] or '[0-9]+'}$"
