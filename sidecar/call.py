"""One exchange while it goes by: what was teed off so far, and the record it becomes. No I/O."""

import os
import time

from sidecar.access import redact
from sidecar.routing import routes
from sidecar.tokens import apitokens
from sidecar.tokens.splice import Field, splice
from sidecar.tokens.strip import BodyCutter, Cutter, NoCutter, SseCutter
from sidecar.traces.record import (
    Body,
    Exchange,
    Outcome,
    Request,
    Response,
    Route,
    Session,
    TapSource,
)
from tokenization.tap import wire

Headers = list[tuple[str, str]]

_LENGTH_DIGITS = 18  # No body is an exabyte long, and Python refuses to parse far longer numbers.


def new_id() -> str:
    """Return a UUIDv7 as 32 hex characters: Unix milliseconds, then random bits (RFC 9562)."""
    milliseconds = time.time_ns() // 1_000_000
    bits = (milliseconds << 80) | int.from_bytes(os.urandom(10))
    bits = bits & ~(0xF << 76) | (0x7 << 76)
    bits = bits & ~(0x3 << 62) | (0x2 << 62)
    return f"{bits:032x}"


def new_nonce() -> str:
    """Return what marks one call's tap lines: 128 random bits that no model output can guess."""
    return os.urandom(16).hex()


