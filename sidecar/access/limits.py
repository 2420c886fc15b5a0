"""What the sidecar accepts as a request: bounded, and readable in one way only.

mitmproxy's HTTP/1 server takes heads of any size, and forms that two servers may read as two
different messages (RFC 9112 §11.2). ``Guard`` puts a stricter one in its place, in every way in,
TLS inside CONNECT included. Refused requests get an ordinary HTTP reply; nothing of them goes
upstream that an upstream could take for a whole request.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer
from mitmproxy import http
from mitmproxy.net.http import http1
from mitmproxy.proxy import commands, context, events, layer
from mitmproxy.proxy.layers.http import (
    ErrorCode,
    HttpLayer,
    ReceiveHttp,
)
from mitmproxy.proxy.layers.http._events import (
    RequestData,
    RequestProtocolError,
    ResponseData,
    ResponseEndOfMessage,
    ResponseHeaders,
    ResponseProtocolError,
)
from mitmproxy.proxy.layers.http._http1 import Http1Server

from sidecar.access.refusal import Refusal

# A client that still sends when it is refused would see its connection reset and miss the reply:
# what it sends is thrown away for so many seconds.
_LINGER_SECONDS = 2.0
# What one read of mitmproxy brings.
_READ_BYTES = 65_536
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_VERSIONS = ("HTTP/1.0", "HTTP/1.1")
_BODILESS = (204, 304)


@dataclass(frozen=True)
class RequestLimits:
    """Bounds of one request."""

    head_bytes: int
    """Request line and header fields; also trailers, and the line before a chunk."""
    head_fields: int
    """Number of header fields."""
    body_bytes: int


class Guard:
    """Addon; goes after mitmproxy's ``NextLayer``."""

    def __init__(self, limits: RequestLimits, refused: Callable[[int], None]) -> None:
        """``refused`` is told the status of every refusal."""
        self.limits = limits
        self._refused = refused

    def next_layer(self, choice: layer.NextLayer) -> None:
        """mitmproxy's hook: a layer has been chosen, and not been started."""
        for chosen in http_layers(choice):
            client = chosen.context.client
            # Its own is only made where there is none yet.
            chosen.connections.setdefault(
                client, _Server(chosen.context.fork(), self.limits, self._refused)
            )


def http_layers(choice: layer.NextLayer) -> Iterator[HttpLayer]:
    """Yield what of a chosen layer and those inside it speaks HTTP with the client."""
    chosen: Any = choice.layer
    while chosen is not None:
        if isinstance(chosen, HttpLayer):
            yield chosen
        chosen = getattr(chosen, "child_layer", None)


def discard_body(request: http.Request) -> None:
    """Let the rest of a request's body come and go; for requests that get a reply of ours."""
    request.discarded = True  # type: ignore[attr-defined]


class _Refused(Exception):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class _Buffer(ReceiveBuffer):
    """What has come and not been read. Raises ``_Refused`` out of the reading."""

    def __init__(self, limits: RequestLimits) -> None:
        super().__init__()
        self._limits = limits

    def skip_blank_lines(self) -> None:
        """Drop empty lines in front of a request (RFC 9112 §2.2)."""
        blank = re.match(rb"(?:\r?\n)+", bytes(self)) if self._data[:1] in (b"\r", b"\n") else None
        if blank:
            self.maybe_extract_at_most(blank.end())

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Extract a head, or trailers."""
        before = len(self)
        lines = super().maybe_extract_lines()
        size = before if lines is None else before - len(self)
        if size > self._limits.head_bytes:
            raise _Refused(_head_too_large(f"{self._limits.head_bytes} bytes", "max_header_kib"))
        if lines and len(lines) - 1 > self._limits.head_fields:
            raise _Refused(
                _head_too_large(f"{self._limits.head_fields} fields", "max_header_fields")
            )
        for line in lines or []:
            if line[:1] in (b" ", b"\t"):
                raise _Refused(_bad_request("a header line is folded or begins with a blank"))
            if _CONTROL.search(line):
                raise _Refused(_bad_request("a control character in the header"))
        return lines

    def maybe_extract_next_line(self) -> bytearray | None:
        """Extract the line before a chunk."""
        line = super().maybe_extract_next_line()
        if (len(self) if line is None else len(line)) > self._limits.head_bytes:
            raise _Refused(_bad_request("the line before a chunk is too long"))
        return line


class _Body:
    """A body's reader that counts what it reads, and drops trailers."""

    def __init__(self, reader: Any, limit: int) -> None:
        self._reader = reader
        self._left = limit
        self._limit = limit

    def __call__(self, buffer: ReceiveBuffer) -> Any:
        event = self._reader(buffer)
        if isinstance(event, h11.Data):
            self._left -= len(event.data)
            if self._left < 0:
                raise _Refused(_body_too_large(self._limit))
        elif isinstance(event, h11.EndOfMessage):
            # mitmproxy fails on trailers; RFC 9110 §6.5.1 lets them be dropped.
            return h11.EndOfMessage()
        return event

    def read_eof(self) -> Any:
        return self._reader.read_eof()


