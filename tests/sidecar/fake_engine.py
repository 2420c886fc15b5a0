"""FakeEngine: an ASGI app that answers like the model server with its token tap, and misbehaves on
request. The real server can't be made to pause, break off or stay silent at a given byte.
"""

import asyncio
import json
import socket
import threading
import time
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

import uvicorn

from tokenization.tap import wire


class FakeEngine:
    """Serves in a thread. Requests say in their JSON body how to be answered:

    ``stream``, ``events`` (number, default 4), ``delay`` and ``first_delay`` (seconds), ``reply``
    (text of a reply that is not streamed), ``hang`` (never answer).
    """

    def __init__(
        self, tap: bool = True, host: str = "127.0.0.1", port: int = 0, **uvicorn_options: Any
    ) -> None:
        self.tap = tap
        self.lines: dict[str, list[str]] = {}
        """Tap lines by nonce."""
        self.requests: list[dict[str, Any]] = []
        self.disconnects: list[float] = []
        """Monotonic times at which a client was seen to hang up before its reply was complete."""
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        self.port = sock.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            log_level="error",
            lifespan="off",
            **{"timeout_keep_alive": 5} | uvicorn_options,
        )
        self._server = uvicorn.Server(config)
        scheme = "https" if "ssl_certfile" in uvicorn_options else "http"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._thread = threading.Thread(target=self._server.run, args=([sock],), daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)

    def last(self) -> dict[str, Any]:
        """Return the last request that is no question of the sidecar's own."""
        own = ("/ridealong/", "/version", "/health")
        return next(r for r in reversed(self.requests) if not r["path"].startswith(own))

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(5)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnects.append(time.monotonic())
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path = scope["path"]
        self.requests.append({"path": path, "headers": headers, "body": body})
        if path.startswith("/prefix"):
            path = path.removeprefix("/prefix")
        if path == "/ridealong/engine" and self.tap:
            await _reply(send, 200, b'{"tap": 1}')
        elif path.startswith(wire.PULL_PATH):
            lines = self.lines.get(path.removeprefix(wire.PULL_PATH))
            text = "".join(f"{line}\n" for line in lines or [])
            await _reply(send, 200 if lines else 404, text.encode(), kind=b"application/jsonl")
        elif scope["method"] == "POST" and not path.startswith("/files"):
            await self._call(json.loads(body), headers.get(wire.HEADER), receive, send)
        elif path == "/files":
            await _reply(send, 200, body[::-1])
        else:
            await _reply(send, 404, b'{"detail":"Not Found"}')

    async def _call(self, ask: dict[str, Any], nonce: str | None, receive: Any, send: Any) -> None:
        work = asyncio.create_task(self._answer(ask, nonce if self.tap else None, send))
        gone = asyncio.create_task(_disconnected(receive))
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            self.disconnects.append(time.monotonic())
            work.cancel()
        gone.cancel()

    def _line(self, nonce: str | None, event: dict[str, Any]) -> bytes:
        if nonce is None:
            return b""
        line = wire.line(nonce, event)
        self.lines.setdefault(nonce, []).append(line.decode().removeprefix(f": {nonce} ")[:-1])
        return line

    async def _answer(self, ask: dict[str, Any], nonce: str | None, send: Any) -> None:
        prompt = self._line(nonce, {"e": "prompt", "r": 0, "id": "x", "ids": [1, 2], "params": {}})
        await asyncio.sleep(ask.get("first_delay", 0))
        if ask.get("hang"):
            await asyncio.sleep(60)
        end = {"e": "end", "r": 0, "i": 0, "n": 0, "finish": "stop"}
        if not ask.get("stream"):
            text = ask.get("reply", '{"object":"chat.completion"}').encode()
            lines = prompt + self._line(nonce, end)
            await _reply(send, 200, text, lines if nonce else None)
            return
        kind = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        side = prompt
        for number in range(ask.get("events", 4)):
            event = {"e": "tok", "r": 0, "i": 0, "ids": [number], "lp": [-0.5], "v": "v0"}
            side += self._line(nonce, event)
            data = side + b'data: {"token":%d}\n\n' % number
            await send({"type": "http.response.body", "body": data, "more_body": True})
            side = b""
            await asyncio.sleep(ask.get("delay", 0))
        last = b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": self._line(nonce, end)})


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _reply(
    send: Any,
    status: int,
    body: bytes,
    tap: bytes | None = None,
    kind: bytes = b"application/json",
) -> None:
    headers = [
        (b"content-type", kind),
        (b"content-length", str(len(body) + len(tap or b"")).encode()),
    ]
    if tap is not None:
        headers.append((wire.LENGTH_HEADER.encode(), str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": tap is not None})
    if tap is not None:
        await send({"type": "http.response.body", "body": tap})


class FakeTornServer:
    """Answers with tap lines and dies in the middle of them, after the agent's part of a reply."""

    def __init__(self) -> None:
        self._server = ThreadingTCPServer(("127.0.0.1", 0), _TornReply)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _TornReply(StreamRequestHandler):
    def handle(self) -> None:
        fields: dict[str, str] = {}
        while line := self.rfile.readline().strip().decode():
            name, _, value = line.partition(":")
            fields[name.lower()] = value.strip()
        ask = json.loads(self.rfile.read(int(fields.get("content-length", 0))) or b"{}")
        line_of_tap = wire.line(fields.get(wire.HEADER, "0"), {"e": "prompt"})
        if ask.get("stream"):
            head = "Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
            pieces = [line_of_tap + b"data: 1\n\n", b"data: [DONE]\n\n"]
            pieces = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
        else:
            head = f"{wire.LENGTH_HEADER}: 9\r\nContent-Length: {9 + 2 * len(line_of_tap)}\r\n"
            pieces = [b'{"a":"b"}', line_of_tap + line_of_tap[:-1]]
        self.wfile.write(f"HTTP/1.1 200 OK\r\n{head}\r\n".encode())
        for piece in pieces:
            self.wfile.write(piece)
            time.sleep(0.05)
