"""What the sidecar writes: one JSON record per line, inside the zstd frames of a trace shard.

A record is the truth about one HTTP exchange, kept as raw as possible: nothing in it was parsed to
decide what the agent sees, so a bug in a later stage can be fixed and old shards re-read. Samples
are views built from records (see ``tokenization``).

Credentials are redacted before a record exists (``sidecar.access.redact``).
"""

import base64
from typing import Literal

import msgspec

SCHEMA_VERSION = 2
"""2: records in a shard may repeat parts of earlier ones (``repeats``)."""

Route = Literal["chat", "completions", "responses", "messages", "other"]
Outcome = Literal["complete", "cancelled", "upstream_error", "sidecar_stopped"]
Way = Literal["base_url", "proxy", "transparent", "local"]
TapSource = Literal["inline", "pulled", "api", "none"]


class Body(msgspec.Struct, frozen=True, omit_defaults=True):
    """Raw body bytes: ``text`` where they are UTF-8 (``zstdcat`` stays readable), else ``b64``."""

    text: str | None = None
    b64: str | None = None

    @classmethod
    def of(cls, raw: bytes) -> "Body":
        try:
            return cls(text=raw.decode("utf-8"))
        except UnicodeDecodeError:
            return cls(b64=base64.b64encode(raw).decode("ascii"))

    def raw(self) -> bytes:
        if self.b64 is not None:
            return base64.b64decode(self.b64)
        return (self.text or "").encode("utf-8")


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """The request as the agent sent it, after redaction and without the run's path prefix."""

    method: str
    path: str
    """Path and query as sent upstream, for example ``/v1/chat/completions``."""
    headers: list[tuple[str, str]]
    body: Body | None = None
    """None for auxiliary exchanges (``route == "other"``)."""


class Response(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reply as the agent received it: without the tap's lines and headers."""

    status: int
    headers: list[tuple[str, str]]
    body: Body | None = None


class Session(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who called, as far as the hot path knows without parsing bodies."""

    run: str | None = None
    """Run id: ``/r/<run>/`` path prefix, else the user name of the proxy credentials."""
    session: str | None = None
    """``x-ridealong-session`` header."""
    peer: str = ""
    """Client address ``host:port``; the weakest key."""
    way: Way = "base_url"
    """How the request reached the sidecar."""


Part = str | tuple[int, int]
"""A piece of a text: written out, or (start, length) in bytes of the base's text in UTF-8."""


class Delta(msgspec.Struct, frozen=True):
    """A text as the pieces in which it differs from another, and its CRC-32 in UTF-8."""

    crc: int
    parts: list[Part]


class Repeats(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a record shares with an earlier one of its shard, its base.

    Made and resolved by ``sidecar.traces.history``.
    """

    frame: int
    """Where the base lies: offset of its frame, number of its line in it."""
    line: int
    body: Delta | None = None
    """The request's body, against the base's."""
    tap: list[tuple[int, Delta]] = []
    """Index in ``tap`` and text of long tap lines: the first against the base's first and so on."""


class Exchange(msgspec.Struct, frozen=True, omit_defaults=True, tag="exchange"):
    """One HTTP exchange between the agent and the model server."""

    id: str
    """Call id, 32 hex characters, time-ordered (UUIDv7)."""
    route: Route
    session: Session
    upstream: str
    request: Request
    started: float
    """Unix seconds: request headers seen. ``first_byte`` and ``ended`` likewise."""
    ended: float
    outcome: Outcome
    response: Response | None = None
    """None when the upstream sent no response headers."""
    first_byte: float | None = None
    error: str | None = None
    tap: list[str] = []
    """The token tap's JSON lines, undecoded (``tokenization.tap.wire``), or with ``tap_source``
    ``api`` what was taken out of the reply of a stock vLLM (``sidecar.tokens.apitokens``)."""
    tap_source: TapSource = "none"
    """``pulled``: fetched from the tap's endpoint after the client had cancelled."""
    repeats: Repeats | None = None
    """Only in a shard: what has to be filled in from an earlier record."""
    renamed: tuple[str, str] | None = None
    """The model that the agent asked for and the one that was asked for instead; ``request.body``
    has the agent's."""
    v: int = SCHEMA_VERSION


class SidecarStarted(msgspec.Struct, frozen=True, omit_defaults=True, tag="sidecar_started"):
    """First record of every shard series: which sidecar wrote it, and what a crash had torn."""

    at: float
    sidecar: str
    """Host and pid."""
    upstream: str
    ridealong: str
    torn: list[str] = []
    """Shards of earlier sidecars in this folder whose last frame was incomplete."""
    lost: int = 0
    """Records that those sidecars are known to have taken and not written when they died."""
    v: int = SCHEMA_VERSION


class RecordsLost(msgspec.Struct, frozen=True, omit_defaults=True, tag="records_lost"):
    """Exchanges that could not be written (full disk, full queue); traffic went on."""

    at: float
    count: int
    reason: str
    v: int = SCHEMA_VERSION


Record = Exchange | SidecarStarted | RecordsLost

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def weight(record: Record) -> int:
    """Return about how many bytes the record's texts have."""
    match record:
        case SidecarStarted():
            return 256 + len(record.sidecar) + sum(map(len, record.torn))
        case RecordsLost():
            return 256 + len(record.reason)
    size = 1024 + sum(map(len, record.tap))
    for side in (record.request, record.response):
        if side is not None and side.body is not None:
            size += len(side.body.text or side.body.b64 or "")
    return size


def encode(record: Record) -> bytes:
    """Return the record as one JSON line, newline included."""
    return _encoder.encode(record) + b"\n"


def decode(line: bytes) -> Record:
    """Parse one line. Raises ``msgspec.DecodeError`` (``ValidationError`` for a wrong shape)."""
    return _decoder.decode(line)
