"""What the sidecar writes: one JSON record per line, inside the zstd frames of a trace shard.

A record is the truth about one HTTP exchange, kept as raw as possible: nothing in it was parsed to
decide what the agent sees, so a bug in a later stage can be fixed and old shards re-read. Samples
are views built from records (see ``tokenization``).

Credentials are redacted before a record exists (``sidecar.redact``).
"""

import base64
from typing import Literal

import msgspec

SCHEMA_VERSION = 1

Route = Literal["chat", "completions", "responses", "messages", "other"]
Outcome = Literal["complete", "cancelled", "upstream_error", "sidecar_stopped"]
TapSource = Literal["inline", "pulled", "none"]


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
    """Run id: ``/r/<run>/`` path prefix."""
    session: str | None = None
    """``x-ridealong-session`` header."""
    peer: str = ""
    """Client address ``host:port``; the weakest key."""


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
    """The token tap's JSON lines, undecoded (``tokenization.tap.wire``)."""
    tap_source: TapSource = "none"
    """``pulled``: fetched from the tap's endpoint after the client had cancelled."""
    v: int = SCHEMA_VERSION


class SidecarStarted(msgspec.Struct, frozen=True, omit_defaults=True, tag="sidecar_started"):
    """First record of every shard series: which sidecar wrote it, and what a crash had torn."""

    at: float
    sidecar: str
    """Host and pid."""
    upstream: str
    ridealong: str
    torn: list[str] = []
    """Shards of earlier sidecars in this folder whose last frame is incomplete."""
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


def encode(record: Record) -> bytes:
    """Return the record as one JSON line, newline included."""
    return _encoder.encode(record) + b"\n"


def decode(line: bytes) -> Record:
    """Parse one line. Raises ``msgspec.DecodeError`` (``ValidationError`` for a wrong shape)."""
    return _decoder.decode(line)
