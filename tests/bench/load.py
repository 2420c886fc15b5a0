"""The load generator: a process of its own, raw sockets, a plan as JSON in, a result as JSON out.

    python -m tests.bench.load < plan.json

It reads the clocks of the proxy's processes itself, at the moments that count, and says how busy it
was: a generator that has no core for itself measures its own slowness.
"""

import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import msgspec

from tests.bench import clocks
from tests.bench.stub import END, Order, sent_at, words

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_STAMP_BYTES = 43  # Of an event's id, quotes included.
_SPREAD_SECONDS = 0.5
_SETTLE_SECONDS = 1.2  # The sidecar syncs what came before to disk within a second.
_PROBE_SECONDS = 0.02
_PATIENCE_SECONDS = 60.0


class Target(msgspec.Struct):
    """Where the load goes, the processes whose cost is measured, and those of the upstream."""

    port: int
    path: str = "/v1/chat/completions"
    headers: list[tuple[str, str]] = []
    pids: list[int] = []
    upstream_pids: list[int] = []
    upstream_port: int = 0
    """0: the target is the upstream."""


class Calls(msgspec.Struct, tag=True):
    """``count`` calls, one at a time on each connection, after ``warm`` others. With ``chunks``
    every other call is a stream of so many events without a pause.
    """

    target: Target
    prompt: int
    output: int
    count: int
    warm: int = 0
    connections: int = 8
    chunks: int = 0


class Streams(msgspec.Struct, tag=True):
    """Streams held open together for ``seconds``; then streams of two events beside them for
    ``probe_seconds``, one at a time, whose first bytes are timed.
    """

    target: Target
    prompt: int
    streams: int
    step_ms: int
    seconds: float
    probe_seconds: float = 0.0


Plan = Calls | Streams


@dataclass
class Result:
    """What was measured. Times in seconds, memory in bytes; CPU and memory are the proxy's."""

    cpu: float = 0.0
    units: int = 0
    """Calls, or events of streams, that ``cpu`` was spent on."""
    open: int = 0
    """Connections."""
    latencies: list[float] = field(default_factory=list)
    """Of whole calls, or from the sending of an event to its arrival."""
    first_bytes: list[float] = field(default_factory=list)
    memory_before: int = 0
    memory_during: int = 0
    generator_busy: float = 0.0
    """Share of one core that the generator used; ``upstream_busy``: the upstream."""
    upstream_busy: float = 0.0
    generator_waited: float = 0.0
    """Share of the time in which the generator could have run and got no core."""


