"""Server-sent events: framing of a ``text/event-stream`` body.

Follows WHATWG HTML, "Interpreting an event stream", with one exception: an event that the end of
the body cuts off before its blank line is kept, because recorded streams may lack the last line.
"""

from dataclasses import dataclass

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Event:
    """One event. ``name`` is ``message`` where the stream names none."""

    name: str
    data: str


class Parser:
    """Reads a stream chunk by chunk; a chunk may end anywhere, inside a character too.

    Lines end with LF, CRLF or CR and are cut as bytes, before decoding; invalid UTF-8 is replaced
    (U+FFFD), as the standard says.
    """

    def __init__(self) -> None:
        self._line: list[bytes] = []
        """Pieces of the line that has not ended yet."""
        self._after_cr = False
        self._first = True
        self._name = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[Event]:
        """Take the next bytes; returns the events they complete that carry data."""
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        found: list[Event] = []
        # bytes.splitlines cuts at LF, CRLF and CR only; str.splitlines would cut at U+2028 too.
        for piece in chunk.splitlines(keepends=True):
            line = piece.rstrip(b"\r\n")
            self._line.append(line)
            if len(line) < len(piece):
                self._end_line(found)
        self._after_cr = self._after_cr or chunk.endswith(b"\r")
        return found

    def close(self) -> list[Event]:
        """Say that the stream has ended; returns the event that was cut off, if there is one."""
        found: list[Event] = []
        if self._line:
            self._end_line(found)
        self._dispatch(found)
        return found

    def _end_line(self, found: list[Event]) -> None:
        line = b"".join(self._line)
        self._line = []
        if self._first:
            line = line.removeprefix(BOM)
            self._first = False
        if not line:
            self._dispatch(found)
            return
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value

    def _dispatch(self, found: list[Event]) -> None:
        if self._data:
            name = self._name.decode("utf-8", "replace") or "message"
            found.append(Event(name, b"\n".join(self._data).decode("utf-8", "replace")))
        self._name, self._data = b"", []


def events(body: bytes) -> list[Event]:
    """Return the events of a whole body that carry data."""
    parser = Parser()
    return [*parser.feed(body), *parser.close()]
