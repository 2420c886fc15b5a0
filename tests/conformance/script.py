"""What a case consists of: what the client sends and when it leaves, what the upstream answers."""

from dataclasses import dataclass
from typing import Literal

from sidecar.traces.record import Outcome

Headers = tuple[tuple[str, str], ...]
End = Literal["keep", "fin", "rst", "hang"]
Place = Literal["before the head", "in the head", "after the head", "in the body", "in a chunk"]

CASE_HEADER = "x-case"
"""Names the case in every request; the upstream looks up in it what to answer."""


@dataclass(frozen=True)
class Leave:
    """When and how the client breaks its connection off."""

    when: Literal["half asked", "asked", "head", "body"]
    """Half of the request's body sent; all of it has arrived upstream; the reply's head has come;
    all of its body that the upstream sends has come."""
    how: Literal["fin", "rst", "half-close"] = "fin"
    """``half-close``: sends no more, but reads on."""


@dataclass(frozen=True)
class Ask:
    """One request."""

    method: str
    target: str
    headers: Headers = ()
    body: bytes | None = None
    framing: Literal["length", "chunked"] = "length"
    version: str = "HTTP/1.1"
    grain: Literal["whole", "bytes", "pieces"] = "whole"
    """How it is cut into segments; ``bytes``: head and body one by one."""
    expects: bool = False
    """Waits for ``100 Continue`` before it sends the body."""
    leave: Leave | None = None
    run: str | None = None
    """Through the sidecar the target has the prefix ``/r/<run>``; directly it has none."""

    @property
    def headless(self) -> bool:
        """Its reply has no body whatever the reply's headers say."""
        return self.method == "HEAD"


@dataclass(frozen=True)
class Reply:
    """One reply, or, with ``raw``, bytes that need not be one."""

    pieces: tuple[bytes, ...] = ()
    """The body as the server's application hands it over."""
    status: str = "200 OK"
    headers: Headers = ()
    """Without those that frame the body."""
    framing: Literal["none", "length", "chunked", "close"] = "length"
    generated: bool = False
    """Comes from the engine, so it has tokens that the tap can tell."""
    grain: Literal["pieces", "byte chunks", "byte segments"] = "pieces"
    raw: tuple[bytes, ...] = ()
    early: bool = False
    """Sent as soon as the request's head is there."""
    wait: float = 0.0
    """Seconds before the head."""
    gap: float = 0.0
    """Seconds between head and body."""
    last_gap: float = 0.0
    """Seconds between the body and what ends it."""
    stop: Place | None = None
    """Where it stops for good; ``end`` says how."""
    end: End = "keep"

    @property
    def streamed(self) -> bool:
        """It is an event stream."""
        return any(value.startswith("text/event-stream") for _, value in self.headers)


@dataclass(frozen=True)
class Case:
    """One or several requests on one connection, and what the records must say of them."""

    protocol: str
    """``other``: no model call."""
    stream: bool
    kind: str
    asks: tuple[Ask, ...]
    replies: tuple[Reply, ...]
    outcome: Outcome = "complete"
    pipelined: bool = False
    refused: bool = False
    """Runs when nobody listens at the upstream's port any more."""
    heavy: bool = False
    """Moves megabytes."""
    patience: float = 20.0
    """Seconds after which the client gives up."""

    @property
    def id(self) -> str:
        form = "streamed" if self.stream else "whole"
        return "/".join((self.protocol, form, self.kind)).replace(" ", "-")

    @property
    def leaves(self) -> bool:
        return any(ask.leave for ask in self.asks)
