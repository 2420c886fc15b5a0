"""A recorded exchange → what it said, whichever protocol it speaks."""

from typing import Any, Protocol

import msgspec

from daemon.protocols import chat, completions, messages, parts, responses, shape
from daemon.protocols.conversation import Request, Said, ServerError
from daemon.protocols.shape import ProtocolError
from sidecar.bodies import coding
from sidecar.traces.record import Body, Exchange, Response

_FIRST_ERROR = 400


class _Reader(Protocol):
    """What each protocol's module offers."""

    def parse(self, request: bytes, response: bytes | None, *, event_stream: bool) -> Said: ...

    def read_request(self, value: Any) -> Request: ...


_READERS: dict[str, _Reader] = {
    "chat": chat,
    "completions": completions,
    "responses": responses,
    "messages": messages,
}


def read(exchange: Exchange) -> Said:
    """Read an exchange of any model route; a reply with an error status gives only the error.

    Raises:
        ProtocolError: it is no model call, or a body is not of the protocol that its path names.
            A stream that broke off gives what came of it.
    """
    reader = _reader(exchange)
    response = exchange.response
    asked = request_body(exchange)
    if response is None:
        return reader.parse(asked, None, event_stream=False)
    if response.status >= _FIRST_ERROR:
        said = reader.parse(asked, None, event_stream=False)
        return msgspec.structs.replace(said, error=_error(response))
    headers = {name.lower(): value for name, value in response.headers}
    event_stream = headers.get("content-type", "").lower().startswith("text/event-stream")
    if not event_stream and exchange.outcome != "complete":
        return reader.parse(asked, None, event_stream=False)  # Half a document says nothing.
    raw = _raw(response.body, response.headers)
    return reader.parse(asked, raw, event_stream=event_stream)


def read_request(exchange: Exchange) -> Request:
    """Read only the request.

    Raises:
        ProtocolError: as ``read``.
    """
    return _reader(exchange).read_request(shape.decode(request_body(exchange)))


def request_body(exchange: Exchange) -> bytes:
    """Return the request's body without its content codings.

    Raises:
        ProtocolError: a coding is not known, or the body is damaged or too large.
    """
    return _raw(exchange.request.body, exchange.request.headers) or b""


def _reader(exchange: Exchange) -> _Reader:
    reader = _READERS.get(exchange.route)
    if reader is None:
        raise ProtocolError(f"the route {exchange.route!r} is no model call")
    return reader


def _raw(body: Body | None, headers: list[tuple[str, str]]) -> bytes | None:
    """A body without its content codings; of one that was cut off, what it holds."""
    if body is None:
        return None
    codings = ",".join(value for name, value in headers if name.lower() == "content-encoding")
    try:
        return coding.decode(body.raw(), codings, cut=True)
    except ValueError as error:
        raise ProtocolError(f"the body can't be read: {error}") from error


def _error(response: Response) -> ServerError:
    """The error of a reply: its own words, be they JSON or what a gateway wrote."""
    status = f"HTTP {response.status}"
    try:
        raw = _raw(response.body, response.headers) or b""
    except ProtocolError:
        return ServerError(status)
    try:
        found = parts.server_error(shape.decode(raw))
    except ProtocolError:
        found = None
    words = raw.decode("utf-8", "replace").strip()[: parts.LONGEST_ERROR]
    return found or ServerError(words or status)
