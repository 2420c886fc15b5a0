"""What the sidecar costs: CPU per request and per streamed chunk, beside direct access and a plain
aiohttp proxy. Everything in the table is from one run on one machine.

    python -m tests.bench.sidecar [--json FILE]

A local uvicorn server sends replies of the size vLLM sends: 1 KB for a reply that is not streamed,
240 bytes per streamed token at 50 tokens/s and stream, and the token tap's lines where they are
asked for. CPU is user and system time of the processes, from the operating system.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tokenization.tap import wire

REQUESTS = 600
CONCURRENCY = 8
STREAMS = 16
CHUNKS = 200
CHUNK_SECONDS = 0.02
BODY = {"model": "m", "messages": [{"role": "user", "content": "word " * 400}], "stream": False}

_DELTA = {
    "id": "chatcmpl-8f14e45fceea467f8f14e45fceea467f",
    "object": "chat.completion.chunk",
    "created": 1790000000,
    "model": "model",
    "choices": [
        {"index": 0, "delta": {"content": " token"}, "logprobs": None, "finish_reason": None}
    ],
}
_TOKEN = {"e": "tok", "r": 0, "i": 0, "ids": [12345], "lp": [-0.1234567], "v": "v12"}
_PROMPT = {"e": "prompt", "r": 0, "id": "chatcmpl-1", "ids": list(range(400)), "params": {}}
_END = {"e": "end", "r": 0, "i": 0, "n": CHUNKS, "finish": "stop"}


@dataclass
class Result:
    """One row. CPU in microseconds; ``total`` is client, server and proxy together."""

    name: str
    proxy_us_per_request: float
    proxy_us_per_chunk: float
    total_us_per_request: float
    total_us_per_chunk: float
    request_ms: float
    first_chunk_ms: float


async def app(scope: Any, receive: Any, send: Any) -> None:
    """The server: ASGI."""
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message.get("body", b""), message.get("more_body", False)
    nonce = dict(scope["headers"]).get(wire.HEADER.encode(), b"").decode()

    def tap(event: dict[str, Any]) -> bytes:
        return wire.line(nonce, event) if nonce else b""

    if scope["path"] != "/v1/chat/completions":
        await _send(send, [(b"content-type", b"application/json")], b'{"tap":1}')
    elif not json.loads(body)["stream"]:
        text = json.dumps({"choices": [{"message": {"content": "word " * 180}}]}).encode()
        lines = tap(_PROMPT) + tap(_TOKEN) + tap(_END)
        headers = [(b"content-length", b"%d" % (len(text) + len(lines)))]
        if nonce:
            headers.append((wire.LENGTH_HEADER.encode(), b"%d" % len(text)))
        await _send(send, headers, text + lines)
    else:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        event = b"data: %s\n\n" % json.dumps(_DELTA, separators=(",", ":")).encode()
        side = tap(_PROMPT)
        start = time.monotonic()
        for number in range(CHUNKS):
            data = side + tap(_TOKEN) + event
            await send({"type": "http.response.body", "body": data, "more_body": True})
            side = b""
            await asyncio.sleep(start + (number + 1) * CHUNK_SECONDS - time.monotonic())
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n" + tap(_END)})


async def _send(send: Any, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def serve(port: int) -> None:
    """Run the server."""
    import uvicorn

    uvicorn.run(app, port=port, log_level="error", interface="asgi3", lifespan="off")


def plain_proxy(port: int, upstream: str) -> None:
    """Run what one would write with aiohttp alone: forwards, streams, keeps nothing."""
    from aiohttp import web

    skipped = {"host", "content-length", "transfer-encoding", "connection", "keep-alive"}

    async def forward(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in skipped}
        session: aiohttp.ClientSession = request.app["session"]
        url = upstream + request.raw_path
        async with session.request(request.method, url, data=body, headers=headers) as reply:
            response = web.StreamResponse(
                status=reply.status,
                headers={k: v for k, v in reply.headers.items() if k.lower() not in skipped},
            )
            response.content_length = reply.content_length
            await response.prepare(request)
            async for chunk in reply.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    async def session(application: web.Application) -> Any:
        connector = aiohttp.TCPConnector(limit=0)
        application["session"] = aiohttp.ClientSession(
            connector=connector, auto_decompress=False, timeout=aiohttp.ClientTimeout(None)
        )
        yield
        await application["session"].close()

    application = web.Application(client_max_size=1 << 30)
    application.cleanup_ctx.append(session)
    application.router.add_route("*", "/{path:.*}", forward)
    web.run_app(application, host="127.0.0.1", port=port, print=None, access_log=None)


def sidecar(port: int, upstream: str, traces: str, tap: bool) -> None:
    """Run the sidecar."""
    from sidecar.config import SidecarConfig
    from sidecar.program import run

    listen = f"127.0.0.1:{port}"
    run(SidecarConfig(upstream, listen, admin="127.0.0.1:0", traces=traces, tap=tap))


@contextmanager
def process(call: str, port: int) -> Iterator[psutil.Process]:
    """Run a function of this module in a process of its own until the end of the block."""
    code = f"from tests.bench import sidecar as bench; bench.{call}"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if child.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{call} did not start") from None
                time.sleep(0.05)
        yield psutil.Process(child.pid)
    finally:
        child.terminate()
        child.wait(15)


def cpu_seconds(processes: list[psutil.Process]) -> list[float]:
    """Return user and system time of every process."""
    return [sum(process.cpu_times()[:2]) for process in processes]


async def requests(url: str) -> list[float]:
    """Make the requests that are not streamed; return their seconds."""
    seconds: list[float] = []

    async def worker() -> None:
        async with aiohttp.ClientSession() as session:
            for _ in range(REQUESTS // CONCURRENCY):
                start = time.perf_counter()
                async with session.post(f"{url}/v1/chat/completions", json=BODY) as reply:
                    assert len(await reply.read()) > 900
                seconds.append(time.perf_counter() - start)

    await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
    return seconds


async def streams(url: str) -> list[float]:
    """Read the streams; return the seconds to their first chunks."""
    seconds: list[float] = []

    async def worker(session: aiohttp.ClientSession) -> None:
        start = time.perf_counter()
        body = BODY | {"stream": True}
        async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
            first, size = True, 0
            async for chunk in reply.content.iter_any():
                if first:
                    seconds.append(time.perf_counter() - start)
                    first = False
                size += chunk.count(b"data: ")
            assert size == CHUNKS + 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(worker(session) for _ in range(STREAMS)))
    return seconds


def measure(name: str, url: str, server: psutil.Process, proxy: psutil.Process | None) -> Result:
    """Send both loads to ``url``; the cost of a chunk is that of a stream without its request's."""
    processes = [psutil.Process(), server, *([proxy] if proxy else [])]
    asyncio.run(requests(url))  # Warm: imports, connections, the interpreter's specialisation.
    marks = [cpu_seconds(processes)]
    request_seconds = asyncio.run(requests(url))
    marks.append(cpu_seconds(processes))
    first_chunk_seconds = asyncio.run(streams(url))
    marks.append(cpu_seconds(processes))
    by_request, by_stream = (
        [after - before for before, after in zip(*pair, strict=True)]
        for pair in (marks[:2], marks[1:])
    )

    def per_request(cpu: list[float]) -> float:
        return sum(cpu) / REQUESTS * 1e6

    def per_chunk(cpu: list[float], request_us: float) -> float:
        return (sum(cpu) * 1e6 - STREAMS * request_us) / (STREAMS * CHUNKS)

    request_us, proxy_request_us = per_request(by_request), per_request(by_request[2:])
    return Result(
        name=name,
        proxy_us_per_request=proxy_request_us,
        proxy_us_per_chunk=per_chunk(by_stream[2:], proxy_request_us),
        total_us_per_request=request_us,
        total_us_per_chunk=per_chunk(by_stream, request_us),
        request_ms=statistics.median(request_seconds) * 1e3,
        first_chunk_ms=statistics.median(first_chunk_seconds) * 1e3,
    )


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def run() -> list[Result]:
    """Measure all variants."""
    results = []
    port = free_port()
    upstream = f"http://127.0.0.1:{port}"
    with process(f"serve({port})", port) as server, tempfile.TemporaryDirectory() as traces:
        results.append(measure("direct", upstream, server, None))
        for name, call in {
            "plain aiohttp proxy": "plain_proxy({port}, {upstream!r})",
            "sidecar, no tap": "sidecar({port}, {upstream!r}, {traces!r}, False)",
            "sidecar, tap": "sidecar({port}, {upstream!r}, {traces!r}, True)",
        }.items():
            at = free_port()
            command = call.format(port=at, upstream=upstream, traces=traces)
            with process(command, at) as proxy:
                results.append(measure(name, f"http://127.0.0.1:{at}", server, proxy))
    return results


