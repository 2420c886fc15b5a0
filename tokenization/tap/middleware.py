"""The HTTP side of the token tap: recognise a tapped call, put its lines into the reply.

Pure ASGI (https://asgi.readthedocs.io/en/latest/specs/www.html), because a request that does not
ask for the tap must pass through untouched, disconnects included.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

from tokenization.tap import wire
from tokenization.tap.calls import Call, Calls

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

current_call: ContextVar[Call | None] = ContextVar("ridealong_tap_call", default=None)
"""The tapped call whose handler is running; every task that the handler starts inherits it."""

_HEADER = wire.HEADER.encode("ascii")


class TapMiddleware:
    """Opens a ``Call`` for requests with the tap's header, answers through ``TappedReply``."""

    def __init__(self, app: App, calls: Calls, enabled: Callable[[], bool]) -> None:
        self._app = app
        self._calls = calls
        self._enabled = enabled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        nonce = _nonce(scope)
        if nonce is None or not self._enabled():
            await self._app(scope, receive, send)
            return
        call = self._calls.open(nonce)
        token = current_call.set(call)
        try:
            await self._app(scope, receive, TappedReply(call, send).send)
        finally:
            current_call.reset(token)
            self._calls.finish(call)


def _nonce(scope: Scope) -> str | None:
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    for name, value in scope["headers"]:
        if name == _HEADER:
            nonce = value.decode("latin-1")
            return nonce if wire.NONCE.fullmatch(nonce) else None
    return None


class TappedReply:
    """Add a call's tap lines to its reply (see ``tokenization.tap.wire``).

    A reply to a call that never reached the engine (an error, a model list) is left untouched.
    """

    def __init__(self, call: Call, send: Send) -> None:
        self._call = call
        self._send = send
        self._forward: Send = send
        self._at_line_start = True
        self._start: Message = {}
        self._body: list[bytes] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            if headers.get(b"content-type", b"").startswith(b"text/event-stream"):
                self._forward = self._event_stream
            elif self._call.tapped and b"content-length" in headers:
                self._forward = self._whole_body
                self._start = message
                return
            await self._send(message)
        elif message["type"] == "http.response.body":
            await self._forward(message)
        else:
            await self._send(message)

    async def _event_stream(self, message: Message) -> None:
        body = message.get("body", b"")
        lines = self._call.drain() if self._at_line_start else b""
        if body:
            self._at_line_start = body.endswith(b"\n")
        if self._at_line_start and not message.get("more_body", False):
            body += self._call.drain()
        await self._send({**message, "body": lines + body})

    async def _whole_body(self, message: Message) -> None:
        self._body.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        body, lines = b"".join(self._body), self._call.drain()
        length = b"%d" % (len(body) + len(lines))
        # In place: what is left when the sidecar has put the true length back is vLLM's own order.
        headers = [
            (name, length if name.lower() == b"content-length" else value)
            for name, value in self._start["headers"]
        ]
        headers.append((wire.LENGTH_HEADER.encode("ascii"), b"%d" % len(body)))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body + lines})
