"""Where a call comes from: who made it, what for, and as which attempt. Pure."""

from dataclasses import dataclass

from daemon import retries, runs, sidecalls
from daemon.protocols import read as protocols
from daemon.protocols.conversation import Said
from daemon.protocols.shape import ProtocolError
from daemon.retries import Attempt
from daemon.runs import Caller
from sidecar.traces.record import Exchange


@dataclass(frozen=True)
class Origin:
    """``side`` is None for a turn of an agent; ``tools`` is the number of tools on offer."""

    caller: Caller
    side: sidecalls.Kind | None
    tools: int
    attempt: Attempt


def said(exchange: Exchange) -> Said | None:
    """Return what an exchange said, None where request or reply can't be read."""
    try:
        return protocols.read(exchange)
    except ProtocolError:
        return None


def read(exchange: Exchange, heard: Said | None) -> Origin:
    """Return where an exchange comes from; ``heard`` is what ``said`` returns for it."""
    asked = exchange.request
    try:
        body = protocols.request_body(exchange)
        request = heard.request if heard else protocols.read_request(exchange)
    except ProtocolError:
        body, request = b"", None
    caller = runs.read_caller(exchange, body)
    return Origin(
        caller=caller,
        side=sidecalls.kind(asked.path, asked.headers, request),
        tools=len(request.tools) if request else 0,
        attempt=retries.attempt(
            exchange, retries.who(caller.session, caller.agent), request, heard
        ),
    )