def table(results: list[Result]) -> str:
    """Format the results, with ratios to the plain proxy and to direct access."""
    direct, plain = results[0], results[1]
    lines = [
        f"{'':22}{'proxy CPU':>20}{'/ plain proxy':>18}{'all CPU / direct':>20}{'latency ms':>18}",
        f"{'':22}{'us/request us/chunk':>20}{'request  chunk':>18}{'request  chunk':>20}"
        f"{'request  1st chunk':>20}",
    ]
    for row in results:
        ratios = (
            row.proxy_us_per_request / plain.proxy_us_per_request,
            row.proxy_us_per_chunk / plain.proxy_us_per_chunk,
            row.total_us_per_request / direct.total_us_per_request,
            row.total_us_per_chunk / direct.total_us_per_chunk,
        )
        lines.append(
            f"{row.name:22}{row.proxy_us_per_request:>11.0f}{row.proxy_us_per_chunk:>9.0f}"
            f"{ratios[0]:>11.1f}{ratios[1]:>7.1f}{ratios[2]:>13.1f}{ratios[3]:>7.1f}"
            f"{row.request_ms:>9.2f}{row.first_chunk_ms:>11.1f}"
        )
    lines.append(
        f"\n{REQUESTS} requests by {CONCURRENCY} clients; {STREAMS} streams of {CHUNKS} chunks, "
        f"one every {CHUNK_SECONDS * 1e3:.0f} ms"
    )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    results = run()
    print(table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in results], indent=2) + "\n")


if __name__ == "__main__":
    main()
