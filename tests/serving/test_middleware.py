"""Where the tap's lines go in a reply, whatever the pieces it comes in."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.tapped import cut
from tokenization.tap import wire
from tokenization.tap.calls import Call, Calls, Output
from tokenization.tap.middleware import Message, Receive, Scope, Send, TapMiddleware, current_call

NONCE = "0123456789abcdef"
EVENTS = b'data: {"a":1}\n\nevent: x\ndata: {"b":2}\n\ndata: [DONE]\n\n'


class App:
    """An ASGI application that samples one token before each piece of its reply."""

    def __init__(self, content_type: bytes, pieces: list[bytes], engine: bool = True) -> None:
        self.content_type = content_type
        self.pieces = pieces
        self.engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call.get()
        output: Output | None = None
        if call is not None and self.engine:
            output = call.output("a", 0, "id", [1], {})
        headers = [(b"content-type", self.content_type), (b"content-length", b"99"), (b"x", b"y")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for token, piece in enumerate(self.pieces):
            if output is not None:
                output.tokens([token], [-1.0], "v0")
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if output is not None:
            output.end("stop", output.count)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def ask(
    app: Any, header: bytes | None = NONCE.encode(), on: bool = True, method: str = "POST"
) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("the middleware must not read the request")

    headers = [(b"host", b"h")] + ([(wire.HEADER.encode(), header)] if header else [])
    scope = {"type": "http", "method": method, "path": "/", "headers": headers}
    await TapMiddleware(app, Calls(), lambda: on)(scope, receive, send)
    assert current_call.get() is None
    return sent


def body(messages: list[Message]) -> bytes:
    return b"".join(m.get("body", b"") for m in messages)


@given(st.lists(st.integers(0, len(EVENTS)), max_size=12))
async def test_event_stream_in_any_pieces(cuts: list[int]) -> None:
    edges = sorted({0, len(EVENTS), *cuts})
    pieces = [EVENTS[a:b] for a, b in pairwise(edges)]
    messages = await ask(App(b"text/event-stream; charset=utf-8", pieces))
    assert (b"content-length", b"99") in messages[0]["headers"]
    clean, lines = cut(body(messages), NONCE)
    assert clean == EVENTS
    (request,) = wire.decode(lines)
    assert request.outputs[0].ids == list(range(len(pieces)))
    assert request.outputs[0].finish == "stop"


async def test_event_stream_is_passed_on_piece_by_piece() -> None:
    messages = await ask(App(b"text/event-stream", [b"data: 1\n\n", b"data: 2\n\n"]))
    assert [m["type"] for m in messages] == ["http.response.start"] + ["http.response.body"] * 3
    assert messages[1]["body"].endswith(b"data: 1\n\n")
    assert messages[2]["body"].endswith(b"data: 2\n\n")


async def test_whole_reply_has_its_lines_after_the_body() -> None:
    messages = await ask(App(b"application/json", [b'{"a":', b"1}"]))
    headers = dict(messages[0]["headers"])
    content = body(messages)
    length = int(headers[wire.LENGTH_HEADER.encode()])
    assert int(headers[b"content-length"]) == len(content)
    assert headers[b"x"] == b"y"
    assert content[:length] == b'{"a":1}'
    rest, lines = cut(content[length:], NONCE)
    assert rest == b""
    assert wire.decode(lines)[0].outputs[0].ids == [0, 1]


@pytest.mark.parametrize(
    ("header", "on", "engine", "method"),
    [
        (None, True, True, "POST"),
        (b"bad nonce!", True, True, "POST"),
        (NONCE.encode(), False, True, "POST"),
        (NONCE.encode(), True, False, "POST"),
        (NONCE.encode(), True, True, "GET"),
    ],
    ids=["no header", "bad nonce", "tap off", "no engine request", "not a post"],
)
async def test_untouched(header: bytes | None, on: bool, engine: bool, method: str) -> None:
    app = App(b"application/json", [b"{}"], engine)
    plain: list[Message] = []

    async def send(message: Message) -> None:
        plain.append(message)

    async def receive() -> Message:
        return {}

    await app({"type": "http", "headers": []}, receive, send)
    assert await ask(app, header, on, method) == plain


async def test_a_failing_application_fails_as_before() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        await ask(app)


async def test_websockets_pass() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    async def nothing(*_: Any) -> Any:
        return {}

    await TapMiddleware(app, Calls(), lambda: True)({"type": "lifespan"}, nothing, nothing)
    assert seen == ["lifespan"]


def test_call_is_kept_for_the_pull() -> None:
    calls = Calls()
    call = calls.open(NONCE)
    assert isinstance(call, Call)
    calls.finish(call)
    assert calls.get(NONCE) is call
