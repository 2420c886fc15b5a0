"""A client that sees every byte: HTTP/1.1 over a socket."""

import json
import socket
import time
from typing import Any


def post(path: str, ask: dict[str, Any], *headers: str) -> bytes:
    """Return the bytes of a POST request."""
    body = json.dumps(ask).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: model.test",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def get(path: str) -> bytes:
    """Return the bytes of a GET request."""
    return f"GET {path} HTTP/1.1\r\nHost: model.test\r\n\r\n".encode()


class Connection:
    """One connection; ``arrivals`` are (monotonic seconds, bytes) of all that was received."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=15)
        self.arrivals: list[tuple[float, bytes]] = []
        self.reset = False
        """The server has broken the connection off with RST."""
        self._unread = b""

    def close(self) -> float:
        """Hang up; return when."""
        self.socket.close()
        return time.monotonic()

    def read_to_end(self) -> bytes:
        """Return everything until the server closes; a reset counts as that."""
        while self._receive():
            pass
        return self._unread

    def read_until(self, text: bytes) -> bytes:
        """Return everything up to and including ``text``."""
        while text not in self._unread:
            assert self._receive(), f"closed after {self._unread!r}"
        end = self._unread.index(text) + len(text)
        found, self._unread = self._unread[:end], self._unread[end:]
        return found

    def reply(self) -> tuple[bytes, bytes]:
        """Return head and body (without chunk framing) of one reply."""
        head = self.read_until(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        if fields.get(b"transfer-encoding") == b"chunked":
            body = b""
            while size := int(self.read_until(b"\r\n"), 16):
                body += self._exactly(size)
                self._exactly(2)
            self._exactly(2)
            return head, body
        return head, self._exactly(int(fields[b"content-length"]))

    def ask(self, request: bytes) -> tuple[bytes, bytes]:
        """Send a request and return the reply's head and body."""
        self.socket.sendall(request)
        return self.reply()

    def _exactly(self, size: int) -> bytes:
        while len(self._unread) < size:
            assert self._receive(), "closed in the middle of a reply"
        found, self._unread = self._unread[:size], self._unread[size:]
        return found

    def _receive(self) -> bool:
        try:
            data = self.socket.recv(65536)
        except ConnectionResetError:
            self.reset = True
            data = b""
        if data:
            self.arrivals.append((time.monotonic(), data))
        self._unread += data
        return bool(data)


def exchange(port: int, request: bytes) -> bytes:
    """Send a request on a new connection; return all bytes until the server closes it."""
    connection = Connection(port)
    try:
        connection.socket.sendall(request)
        return connection.read_to_end()
    finally:
        connection.close()
