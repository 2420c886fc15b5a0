"""A streamed reply as JSON documents; the same for all protocols."""

from collections.abc import Iterator
from typing import Any

from daemon.protocols import shape, sse
from daemon.protocols.shape import ProtocolError

DONE = "[DONE]"
"""What ends the streams of chat and legacy completions; it stands as a document of this name."""


def documents(body: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each event's name and document.

    Raises:
        ProtocolError: an event is not a JSON object. A broken *last* event is left out instead:
            cancelled streams end anywhere.
    """
    events = sse.events(body)
    for position, event in enumerate(events, 1):
        if event.data.strip() == DONE:
            yield DONE, {}
            continue
        try:
            document = shape.decode(event.data)
        except ProtocolError:
            if position == len(events):
                return
            raise
        yield event.name, shape.fields(document, "event")
