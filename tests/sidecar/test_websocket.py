"""WebSocket upgrades: what the upstream says, or 426 where it knows none."""

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tests.sidecar.client import Connection, exchange
from tests.sidecar.test_records import call_of, eventually

KEY = "dGhlIHNhbXBsZSBub25jZQ=="


def upgrade(path: str) -> bytes:
    lines = [
        f"GET {path} HTTP/1.1",
        "Host: x",
        "Upgrade: websocket",
        "Connection: Upgrade",
        f"Sec-WebSocket-Key: {KEY}",
        "Sec-WebSocket-Version: 13",
    ]
    return "\r\n".join([*lines, "", ""]).encode()


@pytest.mark.parametrize("status", [b"403 Forbidden", b"404 Not Found", b"405 Method Not Allowed"])
def test_an_upstream_without_websockets(raw_server, raw_sidecar, status):
    raw_server.reset = False
    raw_server.answer = [
        b"HTTP/1.1 %b\r\nContent-Length: 9\r\nContent-Type: text/plain\r\n\r\n" % status,
        0.05,
        b"forbidden",
        0.5,
    ]
    run = status[:3].decode()
    before = time.monotonic()
    seen = exchange(raw_sidecar.port, upgrade(f"/r/{run}/v1/responses"))
    assert seen == (
        b"HTTP/1.1 426 Upgrade Required\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    )
    assert time.monotonic() - before < 5
    asked = [r for r in raw_server.requests if r.startswith(b"GET /v1/responses HTTP/1.1\r\n")]
    assert b"Upgrade: websocket" in asked[-1]
    call = call_of(raw_sidecar, run)
    assert (call.route, call.outcome) == ("other", "complete")
    assert call.response and call.response.status == 426


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/responses", b"401 No"), ("/v1/responses", b"500 No"), ("/v1/realtime", b"403 No")],
)
def test_other_answers_stay(raw_server, raw_sidecar, path, status):
    raw_server.reset = False
    raw_server.answer = [
        b"HTTP/1.1 %b\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno" % status
    ]
    direct = exchange(raw_server.port, upgrade(path))
    assert exchange(raw_sidecar.port, upgrade(path)) == direct


@pytest.fixture
def echo() -> Iterator[int]:
    """A WebSocket server."""
    sync = pytest.importorskip("websockets.sync.server")

    def serve(connection) -> None:
        for message in connection:
            connection.send(message)

    with sync.serve(serve, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.socket.getsockname()[1]
        server.shutdown()


def test_a_websocket_passes_and_is_recorded_without_its_messages(echo, start):
    from websockets.sync.client import connect

    sidecar = start(f"http://127.0.0.1:{echo}", drain_seconds=20)
    with connect(f"ws://127.0.0.1:{sidecar.port}/r/socket/v1/responses") as connection:
        for message in ("text é", b"\x00\xff" * 50_000, ""):
            connection.send(message)
            assert connection.recv(10) == message
        call = call_of(sidecar, "socket")
        assert (call.route, call.outcome) == ("other", "complete")
        assert call.response and call.response.status == 101 and call.response.body is None
        assert sidecar.health()["in_flight"] == 1
        sidecar.process.send_signal(signal.SIGTERM)
        with pytest.raises(ConnectionRefusedError):
            _until_refused(sidecar.port)
        connection.send("still here")
        assert connection.recv(10) == "still here", "draining waits for it"
    eventually(lambda: sidecar.process.poll() == 0, 20)


def _until_refused(port: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        Connection(port).close()
        time.sleep(0.02)