class _Server(Http1Server):
    """mitmproxy's HTTP/1 server towards the client, with limits."""

    def __init__(
        self, place: context.Context, limits: RequestLimits, refused: Callable[[int], None]
    ) -> None:
        super().__init__(place)
        self.buf: _Buffer = _Buffer(limits)
        self._limits = limits
        self._report = refused
        self._chunked = False

    def read_headers(self, event: events.ConnectionEvent) -> layer.CommandGenerator[None]:
        self.buf.skip_blank_lines()
        try:
            for command in super().read_headers(event):
                # Once the head is read, commands of other states come through here too.
                if self.state == self.read_headers:
                    if isinstance(command, ReceiveHttp):
                        self._check()
                    elif isinstance(command, commands.SendData):
                        # An error page of mitmproxy's, which closes the connection then.
                        raise _Refused(_bad_request("it can't be read"))
                yield command
        except _Refused as refused:
            yield from self._refuse(refused.refusal)

    def read_body(self, event: events.Event) -> layer.CommandGenerator[None]:
        if not isinstance(self.body_reader, _Body):
            self.body_reader = _Body(self.body_reader, self._limits.body_bytes)  # type: ignore[assignment]
        refusal = _bad_request("its body can't be read")
        try:
            for command in super().read_body(event):
                if (
                    isinstance(command, commands.CloseConnection)
                    and self.state == self.read_body
                    and self.response is None
                ):
                    break
                if (
                    isinstance(command, ReceiveHttp)
                    and isinstance(command.event, RequestData)
                    and getattr(self.request, "discarded", False)
                ):
                    continue
                yield command
            else:
                return
        except _Refused as refused:
            refusal = refused.refusal
        if isinstance(event, events.ConnectionClosed):
            yield commands.CloseConnection(self.conn)
            self.state = self.done
        else:
            yield from self._refuse(refusal)
        yield ReceiveHttp(
            RequestProtocolError(self.stream_id, refusal.message, ErrorCode.GENERIC_CLIENT_ERROR)
        )

    def wait(self, event: events.Event) -> layer.CommandGenerator[None]:
        most = self._limits.head_bytes + _READ_BYTES
        if isinstance(event, events.DataReceived) and len(self.buf) > most:
            # A further request waits for the end of this reply, and may not pile up meanwhile.
            yield commands.CloseConnection(self.conn)
            event = events.ConnectionClosed(self.conn)
        yield from super().wait(event)

    def send(self, event: Any) -> layer.CommandGenerator[None]:
        if self.state in (self._linger, self.done):
            return  # The reply to a refused request has been sent.
        if isinstance(event, ResponseData):
            # As mitmproxy's own, which looks through the reply's header for every piece.
            data = event.data
            if self._chunked:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            if data:
                yield commands.SendData(self.conn, data)
            return
        if isinstance(event, ResponseHeaders):
            fields = event.response.headers
            self._chunked = "chunked" in fields.get("transfer-encoding", "").lower()
        if (
            isinstance(event, ResponseProtocolError)
            and event.code is ErrorCode.REQUEST_VALIDATION_FAILED
            and self.response is None
        ):
            yield from self._refuse(_bad_request("its header is ambiguous or not valid"))
        elif (
            isinstance(event, ResponseProtocolError)
            and event.code is ErrorCode.RESPONSE_VALIDATION_FAILED
        ):
            # mitmproxy would answer with an error page of its own in the upstream's name.
            yield commands.CloseConnection(self.conn)
        else:
            for command in super().send(event):
                if (
                    isinstance(event, ResponseEndOfMessage)
                    and isinstance(command, commands.SendData)
                    and self.response is not None
                    and self.response.status_code in _BODILESS
                ):
                    continue  # The last chunk of a body that such a reply has not got.
                yield command

    def _check(self) -> None:
        """Look at a head that mitmproxy could read, before anyone else does."""
        assert self.request is not None
        if self.request.http_version not in _VERSIONS:
            # mitmproxy would frame the body as of another protocol.
            raise _Refused(_bad_request("its HTTP version is neither 1.0 nor 1.1"))
        try:
            size = http1.expected_http_body_size(self.request)
        except ValueError:
            return
        if size is not None and size > self._limits.body_bytes:
            raise _Refused(_body_too_large(self._limits.body_bytes))

    def _refuse(self, refusal: Refusal) -> layer.CommandGenerator[None]:
        """Reply, unless a reply has begun, and close so that the client can read it."""
        self._report(refusal.status)
        begun, self.state = self.response is not None, self._linger
        if not begun:
            yield commands.SendData(self.conn, refusal.raw())
        yield commands.CloseTcpConnection(self.conn, half_close=True)
        yield commands.RequestWakeup(_LINGER_SECONDS)

    def _linger(self, event: events.Event) -> layer.CommandGenerator[None]:
        if isinstance(event, events.DataReceived):
            self.buf = _Buffer(self._limits)
        else:
            self.state = self.done
            yield commands.CloseConnection(self.conn)


def _bad_request(reason: str) -> Refusal:
    return Refusal(400, f"the request is refused: {reason}")


def _head_too_large(limit: str, key: str) -> Refusal:
    return Refusal(431, f"the request's header is larger than {limit}: see sidecar.{key}")


def _body_too_large(limit: int) -> Refusal:
    return Refusal(
        413,
        f"the request's body is larger than {limit} bytes: see sidecar.max_body_mib",
        "request_too_large",
    )
