"""HTTP/1 messages taken apart as they arrive (RFC 9112), with nothing thrown away but chunk
boundaries and chunk extensions. Unlike a library it accepts whatever can be cut into messages.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Framing = Literal["none", "length", "chunked", "close"]


@dataclass
class Message:
    """One request or reply, as far as it has come."""

    head: bytes
    """Start line and header lines, with the blank line."""
    framing: Framing
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False
    trailers: bytes = b""

    @property
    def start(self) -> bytes:
        return self.head.split(b"\r\n", 1)[0]

    @property
    def fields(self) -> list[tuple[bytes, bytes]]:
        """Header lines in order, name and value as sent, without the blanks around the value."""
        return fields(self.head)

    def value(self, name: bytes) -> bytes | None:
        """Return the first value of a header, named in lower case."""
        return next((v for k, v in self.fields if k.lower() == name), None)

    @property
    def interim(self) -> bool:
        """A 1xx reply but for 101: another reply follows it."""
        return self.start.startswith(b"HTTP/1.1 1") and self.start.split(b" ")[1] != b"101"


def fields(head: bytes) -> list[tuple[bytes, bytes]]:
    pairs = (line.partition(b":") for line in head.split(b"\r\n")[1:] if line)
    return [(name, value.strip(b" \t")) for name, _, value in pairs]


class Reader:
    """Cuts what one side of a connection sends into messages."""

    def __init__(self, bodiless: Callable[[int, bytes], bool] | None = None) -> None:
        """``bodiless``: for replies; says whether the reply of this number (from 0, interim ones
        not counted) with this head has no body whatever its headers say.
        """
        self.messages: list[Message] = []
        self.rest = b""
        """What has come since the last message and is no whole head yet."""
        self._bodiless = bodiless
        self._missing = 0
        self._state: Literal["head", "size", "data", "crlf", "trailers", "body", "all"] = "head"

    @property
    def complete(self) -> int:
        """Number of complete messages, interim replies not counted."""
        return sum(message.complete and not message.interim for message in self.messages)

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        data = self.rest + data
        self.rest = b""
        while data:
            taken = getattr(self, f"_{self._state}")(data)
            if not taken:
                self.rest = data
                return
            data = data[taken:]

    def end(self) -> None:
        """The sender closed in an orderly way: completes a message that lasts until then."""
        if self._state == "all":
            self.messages[-1].complete = True

    def _head(self, data: bytes) -> int:
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            return 0
        head = data[:end]
        found = {name.lower(): value for name, value in fields(head)}
        number = sum(not message.interim for message in self.messages)
        message = Message(head, "none")
        self.messages.append(message)
        if message.interim or (self._bodiless is not None and self._bodiless(number, head)):
            message.complete = True
        elif b"chunked" in found.get(b"transfer-encoding", b"").lower():
            message.framing, self._state = "chunked", "size"
        elif b"content-length" in found:
            self._missing = int(found[b"content-length"])
            message.framing, self._state = "length", "body"
            self._body(b"")
        elif self._bodiless is not None:
            message.framing, self._state = "close", "all"
        else:
            message.complete = True
        return end

    def _size(self, data: bytes) -> int:
        end = data.find(b"\r\n") + 2
        if end < 2:
            return 0
        self._missing = int(data[:end].partition(b";")[0], 16)
        self._state = "data" if self._missing else "trailers"
        return end

    def _data(self, data: bytes) -> int:
        part = data[: self._missing]
        self.messages[-1].body += part
        self._missing -= len(part)
        if not self._missing:
            self._state = "crlf"
        return len(part)

    def _crlf(self, data: bytes) -> int:
        if len(data) < 2:
            return 0
        self._state = "size"
        return 2

    def _trailers(self, data: bytes) -> int:
        end = data.find(b"\r\n") + 2
        if end < 2:
            return 0
        self.messages[-1].trailers += data[:end]
        if end == 2:
            self.messages[-1].complete = True
            self._state = "head"
        return end

    def _body(self, data: bytes) -> int:
        part = data[: self._missing]
        self.messages[-1].body += part
        self._missing -= len(part)
        if not self._missing:
            self.messages[-1].complete = True
            self._state = "head"
        return len(part)

    def _all(self, data: bytes) -> int:
        self.messages[-1].body += data
        return len(data)