class Call:
    """The state of one exchange, fed by the proxy in the order in which things happen."""

    def __init__(
        self,
        *,
        route: Route,
        session: Session,
        method: str,
        headers: Headers,
        started: float,
    ) -> None:
        self.route: Route = route
        self.nonce: str | None = None
        """What marks the tap's lines; None: the tap was not asked."""
        self.upstream = ""
        """URL of the model server."""
        self.path = ""
        """Path and query there."""
        self.authorization: str | None = None
        """The credentials it was asked with."""
        self.renamed: tuple[str, str] | None = None
        """The model's name before and after it was changed."""
        self.chunks = 0
        """Pieces of the reply's body that came from upstream."""
        self.status: int | None = None
        self.streamed = False
        """The reply is an event stream."""
        self.framed = False
        """The reply says itself where it ends."""
        self.whole = False
        """The reply's body changes its length on the way, so all of it has to be here first."""
        self.pulled: list[str] | None = None
        """Tap lines fetched after the client had gone."""
        self.rest = b""
        """The last bytes of a reply that has ended, yet to go to the agent."""
        self.fault: str | None = None
        """What went wrong in capturing the reply; the record is not the whole truth then."""
        self.recorded = False
        """Its record has been handed on."""

        self._id = new_id()
        self._session = session
        self._method = method
        self._headers = headers
        self._started = started
        self._request = bytearray()
        self._reply = bytearray()
        self._reply_headers: Headers = []
        self._first_byte: float | None = None
        self._added: frozenset[Field] | None = None
        self._cutter: Cutter = NoCutter()
        self._last_event = b""
        self._holds = True
        """A stream's last event is held back."""

    def request_chunk(self, data: bytes) -> None:
        """Keep a piece of the request's body."""
        self._request += data

    def ask_in_text(self, text: bytes) -> bytes | None:
        """Ask for tokens by fields of the request (``sidecar.tokens.splice``).

        Returns the body that is to go upstream; None: the request stays as it is.
        """
        spliced = splice(self.route, text)
        if spliced is None:
            return None
        self._added = spliced.added
        return spliced.text

    @property
    def asks_tokens(self) -> bool:
        """Tokens were asked for, in whichever way."""
        return self.nonce is not None or self._added is not None

    def begin_reply(self, status: int, headers: Headers, at: float) -> int | None:
        """Take the reply's status and headers, and decide how its body is cut.

        Returns the true length of the body where the tap's lines follow it; the reply that goes on
        to the agent must then announce this length. A tap header that can't be true is ignored.
        Either way ``wire.LENGTH_HEADER`` answers this sidecar and must not go on.
        """
        self.status, self._first_byte = status, at
        fields = {name.lower(): value for name, value in headers}
        self.streamed = fields.get("content-type", "").startswith("text/event-stream")
        length = tapped = None
        if "transfer-encoding" in fields:
            self.framed = fields["transfer-encoding"].lower() == "chunked"
        else:
            length = _length(fields.get("content-length"))
            self.framed = length is not None
        if self.nonce and length is not None and not self.streamed:
            tapped = _length(fields.get(wire.LENGTH_HEADER))
            if tapped is not None and tapped > length:
                tapped = None
        added = self._added
        if added is not None and (status != 200 or "content-encoding" in fields):
            added = None
        if added is not None and self.streamed:
            self._cutter, self.whole = apitokens.SseCutter(added), length is not None
        elif added is not None and fields.get("content-type", "").startswith("application/json"):
            self._cutter, self.whole = apitokens.BodyCutter(added), True
        elif self.streamed and self.nonce and "content-encoding" not in fields:
            self._cutter, self.whole = SseCutter(self.nonce), length is not None
        elif not self.streamed and length is not None:
            self._cutter = BodyCutter(length if tapped is None else tapped, self.nonce or "")
        self._reply_headers = [
            (
                name,
                str(tapped) if tapped is not None and name.lower() == "content-length" else value,
            )
            for name, value in headers
            if self.nonce is None or name.lower() != wire.LENGTH_HEADER
        ]
        return tapped

    def reply_chunk(self, data: bytes) -> bytes:
        """Take a piece of the reply's body; return what goes on to the agent now."""
        self.chunks += 1
        passed = self._cutter.feed(data)
        if self._last_event:
            self._last_event += passed
            return b""
        if self._holds and self._cutter.lines and self.streamed:
            # The engine ends a tapped stream right after its last event. Held back until then, the
            # agent can't hang up before the call is known to be complete and is recorded.
            at_line_start = self._reply[-1:] in (b"", b"\n")
            last = routes.last_event(self.route, passed, at_line_start)
            if last >= 0:
                passed, self._last_event = passed[:last], passed[last:]
        self._reply += passed
        return passed

    @property
    def holds_end(self) -> bool:
        """A stream's last event has come and not been returned."""
        return bool(self._last_event)

    def let_end_go(self) -> bytes:
        """Return what was held back of a stream that does not end after its last event."""
        end, self._last_event, self._holds = self._last_event, b"", False
        self._reply += end
        return end

    def end_reply(self) -> None:
        """No more comes of the reply: ``rest`` is now what was held back of it."""
        self.rest = self._last_event + self._cutter.finish()
        self._last_event = b""
        self._reply += self.rest
        if self.whole:
            length = str(len(self._reply))
            self._reply_headers = [
                (name, length if name.lower() == "content-length" else value)
                for name, value in self._reply_headers
            ]

    @property
    def held(self) -> bytes:
        """What has come of the reply and not been returned to go on."""
        return self._last_event + self._cutter.held

    def agent_saw_the_end(self) -> bool:
        """Say whether the agent has received the last event of a stream, whole."""
        reply = bytes(self._reply)
        return (
            self.streamed
            and reply.endswith((b"\n\n", b"\r\n\r\n"))
            and routes.last_event(self.route, reply) >= 0
        )

    @property
    def tap_lines(self) -> list[str]:
        """The lines with tokens, wherever they came from."""
        return self.pulled if self.pulled is not None else self._cutter.lines

    @property
    def bytes_in(self) -> int:
        """Bytes of the request's body so far."""
        return len(self._request)

    @property
    def bytes_out(self) -> int:
        """Bytes of the reply's body so far, without tap lines."""
        return len(self._reply)

    def record(self, outcome: Outcome, ended: float, error: str | None = None) -> Exchange:
        """Return the record of this exchange, without credentials."""
        bodies = self.route != "other"
        secrets = redact.Secrets(self._headers + self._reply_headers, self.path)
        response = None
        if self.status is not None:
            response = Response(
                status=self.status,
                headers=_clean(self._reply_headers, secrets),
                body=Body.of(self._reply_body(secrets)) if bodies else None,
            )
        return Exchange(
            id=self._id,
            route=self.route,
            session=self._session,
            upstream=self.upstream,
            request=Request(
                method=self._method,
                path=secrets.remove(redact.url(self.path)),
                headers=_clean(self._headers, secrets),
                body=Body.of(bytes(self._request)) if bodies else None,
            ),
            started=self._started,
            ended=ended,
            outcome=outcome,
            response=response,
            first_byte=self._first_byte,
            error=self._error_text(error or self.fault, secrets),
            tap=self.tap_lines,
            tap_source=self.token_source,
            renamed=self.renamed,
        )

    def _reply_body(self, secrets: redact.Secrets) -> bytes:
        """Return the reply's body as it is to be kept: errors may quote the agent's key."""
        body = bytes(self._reply)
        failed = self.status is not None and self.status >= 400
        return secrets.remove_bytes(body) if failed else body

    @staticmethod
    def _error_text(text: str | None, secrets: redact.Secrets) -> str | None:
        return None if text is None else secrets.remove(redact.message(text))

    @property
    def token_source(self) -> TapSource:
        """Where its tokens came from."""
        if not self.tap_lines:
            return "none"
        if self._added is not None:
            return "api"
        return "inline" if self.pulled is None else "pulled"


def _clean(fields: Headers, secrets: redact.Secrets) -> Headers:
    return [(name, secrets.remove(value)) for name, value in redact.headers(fields)]


def _length(value: str | None) -> int | None:
    if value is None or not value.isdecimal() or len(value) > _LENGTH_DIGITS:
        return None
    return int(value)
