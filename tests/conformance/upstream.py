"""A server shaped like vLLM 0.30 that controls every byte, FIN and RST, and keeps what it got.

It answers by the script of the case that a request names (``script.CASE_HEADER``), tells the token
tap's lines to whoever asks for them (as ``tokenization.tap.middleware`` does), and serves the tap's
two endpoints. It runs in the event loop of the clients, so that a fault can wait until the client
has received what was sent before it: a RST discards what is still on its way.
"""

import asyncio
import dataclasses
import random
import re
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.conformance.bodies import Protocol, with_tokens
from tests.conformance.http1 import Message, Reader
from tests.conformance.script import CASE_HEADER, Case, Reply
from tokenization.tap import wire

SERVER = (("date", "Mon, 30 Nov 2026 12:00:00 GMT"), ("server", "uvicorn"))
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER with a time of 0: closing sends RST.
_SYNC_SECONDS = 5.0
_HELD_BACK_SECONDS = 0.3
_CASE = CASE_HEADER.encode()


@dataclass
class Arrival:
    """One request as the upstream got it."""

    message: Message
    finished: bool = False
    """Its reply has been sent to the end."""
    left_at: float | None = None
    """Monotonic seconds at which the client was seen to be gone before that."""
    tap: list[str] = field(default_factory=list)
    """The tap's lines that were told or can be fetched."""
    nonce: str | None = None


@dataclass
class Run:
    """One execution of a case, by one way; what both of its ends know of each other."""

    case: Case
    way: str
    arrivals: list[Arrival] = field(default_factory=list)
    client_has_head: int = 0
    """Replies of which the client has the head."""
    client_body: int = 0
    """Bytes of reply bodies that the client has."""

    async def until(self, condition: str, count: int) -> None:
        """Wait until an attribute has reached ``count``, but not for ever: it may be held back."""
        seconds = _HELD_BACK_SECONDS if self._held_back else _SYNC_SECONDS
        deadline = time.monotonic() + seconds
        while getattr(self, condition) < count:
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(0.002)

    @property
    def _held_back(self) -> bool:
        """A sidecar that asks for tokens by the API passes on requests and replies as a whole."""
        partial = any(ask.leave and ask.leave.when == "half asked" for ask in self.case.asks)
        return self.way == "api" and (partial or not self.case.stream)

    @property
    def whole_arrivals(self) -> int:
        return sum(arrival.message.complete for arrival in self.arrivals)

    @property
    def arrived_body(self) -> int:
        """Bytes of request bodies that the upstream has."""
        return sum(len(arrival.message.body) for arrival in self.arrivals)


class Upstream:
    """Serves one port for each way, so that it knows by which way a request came."""

    def __init__(self) -> None:
        self.ports: dict[str, int] = {}
        self.runs: dict[tuple[str, str], Run] = {}
        self.lines: dict[str, list[str]] = {}
        """Tap lines by nonce."""
        self._servers: list[asyncio.Server] = []

    async def start(self, ways: list[str]) -> None:
        loop = asyncio.get_running_loop()
        for way in ways:
            server = await loop.create_server(
                lambda way=way: _Connection(self, way),  # type: ignore[misc]
                "127.0.0.1",
                0,
                backlog=512,
            )
            self._servers.append(server)
            self.ports[way] = server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """Listen no more: who connects now is refused."""
        for server in self._servers:
            server.close()
        self._servers.clear()


