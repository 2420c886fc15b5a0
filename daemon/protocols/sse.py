"""Server-sent events: framing of a recorded ``text/event-stream`` body.

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


def events(body: bytes) -> list[Event]:
    """Return the events of ``body`` that carry data.

    Lines end with LF, CRLF or CR and are cut as bytes, before decoding; invalid UTF-8 is replaced
    (U+FFFD), as the standard says.
    """
    found: list[Event] = []
    name, data = "", list[bytes]()
    # Bytes are split at LF, CRLF and CR only; str.splitlines would also cut at U+2028 and others.
    for line in [*body.removeprefix(BOM).splitlines(), b""]:
        if not line:
            if data:
                found.append(Event(name or "message", b"\n".join(data).decode("utf-8", "replace")))
            name, data = "", []
            continue
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode("utf-8", "replace")
    return found
