import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.sidecar.fake_engine import FakeEngine
from tests.sidecar.running import RunningSidecar

# A deadline per example would measure what else the machine is doing.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with closing(FakeEngine()) as running:
        yield running


@pytest.fixture(scope="module")
def sidecar(engine, tmp_path_factory) -> Iterator[RunningSidecar]:
    running = RunningSidecar(engine.url, tmp_path_factory.mktemp("sidecar") / "traces")
    yield running
    running.stop()


@pytest.fixture
def start(tmp_path) -> Iterator[Any]:
    """Start sidecars that end with the test."""
    running: list[RunningSidecar] = []

    def start(upstream: str, traces: Path | None = None, **options: Any) -> RunningSidecar:
        running.append(RunningSidecar(upstream, traces or tmp_path / "traces", **options))
        return running[-1]

    yield start
    for sidecar in running:
        if sidecar.process.poll() is None:
            sidecar.kill()


class RawServer:
    """A socket server that sends prepared bytes, whatever it is asked: what is compared byte by
    byte must not pass through an HTTP library.
    """

    def __init__(self) -> None:
        self.answer: list[bytes | float] = []
        """Bytes to send, seconds to pause."""
        self.reset = False
        """Break the connection off with RST at the end instead of closing it."""
        self.requests: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request = b""
            while b"\r\n\r\n" not in request:
                piece = connection.recv(65536)
                if not piece:
                    return
                request += piece
            head, _, body = request.partition(b"\r\n\r\n")
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    while len(body) < int(line.split(b":")[1]):
                        body += connection.recv(65536)
            # Taken first: whoever sees the request may already prepare the next answer.
            steps = self.answer
            self.requests.append(head + b"\r\n\r\n" + body)
            for step in steps:
                if isinstance(step, float):
                    time.sleep(step)
                    continue
                try:
                    connection.sendall(step)
                except OSError:
                    return
            if self.reset:
                linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


@pytest.fixture(scope="module")
def raw_server() -> Iterator[RawServer]:
    with closing(RawServer()) as running:
        yield running


@pytest.fixture(scope="module")
def raw_sidecar(raw_server, tmp_path_factory) -> Iterator[RunningSidecar]:
    running = RunningSidecar(raw_server.url, tmp_path_factory.mktemp("raw") / "traces")
    yield running
    running.stop()
