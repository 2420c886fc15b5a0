"""Cuts the token tap's lines out of a reply while it streams by. Pure.

The wire format is that of ``tokenization.tap.wire``. A cutter takes the reply's bytes in whatever
pieces they arrive and returns those that may go on to the agent; together they are the reply as the
engine sends it to anyone else. Cut lines collect in ``lines``, without prefix and newline.
"""

from typing import Protocol

_SURE = 10
"""Bytes of a marker that are no coincidence: its nonce's first 32 bits are among them."""


class Cutter(Protocol):
    """Common to all replies."""

    lines: list[str]

    @property
    def held(self) -> bytes:
        """What was fed, belongs to the reply and has not been returned yet."""

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the reply; return those that can go on now."""

    def finish(self) -> bytes:
        """End of the reply: return what was still held back."""


def marker(nonce: str) -> bytes:
    """Return how every tap line of the call with this nonce starts."""
    return f": {nonce} ".encode("ascii")


class SseCutter:
    """Server-sent events: tap lines stand between events, at the start of a line.

    Holds back only what may still turn out to be a tap line: at most the marker's length, and a tap
    line itself until its newline.
    """

    def __init__(self, nonce: str) -> None:
        self.lines: list[str] = []
        self.held = b""
        self._marker = marker(nonce)
        self._line: bytearray | None = None
        self._at_line_start = True

    def feed(self, data: bytes) -> bytes:
        if self._line is None and self._at_line_start and not self.held and data.endswith(b"\n"):
            # As nearly always: whole lines, the first of them or none a tap line.
            end = data.index(b"\n") + 1 if data.startswith(self._marker) else 0
            if data.find(self._marker, end) < 0:
                if end:
                    self._keep(data[len(self._marker) : end - 1])
                return data[end:]
        passed: list[bytes] = []
        if self.held:
            data, self.held = self.held + data, b""
        position = 0
        while position < len(data):
            if self._line is not None:
                position = self._take_line(data, position)
            elif self._at_line_start and data.startswith(self._marker, position):
                self._line = bytearray()
                position += len(self._marker)
            elif self._at_line_start and self._marker.startswith(data[position:]):
                self.held = data[position:]
                break
            else:
                end = self._next_marker(data, position)
                passed.append(data[position:end])
                self._at_line_start = data[end - 1] == 0x0A
                position = end
        return b"".join(passed)

    def finish(self) -> bytes:
        held, self.held = self.held, b""
        return held if len(held) < _SURE else b""

    def _take_line(self, data: bytes, position: int) -> int:
        """Move the bytes of the current tap line from ``data``; return where the rest starts."""
        assert self._line is not None
        end = data.find(b"\n", position)
        if end < 0:
            self._line += data[position:]
            return len(data)
        self._line += data[position:end]
        self._keep(self._line)
        self._line = None
        return end + 1

    def _keep(self, line: bytes | bytearray) -> None:
        self.lines.append(line.decode("utf-8", "replace"))

    def _next_marker(self, data: bytes, position: int) -> int:
        """Return where the next (possible start of a) tap line begins; it is past ``position``."""
        found = data.find(b"\n" + self._marker, position)
        if found >= 0:
            return found + 1
        newline = data.rfind(b"\n", max(position, len(data) - len(self._marker)))
        if newline >= 0 and self._marker.startswith(data[newline + 1 :]):
            return newline + 1
        return len(data)


class BodyCutter:
    """A reply of known length: the first ``length`` bytes are its body, the rest tap lines.

    The piece that completes the body is held back to the end of the reply: an agent that has it all
    may hang up, and its call would then look cancelled.
    """

    def __init__(self, length: int, nonce: str) -> None:
        self.lines: list[str] = []
        self.held = b""
        self._missing = length
        self._marker = marker(nonce)
        self._tail = bytearray()

    def feed(self, data: bytes) -> bytes:
        body = data[: self._missing]
        self._missing -= len(body)
        self._tail += data[len(body) :]
        if self._missing:
            return body
        self.held += body
        return b""

    def finish(self) -> bytes:
        held, self.held = self.held, b""
        for line in bytes(self._tail).split(b"\n")[:-1]:  # Without its newline a line is torn.
            if line.startswith(self._marker):
                self.lines.append(line[len(self._marker) :].decode("utf-8", "replace"))
        return held


class NoCutter:
    """A reply that holds no tap lines and whose end only the connection tells."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.held = b""

    def feed(self, data: bytes) -> bytes:
        return data

    def finish(self) -> bytes:
        return b""
