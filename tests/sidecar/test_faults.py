"""Sidecars are killed outright at random moments under load: nothing that was finished is lost."""

import asyncio
import json
import multiprocessing
import os
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import pytest

from sidecar.config import SidecarConfig
from sidecar.traces.reader import read_records
from sidecar.traces.record import Exchange, SidecarStarted
from sidecar.traces.shards import end_mark, is_closed
from tests.sidecar.client import Connection, post
from tests.sidecar.fake_engine import FakeEngine
from tests.sidecar.killable import main
from tests.sidecar.running import _READY, RunningSidecar
from tests.sidecar.test_writer import small_disk  # noqa: F401  (a fixture)
from tokenization.tap import wire

KILLS = int(os.environ.get("RIDEALONG_KILLS", "48"))
"""Each test run makes some; the whole suite (``make test-faults``) makes 200."""
LANES = 8
CLIENTS = 3
SECONDS = 1500
"""For a machine that does much else: alone it takes a small part of that."""
CHAT = "/v1/chat/completions"


class Upstream:
    """Answers model calls at once: a few streamed events with the tap's lines, the rest is load.

    Bare sockets, as it shares two processors with the sidecars.
    """

    def __init__(self) -> None:
        self.calls = 0

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}"

    async def close(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(
                    line.split(": ", 1) for line in head.decode().lower().split("\r\n")[1:] if line
                )
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                if not body:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n" + b'{"tap":1}')
                    continue
                self.calls += 1
                writer.write(_HEAD)
                for piece in _pieces(fields[wire.HEADER], body):
                    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                    await writer.drain()
                    await asyncio.sleep(0.002)
                writer.write(b"0\r\n\r\n")
        writer.close()


_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _pieces(nonce: str, body: bytes) -> list[bytes]:
    ids = list(range(len(body) // 8))
    prompt = {"e": "prompt", "r": 0, "id": "chatcmpl-1", "ids": ids, "params": {}}
    tokens = [
        wire.line(nonce, {"e": "tok", "r": 0, "i": 0, "ids": [k], "lp": [-0.5], "v": "v1"})
        + b'data: {"choices":[{"index":0,"delta":{"content":"word"}}]}\n\n'
        for k in range(4)
    ]
    end = wire.line(nonce, {"e": "end", "r": 0, "i": 0, "n": 4, "finish": "stop"})
    return [wire.line(nonce, prompt), *tokens, end + b"data: [DONE]\n\n"]


class Lane:
    """One folder of shards, and the sidecars that write to it, one after the other."""

    def __init__(self, number: int, folder: Path, upstream: str, context: ForkServerContext):
        self.traces = folder / f"lane-{number}"
        self.seen: list[str] = []
        """Names of the calls whose reply a client has read to its end."""
        self.kills = 0
        self.under_load = 0
        """Kills with at least one call going on."""
        self._log = folder / f"lane-{number}.log"
        self._random = random.Random(number)
        self._upstream = upstream
        self._context = context
        self._number = 0
        self._open = 0
        self._until = 0
        self._reached = asyncio.Event()

    async def live(self, *, kill: bool) -> None:
        """Start a sidecar, use it, and end it."""
        config = SidecarConfig(
            upstream=self._upstream,
            listen="127.0.0.1:0",
            admin="127.0.0.1:0",
            traces=str(self.traces),
        )
        read, write = os.pipe()
        process = self._context.Process(target=_main, args=(config, DupFd(write), str(self._log)))
        process.start()
        os.close(write)
        try:
            line = await asyncio.wait_for(_line(read), 120)
            match = _READY.search(line)
            assert match is not None, f"{line!r}: {self._log.read_text()[-2000:]}"
            port = int(match[1])
            clients = [asyncio.create_task(self._client(k, port)) for k in range(CLIENTS)]
            # A few calls into its life, at a random moment after the last of them.
            self._until = len(self.seen) + self._random.randint(0, 5)
            self._reached = asyncio.Event()
            reached = asyncio.create_task(self._reached.wait())
            ended = asyncio.gather(*clients)
            if len(self.seen) < self._until:
                await asyncio.wait({reached, ended}, return_when=asyncio.FIRST_COMPLETED)
            reached.cancel()
            assert not ended.done(), f"the sidecar ended: {self._log.read_text()[-2000:]}"
            await asyncio.sleep(self._random.random() * 0.05)
            if kill:
                self.under_load += self._open > 0
                self.kills += 1
                process.kill()
            else:
                ended.cancel()
                process.terminate()
            with suppress(asyncio.CancelledError):
                await ended
            await asyncio.to_thread(process.join, 60)
        finally:
            process.kill()

    async def _client(self, agent: int, port: int) -> None:
        """Talk until the sidecar is gone: a conversation that grows with every call."""
        messages = [{"role": "user", "content": f"agent {agent} " * 200}]
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                while True:
                    self._number += 1
                    name = f"call-{self._number}"
                    ask = {"model": name, "messages": messages, "stream": True}
                    body = json.dumps(ask).encode()
                    self._open += 1
                    try:
                        writer.write(_REQUEST % (agent, len(body)) + body)
                        reply = await reader.readuntil(b"\r\n0\r\n\r\n")
                    finally:
                        self._open -= 1
                    assert reply.startswith(b"HTTP/1.1 200") and b"[DONE]" in reply, reply
                    self.seen.append(name)
                    if len(self.seen) >= self._until:
                        self._reached.set()
                    messages.append({"role": "user", "content": f"{name} {body[:99]!r} " * 10})
            finally:
                writer.close()


_REQUEST = (
    b"POST /r/agent-%d/v1/chat/completions HTTP/1.1\r\nHost: model.test\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


def _main(config: SidecarConfig, output: Any, log: str) -> None:
    main(config, output.detach(), log)


async def _line(descriptor: int) -> str:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(descriptor, "rb"))
    try:
        return (await reader.readline()).decode()
    finally:
        transport.close()


@pytest.fixture
def quick_folder(tmp_path) -> Iterator[Path]:
    """A folder in memory, where there is one: on a disk that keeps a record waiting for more than a
    second the sidecar goes on without it, and such a record may be lost.
    """
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="ridealong-", dir=memory) as folder:
        yield Path(folder)


async def test_kills_lose_nothing_that_an_agent_saw_complete(quick_folder):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.sidecar.killable"])
    upstream = Upstream()
    url = await upstream.start()
    lanes = [Lane(number, quick_folder, url, context) for number in range(LANES)]
    deadline = time.monotonic() + SECONDS

    async def run(lane: Lane) -> None:
        for _ in range(KILLS // LANES):
            assert time.monotonic() < deadline, f"only {lane.kills} kills of a lane"
            await lane.live(kill=True)
        await lane.live(kill=False)

    async with asyncio.TaskGroup() as group:
        for lane in lanes:
            group.create_task(run(lane))
    await upstream.close()

    assert sum(lane.kills for lane in lanes) == KILLS
    assert sum(lane.under_load for lane in lanes) > KILLS / 2
    assert sum(len(lane.seen) for lane in lanes) > KILLS
    for lane in lanes:
        complete: Counter[str] = Counter()
        sidecars = 0
        for shard in sorted(lane.traces.iterdir()):
            assert is_closed(shard), "by its own sidecar or the next one"
            for located in read_records(shard):
                assert located.error is None, f"{shard.name}: {located.error}"
                record = located.record
                if isinstance(record, SidecarStarted):
                    sidecars += 1
                elif isinstance(record, Exchange) and record.outcome == "complete":
                    assert record.request.body is not None and record.response is not None
                    body = json.loads(record.request.body.raw())
                    complete[body["model"]] += 1
                    assert (
                        len(json.loads(record.tap[0])["ids"]) == len(record.request.body.raw()) // 8
                    )
        lost = set(lane.seen) - set(complete)
        assert not lost, f"an agent saw them complete: {sorted(lost)}"
        assert set(complete.values()) == {1}
        assert sidecars >= lane.kills * 0.9, "a life too short to write anything leaves nothing"


@pytest.fixture
def shard(start, tmp_path) -> Path:
    """A shard of a real sidecar with several calls, each in a frame of its own."""
    with closing(FakeEngine()) as engine:
        sidecar = start(engine.url)
        for number in range(4):
            ask = {"messages": [{"content": "long " * 300}] * (number + 1), "reply": "r" * 50}
            connection = Connection(sidecar.port)
            connection.ask(post(CHAT, ask))
            connection.close()
            sidecar.calls(number + 1, seconds=20)
        assert sidecar.stop()[0] == 0
    (path,) = sidecar.traces.iterdir()
    return path


def test_a_shard_cut_at_every_byte_of_its_last_frame_keeps_all_before(shard, tmp_path):
    whole = shard.read_bytes()
    located = list(read_records(shard))
    assert any(isinstance(x.record, Exchange) and x.record.tap for x in located)
    start, end = located[-1].frame, len(whole) - len(end_mark(0))
    before = [x for x in located if x.frame < start]
    assert len(before) >= 4 and is_closed(shard)
    cut = tmp_path / "cut"
    for size in range(start, end):
        cut.write_bytes(whole[:size])
        assert list(read_records(cut)) == before
    cut.write_bytes(whole[:end])
    assert list(read_records(cut)) == located


def test_traffic_goes_on_over_a_read_only_folder(small_disk):  # noqa: F811
    traces = small_disk / "traces"
    _remount(small_disk, "ro")
    with closing(FakeEngine()) as engine:
        sidecar = RunningSidecar(engine.url, traces)
        try:
            connection = Connection(sidecar.port)
            for number in range(3):
                _, body = connection.ask(post(f"/r/{number}{CHAT}", {"reply": "as ever"}))
                assert body == b"as ever"
            health = sidecar.health()
            assert health["status"] == "degraded" and "Read-only" in health["reasons"][0]
            assert (health["records_written"], health["records_lost"]) == (0, 0)
            _remount(small_disk, "rw")
            found = sidecar.calls(3, seconds=20)
        finally:
            status, _ = sidecar.stop()
    assert [call.session.run for call in found] == ["0", "1", "2"] and status == 0


def _remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)
