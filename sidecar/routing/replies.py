"""What of an upstream's reply mitmproxy's HTTP/1 client can't read: interim replies and trailers.

It takes a 1xx reply for the reply itself, and fails on trailers. In both cases the agent would wait
for ever.
"""

import re
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer
from mitmproxy.proxy import commands, events, layer
from mitmproxy.proxy.layers import http as http_layer
from mitmproxy.proxy.layers.http._http1 import Http1Client

# All 1xx but 101, which ends the exchange (RFC 9110 §15.2).
_INTERIM = re.compile(rb"HTTP/1\.[01] 1(?!01)[0-9]{2}[^\n]*\n(?:[^\r\n][^\n]*\n)*\r?\n")


def install() -> None:
    """Let mitmproxy use ``Client`` for every upstream."""
    http_layer.Http1Client = Client  # type: ignore[misc]


class Client(Http1Client):
    """mitmproxy's HTTP/1 client; passes interim replies on and drops trailers (RFC 9110 §6.5.1)."""

    def read_headers(self, event: events.ConnectionEvent) -> layer.CommandGenerator[None]:
        while self.request is not None and (interim := _INTERIM.match(bytes(self.buf))):
            self.buf.maybe_extract_at_most(interim.end())
            if self.request.http_version == "HTTP/1.1":
                yield commands.SendData(self.context.client, interim[0])
        yield from super().read_headers(event)

    def read_body(self, event: events.Event) -> layer.CommandGenerator[None]:
        if type(self.body_reader) is not _Body:
            self.body_reader = _Body(self.body_reader)  # type: ignore[assignment]
        return super().read_body(event)


class _Body:
    """A body's reader that drops trailers."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def __call__(self, buffer: ReceiveBuffer) -> Any:
        event = self._reader(buffer)
        return h11.EndOfMessage() if type(event) is h11.EndOfMessage else event

    def read_eof(self) -> Any:
        return self._reader.read_eof()
