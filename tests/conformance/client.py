"""A client that sends what a script says, byte by byte if need be, and keeps every byte it gets."""

import asyncio
import contextlib
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Literal

from tests.conformance.http1 import Message, Reader
from tests.conformance.script import CASE_HEADER, Ask, Case, Leave
from tests.conformance.upstream import Run

End = Literal["open", "left", "fin", "rst", "refused", "timeout"]

_RESET = struct.pack("ii", 1, 0)
_SETTLE_SECONDS = 0.03


@dataclass
class Received:
    """All that a client got on one connection."""

    messages: list[Message] = field(default_factory=list)
    stray: bytes = b""
    """Bytes that are no part of a message: half a head, or what follows the last reply."""
    end: End = "open"
    """How the connection ended; ``open``: everything came and it did not; ``left``: we ended it."""
    left_at: float | None = None


def head(ask: Ask, case: Case, port: int, through: bool) -> bytes:
    """Return the head of a request."""
    target = ask.target
    if through and ask.run is not None:
        target = f"/r/{ask.run}{target}"
    lines = [f"{ask.method} {target} {ask.version}"]
    names = [name.lower() for name, _ in ask.headers]
    if "host" not in names:
        lines.append(f"Host: 127.0.0.1:{port}")
    lines += [f"{name}: {value}" for name, value in ask.headers]
    lines.append(f"{CASE_HEADER}: {case.id}")
    if ask.expects:
        lines.append("Expect: 100-continue")
    if ask.body is not None:
        if ask.framing == "length":
            lines.append(f"Content-Length: {len(ask.body)}")
        else:
            lines.append("Transfer-Encoding: chunked")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


async def execute(run: Run, port: int, through: bool) -> Received:
    """Run a case's client against a port of 127.0.0.1."""
    received = Received()
    try:
        async with asyncio.timeout(run.case.patience):
            client = await _Client.connect(run, port, received)
            await client.converse(port, through)
    except ConnectionRefusedError:
        received.end = "refused"
    except TimeoutError:
        received.end = "timeout"
    return received


class _Client(asyncio.Protocol):
    def __init__(self, run: Run, received: Received) -> None:
        self._run = run
        self._received = received
        asks = run.case.asks
        self._reader = Reader(
            lambda number, head: (
                asks[min(number, len(asks) - 1)].headless or head.split(b" ")[1] in (b"204", b"304")
            )
        )
        received.messages = self._reader.messages
        self._news = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._closed = False

    @classmethod
    async def connect(cls, run: Run, port: int, received: Received) -> "_Client":
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: cls(run, received), "127.0.0.1", port)
        return client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._received.end == "left":
            return
        self._reader.feed(data)
        messages = [message for message in self._reader.messages if not message.interim]
        self._run.client_has_head = len(messages)
        self._run.client_body = sum(len(message.body) for message in messages)
        self._news.set()

    def eof_received(self) -> bool:
        if self._received.end == "open":
            self._received.end = "fin"
            self._reader.end()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        if self._received.end == "open":
            self._received.end = "rst" if error is not None else "fin"
        self._closed = True
        self._news.set()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def converse(self, port: int, through: bool) -> None:
        """Send the requests and receive the replies."""
        case = self._run.case
        try:
            for number, ask in enumerate(case.asks):
                await self._send(ask, head(ask, case, port, through))
                if ask.leave is not None:
                    await self._leave(ask, ask.leave)
                    return
                if not case.pipelined:
                    await self._reply(number + 1)
            await self._reply(len(case.asks))
            # What comes after the end of the last reply.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_SECONDS):
                    while not self._closed:
                        await self._wait()
        finally:
            if self._received.end != "left":
                self._transport.close()
            self._received.stray = self._reader.rest
            if self._closed or not case.leaves:
                await asyncio.sleep(0)

    async def _send(self, ask: Ask, head: bytes) -> None:
        body = ask.body or b""
        if ask.leave is not None and ask.leave.when == "half asked":
            body = body[: len(body) // 2]
        if ask.grain == "bytes":
            data = head + self._framed(ask, body)
            for k in range(len(data)):
                await self._write(data[k : k + 1])
                await asyncio.sleep(0)
            return
        if ask.expects:
            await self._write(head)
            while not self._reader.messages and not self._closed:
                await self._wait()
        else:
            body_start = b"" if ask.framing == "length" else None
            await self._write(head + (body if body_start is not None else b""))
            if body_start is not None:
                return
        size = max(1, -(-len(body) // 5)) if ask.grain == "pieces" else max(1, len(body))
        for k in range(0, len(body), size):
            await self._write(self._chunk(ask, body[k : k + size]))
            await asyncio.sleep(0.002)
        if ask.framing == "chunked" and ask.leave is None:
            await self._write(b"0\r\n\r\n")

    @staticmethod
    def _chunk(ask: Ask, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if ask.framing == "chunked" else data

    def _framed(self, ask: Ask, body: bytes) -> bytes:
        if ask.framing == "chunked" and ask.body is not None:
            return self._chunk(ask, body) + b"0\r\n\r\n"
        return body

    async def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)
        await self._writable.wait()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    async def _reply(self, count: int) -> None:
        """Wait for so many complete replies, or the end of the connection."""
        while self._reader.complete < count and not self._closed:
            await self._wait()

    async def _leave(self, ask: Ask, leave: Leave) -> None:
        run = self._run
        if leave.when == "half asked":
            await run.until("arrived_body", len(ask.body or b"") // 2)
        elif leave.when == "asked":
            await run.until("whole_arrivals", 1)
        elif leave.when == "head":
            await run.until("client_has_head", 1)
        else:
            reply = run.case.replies[0]
            want = sum(len(piece) for piece in reply.pieces)
            if reply.stop == "in the body":
                pieces = reply.pieces[: len(reply.pieces) // 2]
                want = sum(map(len, pieces)) if reply.framing == "chunked" else want // 2
            await run.until("client_body", want)
        self._received.left_at = time.monotonic()
        if leave.how == "half-close":
            self._transport.write_eof()
            while not self._closed:
                await self._wait()
            return
        self._received.end = "left"
        if leave.how == "rst":
            sock: socket.socket = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._transport.abort()
        else:
            self._transport.close()