class _Connection(asyncio.Protocol):
    def __init__(self, upstream: Upstream, way: str) -> None:
        self._upstream = upstream
        self._way = way
        self._reader = Reader()
        self._taken = 0
        self._served: asyncio.Queue[tuple[Run, Arrival, Reply]] = asyncio.Queue()
        self._open: list[Arrival] = []
        self._waiting: dict[int, tuple[Run, Arrival, Reply]] = {}
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=1 << 20)
        self._task = asyncio.create_task(self._serve())

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        for index in range(self._taken, len(self._reader.messages)):
            self._take(index, self._reader.messages[index])
        self._taken = len(self._reader.messages)
        for index, job in list(self._waiting.items()):
            if job[1].message.complete or job[2].early:
                self._served.put_nowait(self._waiting.pop(index))

    def eof_received(self) -> bool:
        self._gone()
        return False  # Like uvicorn: who sends FIN is gone.

    def connection_lost(self, error: Exception | None) -> None:
        self._gone()
        self._task.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _gone(self) -> None:
        now = time.monotonic()
        for arrival in self._open:
            if not arrival.finished and arrival.left_at is None:
                arrival.left_at = now

    def _take(self, index: int, message: Message) -> None:
        case = message.value(_CASE)
        run = self._upstream.runs.get((self._way, (case or b"").decode()))
        if run is None:
            self._transport.write(self._own_reply(message))
            return
        number = len(run.arrivals)
        arrival = Arrival(message)
        run.arrivals.append(arrival)
        self._open.append(arrival)
        reply = run.case.replies[min(number, len(run.case.replies) - 1)]
        nonce = message.value(wire.HEADER.encode())
        arrival.nonce = nonce.decode("latin-1") if nonce is not None else None
        if (message.value(b"expect") or b"").lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._waiting[index] = run, arrival, reply

    def _own_reply(self, message: Message) -> bytes:
        """Answer what belongs to no case: the sidecar's questions."""
        path = message.start.split(b" ")[1].decode("latin-1")
        status, kind, body = "404 Not Found", "application/json", b'{"detail":"Not Found"}'
        if path == "/ridealong/engine":
            status, body = "200 OK", b'{"tap":1}'
        elif path == "/health":
            status, body = "200 OK", b""
        elif path.startswith(wire.PULL_PATH):
            lines = self._upstream.lines.get(path.removeprefix(wire.PULL_PATH))
            if lines:
                status, kind = "200 OK", "application/jsonl"
                body = "".join(f"{line}\n" for line in lines).encode()
        return _head(status, (("content-type", kind), ("content-length", str(len(body))))) + body

    async def _serve(self) -> None:
        while True:
            run, arrival, reply = await self._served.get()
            if not await self._answer(run, arrival, reply):
                return

    async def _answer(self, run: Run, arrival: Arrival, reply: Reply) -> bool:
        """Send a reply; say whether the connection goes on."""
        before = run.client_body
        await asyncio.sleep(reply.wait)
        sent = 0
        for segment, body_bytes, pause in self._segments(arrival, reply):
            self._transport.write(segment)
            sent += body_bytes
            # Also without a pause others get their turn, and the reader its segments one by one.
            await asyncio.sleep(pause)
            await self._writable.wait()
        if reply.stop is None:
            await asyncio.sleep(reply.last_gap)
            self._transport.write(b"0\r\n\r\n" if self._ends_chunked(reply) else b"")
            arrival.finished = True
            self._open.remove(arrival)
        elif reply.stop not in ("before the head", "in the head"):
            await run.until("client_has_head", len(run.arrivals))
            await run.until("client_body", before + sent)
        if reply.end == "hang":
            await asyncio.sleep(30)
        if reply.end == "keep":
            return True
        if reply.end == "rst":
            await run.until("client_body", before + sent)
            sock: socket.socket = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._transport.abort()
        else:
            self._transport.close()
        return False

    @staticmethod
    def _ends_chunked(reply: Reply) -> bool:
        return reply.framing == "chunked" and not reply.raw

    def _segments(self, arrival: Arrival, reply: Reply) -> Iterator[tuple[bytes, int, float]]:
        """Yield bytes to send, how many of them the agent gets as body, and a pause after them."""
        if reply.raw:
            yield from ((segment, 0, 0.02) for segment in reply.raw)
            return
        if reply.stop == "before the head":
            return
        tap, plain = self._tap(arrival, reply), reply.pieces
        reply = _with_tokens_asked_for(arrival, reply)
        tail = b""
        if tap is not None and not reply.streamed:
            tail = tap.lines(len(reply.pieces)) + tap.end()
            if reply.stop is not None and reply.end != "hang":
                arrival.tap.clear()  # The engine has died before it told anything.
        head = _framed_head(reply, len(tail))
        if reply.stop == "in the head":
            yield head[: len(head) // 2], 0, 0.0
            return
        for segment in _grained(head, reply):
            yield segment, 0, reply.gap if segment is head else 0.0
        if reply.stop == "after the head":
            return
        for lines, piece in _pieces(reply, tap if reply.streamed else None):
            yield from _framed(lines, piece, reply)
        if reply.stop == "in a chunk":
            piece = plain[len(plain) // 2]
            part = piece[: len(piece) // 2]
            yield b"%x\r\n%b" % (len(piece), part), len(part), 0.0
        elif reply.stop is None and tail:
            yield from _framed(tail, b"", reply)

    def _tap(self, arrival: Arrival, reply: Reply) -> "_Tap | None":
        """Return the tap of a call whose reply can carry its lines."""
        nonce = arrival.nonce
        asks = arrival.message.start.startswith(b"POST ") and nonce is not None
        if not asks or not wire.NONCE.fullmatch(nonce or "") or not reply.generated:
            return None
        return (
            _Tap(self._upstream, arrival) if reply.streamed or reply.framing == "length" else None
        )


def _with_tokens_asked_for(arrival: Arrival, reply: Reply) -> Reply:
    """Answer the fields that a stock vLLM knows for tokens."""
    target = arrival.message.start.split(b" ")[1]
    asked = re.search(rb'"return_token_ids": ?true', arrival.message.body)
    if not asked or not reply.generated or b"completions" not in target:
        return reply
    protocol: Protocol = "chat" if b"chat" in target else "completions"
    pieces = tuple(with_tokens(protocol, piece) for piece in reply.pieces)
    return dataclasses.replace(reply, pieces=pieces)


def _pieces(reply: Reply, tap: "_Tap | None") -> Iterator[tuple[bytes, bytes]]:
    """Yield tap lines and a piece of the body, for all that is sent of it."""
    pieces, at_line_start = list(reply.pieces), True
    if reply.stop is not None:
        if reply.framing == "chunked":
            pieces = pieces[: len(pieces) // 2]
        else:
            body = b"".join(pieces)
            pieces = [body[: len(body) // 2]]
    for piece in pieces:
        yield tap.lines(1) if tap is not None and at_line_start else b"", piece
        at_line_start = piece.endswith(b"\n")
    if tap is not None and reply.stop is None and at_line_start:
        yield tap.end(), b""


def _framed(lines: bytes, piece: bytes, reply: Reply) -> Iterator[tuple[bytes, int, float]]:
    data = lines + piece
    chunked = reply.framing == "chunked"
    if reply.grain == "byte chunks" and chunked:
        for k in range(len(data)):
            yield b"1\r\n%b\r\n" % data[k : k + 1], int(k >= len(lines)), 0.0
        return
    framed = b"%x\r\n%b\r\n" % (len(data), data) if chunked and data else data
    for segment in _grained(framed, reply):
        yield segment, len(piece) if segment is framed else 0, 0.0


def _grained(data: bytes, reply: Reply) -> Iterator[bytes]:
    """Yield the segments in which bytes are sent."""
    if reply.grain == "byte segments":
        yield from (data[k : k + 1] for k in range(len(data)))
    else:
        yield data


def _framed_head(reply: Reply, tail: int) -> bytes:
    """Return the head of a reply that ``tail`` bytes of tap lines follow."""
    headers, length = reply.headers, sum(len(piece) for piece in reply.pieces)
    if reply.framing == "length":
        headers = (("content-length", str(length + tail)), *headers)
        if tail:
            headers = (*headers, (wire.LENGTH_HEADER, str(length)))
    elif reply.framing == "chunked":
        headers = (*headers, ("transfer-encoding", "chunked"))
    elif reply.framing == "close":
        headers = (*headers, ("connection", "close"))
    return _head(reply.status, headers)


class _Tap:
    """Tells the tokens of one call, one for each piece of the reply."""

    def __init__(self, upstream: Upstream, arrival: Arrival) -> None:
        assert arrival.nonce is not None
        self._nonce = arrival.nonce
        self._arrival = arrival
        self._rng = random.Random(arrival.message.value(_CASE))
        self._count = 0
        upstream.lines[self._nonce] = arrival.tap

    def lines(self, tokens: int) -> bytes:
        events: list[dict[str, object]] = []
        if not self._count:
            events.append({"e": "prompt", "r": 0, "id": "x", "ids": [1, 2], "params": {}})
        for _ in range(tokens):
            self._count += 1
            ids, logprobs = [self._rng.randrange(49152)], [-self._rng.random()]
            events.append({"e": "tok", "r": 0, "i": 0, "ids": ids, "lp": logprobs, "v": "v0"})
        return self._tell(events)

    def end(self) -> bytes:
        return self._tell([{"e": "end", "r": 0, "i": 0, "n": self._count, "finish": "stop"}])

    def _tell(self, events: list[dict[str, object]]) -> bytes:
        lines = [wire.line(self._nonce, event) for event in events]
        prefix = len(f": {self._nonce} ")
        self._arrival.tap += [line[prefix:-1].decode() for line in lines]
        return b"".join(lines)


def _head(status: str, headers: tuple[tuple[str, str], ...]) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in SERVER + headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
