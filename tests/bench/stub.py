"""The upstream of the benchmarks: answers in vLLM's shapes and sizes, at next to no cost.

    python -m tests.bench.stub PORT

What to answer stands in the request's ``user`` field (``order``), the one place that every proxy
passes on. Replies are made once and kept. A stream gets one event at once, then one with every step
of the engine, which serves all streams of the same pace back to back, as vLLM does. The id of an
event tells when it was sent (``sent_at``).

With the tap's header a reply holds the tap's lines, with ``return_token_ids`` in the body the ids
and logprobs that vLLM then adds.
"""

import asyncio
import json
import random
import re
import sys
import time
from functools import cache
from typing import Any, NamedTuple

from tokenization.tap import wire

_ORDER = re.compile(rb'"bench p(\d+) o(\d+) c(\d+) s(\d+)"')
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_NONCE = re.compile(rb"\r\n%s: *(\w+)" % wire.HEADER.encode(), re.IGNORECASE)
_SENT = re.compile(rb'"chatcmpl-(\d{32})"')
_HEAD = b"HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
_STREAM_HEAD = (
    _HEAD + b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
END = b"GET /end HTTP/1.1\r\n\r\n"
"""Ends all streams; answered with the number of events that they have sent."""
_NO_NONCE = "0" * 32  # As long as the sidecar's.


class Order(NamedTuple):
    """What a request asks of the stub: token counts of prompt and output, or of a stream the number
    of events (``chunks``) and the milliseconds from one to the next. A stream with a pace and no
    number goes on until ``END`` is asked for.
    """

    prompt: int
    output: int
    chunks: int = 0
    step_ms: int = 0

    def __str__(self) -> str:
        return "bench p{} o{} c{} s{}".format(*self)


def sent_at(data: bytes) -> list[int]:
    """Return when the events in ``data`` were sent, in nanoseconds of the monotonic clock."""
    return [int(digits) for digits in _SENT.findall(data)]


@cache
def words(tokens: int, seed: int = 0) -> str:
    """Return text of about ``tokens`` tokens, 4 characters each, that compresses as English does.

    The words of a vocabulary of 4,000 come in Zipf's frequencies.
    """
    rng = random.Random(seed)
    vocabulary = [
        "".join(rng.choices("etaoinshrdlu", k=rng.choice((1, 2, 3, 3, 4, 4, 5, 6, 8))))
        for _ in range(4000)
    ]
    weights = [1 / (rank + 1) for rank in range(len(vocabulary))]
    return " ".join(rng.choices(vocabulary, weights, k=tokens))[: tokens * 4].ljust(tokens * 4, ".")


@cache
def _ids(count: int) -> list[int]:
    rng = random.Random(count)
    return [rng.randrange(150_000) for _ in range(count)]


@cache
def _logprobs(count: int) -> list[float]:
    rng = random.Random(count)
    return [-rng.random() for _ in range(count)]


def _events(order: Order, output: int) -> bytes:
    """Return the tap's lines of a reply that is not streamed."""
    prompt = {"e": "prompt", "r": 0, "id": "chatcmpl-1", "ids": _ids(order.prompt), "params": {}}
    tokens = {"e": "tok", "r": 0, "i": 0, "ids": _ids(output), "lp": _logprobs(output), "v": "v12"}
    end = {"e": "end", "r": 0, "i": 0, "n": output, "finish": "stop", "cached": 16}
    return b"".join(wire.line(_NO_NONCE, event) for event in (prompt, tokens, end))


@cache
def _reply(order: Order, tapped: bool, with_ids: bool) -> bytes:
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": words(order.output, seed=1)},
        "logprobs": _logprobs_field(_logprobs(order.output)) if with_ids else None,
        "finish_reason": "stop",
        "token_ids": _ids(order.output) if with_ids else None,
    }
    body: dict[str, Any] = {
        "id": "chatcmpl-8f14e45fceea467f8f14e45fceea467f",
        "object": "chat.completion",
        "created": 1790000000,
        "model": "m",
        "choices": [choice],
        "usage": {"prompt_tokens": order.prompt, "completion_tokens": order.output},
        "prompt_token_ids": _ids(order.prompt) if with_ids else None,
    }
    text = json.dumps(body, separators=(",", ":")).encode()
    lines = _events(order, order.output) if tapped else b""
    head = _HEAD + b"content-type: application/json\r\ncontent-length: %d\r\n" % (
        len(text) + len(lines)
    )
    if tapped:
        head += b"%s: %d\r\n" % (wire.LENGTH_HEADER.encode(), len(text))
    return head + b"\r\n" + text + lines


def _logprobs_field(logprobs: list[float]) -> dict[str, Any]:
    return {
        "content": [
            {"token": "word", "logprob": p, "bytes": [119, 111, 114, 100], "top_logprobs": []}
            for p in logprobs
        ]
    }