class _Requests:
    """The requests of one connection: alike in size, never the same, as the turns of an agent."""

    def __init__(self, target: Target, prompt: int, seed: int) -> None:
        fields = [("host", f"127.0.0.1:{target.port}"), ("content-type", "application/json")]
        fields += [("user-agent", "OpenAI/Python 2.1.0"), ("accept", "application/json")]
        if not any(name == "authorization" for name, _ in target.headers):
            fields.append(("authorization", "Bearer sk-none"))
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields + target.headers)
        self._head = f"POST {target.path} HTTP/1.1\r\n{lines}".encode()
        text = words(prompt, seed)
        third = max(len(text) // 3, 1)
        turns = [text[at : at + third] for at in range(0, len(text), third)]
        messages = [
            {"role": ("user", "assistant")[number % 2], "content": turn}
            for number, turn in enumerate(turns)
        ]
        self._messages = json.dumps(messages)[:-1].encode()
        self._prompt = prompt
        self._number = 0

    def make(self, output: int, chunks: int = 0, step_ms: int = 0, streamed: bool = False) -> bytes:
        order = Order(self._prompt, output, chunks, step_ms)
        self._number += 1
        body = (
            b'{"model": "m", "user": "%b", "stream": %b, "messages": %b, '
            b'{"role": "user", "content": "turn %08d"}]}'
        ) % (str(order).encode(), b"true" if streamed else b"false", self._messages, self._number)
        return b"%bcontent-length: %d\r\n\r\n%b" % (self._head, len(body), body)


class _Connection(asyncio.Protocol):
    """One connection: a call at a time."""

    def __init__(self) -> None:
        self.first_byte = 0.0
        self.events = 0
        self.latencies: list[float] | None = None
        """Filled while it is a list."""
        self._transport: asyncio.Transport
        self._head: bytearray | None = None
        self._missing: int | None = None
        self._tail = b""
        self._streamed = False
        self._ended: asyncio.Future[None] | None = None

    @classmethod
    async def open(cls, port: int) -> "_Connection":
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(cls, "127.0.0.1", port)
        return protocol

    async def call(self, request: bytes, streamed: bool = False) -> None:
        """Send a request and read its reply to the end.

        Raises:
            RuntimeError: another status than 200, or the connection ended.
        """
        self._head, self._missing, self._tail = bytearray(), None, b""
        self._streamed, self.events, self.first_byte = streamed, 0, 0.0
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._ended

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(RuntimeError(f"the connection ended early: {exc}"))

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        if self._ended is None or self._ended.done():
            return
        if not self.first_byte:
            self.first_byte = now / 1e9
        if self._head is not None:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = bytes(self._head[: end + 2]), bytes(self._head[end + 4 :])
            self._head = None
            if b" 200 " not in head[:16]:
                self._ended.set_exception(RuntimeError(f"answered {(head + data)[:300]!r}"))
                return
            length = _LENGTH.search(head)
            self._missing = int(length[1]) if length else None
        if self._streamed:
            self._take_events(self._tail + data, now)
        if self._missing is not None:
            self._missing -= len(data)
            if self._missing <= 0:
                self._ended.set_result(None)
        else:
            self._tail = (self._tail + data)[1 - _STAMP_BYTES :]
            if self._tail.endswith(b"0\r\n\r\n"):
                self._ended.set_result(None)

    def _take_events(self, data: bytes, now: int) -> None:
        """Count events. The tail of the last piece holds no whole stamp: none counts twice."""
        stamps = sent_at(data)
        self.events += len(stamps)
        if self.latencies is not None:
            self.latencies += [(now - stamp) / 1e9 for stamp in stamps]


async def calls(plan: Calls) -> Result:
    """Make the calls of a plan."""
    connections = [await _Connection.open(plan.target.port) for _ in range(plan.connections)]
    requests = [
        _Requests(plan.target, plan.prompt, seed) for seed in range(2, plan.connections + 2)
    ]
    result = Result(open=plan.connections)

    async def worker(number: int, left: Iterator[int]) -> None:
        connection, own = connections[number], requests[number]
        for turn in left:
            chunks = plan.chunks if turn % 2 else 0
            request = own.make(plan.output, chunks, streamed=bool(chunks))
            start = time.monotonic()
            await connection.call(request, bool(chunks))
            result.latencies.append(time.monotonic() - start)
            result.first_bytes.append(connection.first_byte - start)
            if connection.events != chunks:
                raise RuntimeError(f"{connection.events} events came of {chunks}")

    async def together(count: int) -> None:
        left = iter(range(count))
        await asyncio.gather(*(worker(number, left) for number in range(plan.connections)))

    await together(plan.warm)
    result.latencies.clear()
    result.first_bytes.clear()
    result.memory_before = clocks.resident_bytes(plan.target.pids)
    with _Measured(result, plan.target):
        await together(plan.count)
    result.units = plan.count
    result.memory_during = clocks.resident_bytes(plan.target.pids)
    for connection in connections:
        connection.close()
    return result


async def streams(plan: Streams) -> Result:
    """Hold the streams of a plan open and probe beside them."""
    result = Result(open=plan.streams)
    target, step = plan.target, plan.step_ms / 1e3
    connections = [await _Connection.open(target.port) for _ in range(plan.streams + 1)]
    requests = [_Requests(target, plan.prompt, seed % 8) for seed in range(plan.streams + 1)]
    for connection, own in zip(connections, requests, strict=True):
        await connection.call(own.make(output=1))  # Its upstream connection is open then.
    result.memory_before = clocks.resident_bytes(target.pids)

    probe, *background = connections
    tasks = []
    for connection, own in zip(background, requests[1:], strict=True):
        request = own.make(0, step_ms=plan.step_ms, streamed=True)
        tasks.append(asyncio.create_task(connection.call(request, streamed=True)))
        await asyncio.sleep(_SPREAD_SECONDS / plan.streams)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not all(connection.events for connection in background):
        if time.monotonic() > deadline:
            raise RuntimeError("a stream did not begin")
        await asyncio.sleep(step)
    await asyncio.sleep(_SETTLE_SECONDS)

    for connection in background:
        connection.latencies = result.latencies
    events = _events(background)
    with _Measured(result, plan.target):
        await asyncio.sleep(plan.seconds)
        # A window without a chunk, on a machine with no core to spare, would measure nothing.
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while _events(background) == events:
            if time.monotonic() > deadline:
                raise RuntimeError("no chunk came")
            await asyncio.sleep(step)
    result.units = _events(background) - events
    result.memory_during = clocks.resident_bytes(target.pids)
    for connection in background:
        connection.latencies = None

    end = time.monotonic() + plan.probe_seconds
    while time.monotonic() < end:
        request = requests[0].make(0, chunks=2, streamed=True)
        start = time.monotonic()
        await probe.call(request, streamed=True)
        result.first_bytes.append(probe.first_byte - start)
        await asyncio.sleep(_PROBE_SECONDS)
    sent = await _end_streams(target.upstream_port or target.port)
    await asyncio.wait_for(asyncio.gather(*tasks), _PATIENCE_SECONDS)
    if _events(background) != sent:
        raise RuntimeError(f"{_events(background)} events came of {sent}")
    for connection in connections:
        connection.close()
    return result


async def _end_streams(port: int) -> int:
    """End the upstream's streams; return how many events they had."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(END)
    await reader.readuntil(b"\r\n\r\n")
    sent = await reader.read(100)
    writer.close()
    return int(sent)


def _events(connections: list[_Connection]) -> int:
    return sum(connection.events for connection in connections)


class _Measured:
    """Measures what the proxy spends in a block, and how busy the others are."""

    def __init__(self, result: Result, target: Target) -> None:
        self._result = result
        self._target = target

    def __enter__(self) -> None:
        self._before = self._marks()

    def __exit__(self, *_: object) -> None:
        wall, self._result.cpu, upstream, own, waited = (
            after - before for before, after in zip(self._before, self._marks(), strict=True)
        )
        self._result.upstream_busy = upstream / wall
        self._result.generator_busy = own / wall
        self._result.generator_waited = waited / wall

    def _marks(self) -> list[float]:
        return [
            time.monotonic(),
            clocks.cpu_seconds(self._target.pids),
            clocks.cpu_seconds(self._target.upstream_pids),
            time.process_time(),
            clocks.waited_seconds(),
        ]


def main() -> None:
    """Carry out the plan on standard input."""
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    result = asyncio.run(calls(plan) if isinstance(plan, Calls) else streams(plan))
    json.dump(asdict(result), sys.stdout)


if __name__ == "__main__":
    main()