@cache
def _event(with_ids: bool, prompt: int | None = None) -> tuple[bytes, bytes]:
    """Return what stands before and after the time of sending in an event of a stream, the first
    one if it has a ``prompt``.
    """
    event: dict[str, Any] = {
        "id": "chatcmpl-@",
        "object": "chat.completion.chunk",
        "created": 1790000000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "delta": {"content": " token"},
                "logprobs": _logprobs_field([-0.1234567]) if with_ids else None,
                "finish_reason": None,
                "token_ids": [12345] if with_ids else None,
            }
        ],
    }
    if prompt is not None:
        event["prompt_token_ids"] = _ids(prompt) if with_ids else None
    before, _, after = json.dumps(event, separators=(",", ":")).encode().partition(b"@")
    return b"data: " + before, after + b"\n\n"


@cache
def _first_lines(prompt: int) -> bytes:
    event = {"e": "prompt", "r": 0, "id": "chatcmpl-1", "ids": _ids(prompt), "params": {}}
    return wire.line(_NO_NONCE, event)


_TOKEN_LINE = wire.line(
    _NO_NONCE, {"e": "tok", "r": 0, "i": 0, "ids": [12345], "lp": [-0.1234567], "v": "v12"}
)


def _end_line(count: int) -> bytes:
    return wire.line(_NO_NONCE, {"e": "end", "r": 0, "i": 0, "n": count, "finish": "stop"})


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class _Stream:
    def __init__(
        self, transport: asyncio.Transport, order: Order, nonce: bytes | None, with_ids: bool
    ) -> None:
        self._transport = transport
        self._order = order
        self._nonce = nonce
        self.sent = 0
        self._with_ids = with_ids
        self._token = self._marked(_TOKEN_LINE)

    def step(self) -> bool:
        """Send an event; False if it was the last, or nobody listens any more."""
        if self._transport.is_closing():
            return False
        lines, prompt = self._token, None
        if not self.sent:
            prompt = self._order.prompt
            lines = self._marked(_first_lines(prompt)) + lines
        self.sent += 1
        before, after = _event(self._with_ids, prompt)
        sent = b"%032d" % time.monotonic_ns()
        self._transport.write(_chunk(lines + before + sent + after))
        if self.sent != self._order.chunks:
            return True
        self.end()
        return False

    def end(self) -> None:
        """Send the end."""
        end = b"data: [DONE]\n\n" + self._marked(_end_line(self.sent))
        self._transport.write(_chunk(end) + b"0\r\n\r\n")

    def _marked(self, line: bytes) -> bytes:
        return line.replace(_NO_NONCE.encode(), self._nonce) if self._nonce else b""


class _Engine:
    """Steps all streams of one pace together."""

    def __init__(self) -> None:
        self._streams: dict[int, list[_Stream]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, stream: _Stream, step_ms: int) -> None:
        more = stream.step()
        if not step_ms:
            while more:
                more = stream.step()
        elif not more:
            return
        elif step_ms in self._streams:
            self._streams[step_ms].append(stream)
        else:
            self._streams[step_ms] = [stream]
            task = asyncio.create_task(self._run(step_ms))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def end(self) -> int:
        """End all streams; return how many events they have sent."""
        ended = [stream for streams in self._streams.values() for stream in streams]
        for streams in self._streams.values():
            streams.clear()
        for stream in ended:
            stream.end()
        return sum(stream.sent for stream in ended)

    async def _run(self, step_ms: int) -> None:
        due = time.monotonic()
        while self._streams[step_ms]:
            due = max(due + step_ms / 1e3, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            streams, self._streams[step_ms] = self._streams[step_ms], []
            self._streams[step_ms] += [stream for stream in streams if stream.step()]
        del self._streams[step_ms]


class _Connection(asyncio.Protocol):
    """HTTP/1.1 with bodies of known length; all that the proxies send."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._data = bytearray()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._data[:end])
            length = _LENGTH.search(head)
            size = end + 4 + (int(length[1]) if length else 0)
            if len(self._data) < size:
                return
            body = bytes(self._data[end + 4 : size])
            del self._data[:size]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        found = _ORDER.search(body, 0, 200)
        if found is None:
            # The sidecar asks whether there is a tap.
            text = b"%d" % self._engine.end() if END.startswith(head) else b'{"tap":1}'
            self._transport.write(
                _HEAD
                + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text)
                + text
            )
            return
        order = Order(*map(int, found.groups()))
        asked = _NONCE.search(head)
        nonce = asked[1] if asked else None
        with_ids = b'"return_token_ids"' in body
        if order.chunks or order.step_ms:
            self._transport.write(_STREAM_HEAD)
            self._engine.add(_Stream(self._transport, order, nonce, with_ids), order.step_ms)
            return
        reply = _reply(order, nonce is not None, with_ids)
        self._transport.write(reply.replace(_NO_NONCE.encode(), nonce) if nonce else reply)


async def serve(port: int) -> None:
    """Serve for ever on the loopback address."""
    engine = _Engine()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(engine), "127.0.0.1", port, backlog=1024)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
