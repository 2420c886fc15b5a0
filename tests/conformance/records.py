"""What the trace shards must say of a case: one record for each call, of exactly what went by."""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from sidecar.access.redact import REDACTED, is_secret
from sidecar.traces.reader import read_records
from sidecar.traces.record import Body, Exchange, Outcome
from tests.conformance.client import Received, head
from tests.conformance.http1 import fields
from tests.conformance.script import CASE_HEADER, Case
from tests.conformance.upstream import Run

Digest = tuple[int, str]
Fields = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Recorded:
    """One record, with its bodies as length and digest: some are 20 MB long."""

    route: str
    run: str | None
    method: str
    path: str
    outcome: Outcome
    started: float
    request: Digest | None
    status: int | None
    headers: Fields
    reply: Digest | None
    reply_headers: Fields
    tap: tuple[str, ...]


@dataclass(frozen=True)
class Expected:
    """What a run has shown of one call."""

    method: str
    target: str
    headers: Fields
    request: Digest
    status: int | None
    reply_headers: Fields
    reply: Digest
    reply_whole: bool
    reply_held: bool
    """The head waits for the whole body, whose length changes; here that never came."""
    tap: tuple[str, ...] | None
    """None: not told by the upstream in these words."""


def digest(data: bytes | bytearray) -> Digest:
    return len(data), sha256(data).hexdigest()


def read(traces: Path) -> dict[str, list[Recorded]]:
    """Return the records by case, in the order in which the calls began.

    Raises:
        ValueError: a record can't be read.
    """
    found: dict[str, list[Recorded]] = {}
    for exchange in _exchanges(traces):
        case = next((v for k, v in exchange.request.headers if k == CASE_HEADER), None)
        if case is not None:
            found.setdefault(case, []).append(_recorded(exchange))
    for records in found.values():
        records.sort(key=lambda record: record.started)
    return found


def expected(run: Run, received: Received, port: int) -> list[Expected]:
    """Return what the records of a run must say, in the order of its calls.

    ``port``: the sidecar's, which the client connected to.
    """
    replies = [message for message in received.messages if not message.interim]
    replies = replies or received.messages
    calls = []
    for k, ask in enumerate(run.case.asks):
        reply = replies[k] if k < len(replies) else None
        arrival = run.arrivals[k] if k < len(run.arrivals) else None
        calls.append(
            Expected(
                method=ask.method,
                target=ask.target,
                headers=_redacted(head(ask, run.case, port, through=True)),
                request=digest(_asked(run, k)),
                status=int(reply.start.split(b" ")[1]) if reply is not None else None,
                reply_headers=_redacted(reply.head) if reply is not None else (),
                reply=digest(reply.body if reply is not None else b""),
                reply_whole=reply is not None and (reply.complete or received.end != "left"),
                reply_held=run.way == "api" and reply is None and not run.case.stream,
                tap=tuple(arrival.tap) if arrival and run.way != "api" else None,
            )
        )
    return calls


def _asked(run: Run, number: int) -> bytes:
    """Return the body that the client sent: all of it, or what of it arrived."""
    body = run.case.asks[number].body or b""
    if run.case.refused and run.way != "api":
        return b""  # mitmproxy connects before it reads a body that is to be streamed.
    leave = run.case.asks[number].leave
    if leave is None or leave.when != "half asked":
        return body
    # To add fields to a request the sidecar waits for all of it.
    return b"" if run.way == "api" else body[: len(body) // 2]


def differences(case: Case, calls: list[Expected], records: list[Recorded]) -> list[str]:
    """Say what is wrong with the records of a case, a line for each."""
    if len(records) != len(calls):
        return [f"record: {len(records)} instead of {len(calls)}"]
    found = []
    for call, record, ask in zip(calls, records, case.asks, strict=True):
        model_call = case.protocol != "other"
        pairs: list[tuple[str, object, object]] = [
            ("route", record.route, case.protocol),
            ("run", record.run, ask.run),
            ("method", record.method, call.method),
            ("path", record.path, call.target),
            ("outcome", record.outcome, case.outcome),
            ("headers", record.headers, call.headers),
            ("request", record.request, call.request if model_call else None),
            ("tap", record.tap, record.tap if call.tap is None else call.tap),
        ]
        if not call.reply_held:
            pairs.append(("status", record.status, call.status))
            pairs.append(("reply headers", record.reply_headers, call.reply_headers))
        if not model_call or record.status is None:
            pairs.append(("reply", record.reply, None))
        elif call.reply_whole and not call.reply_held:
            pairs.append(("reply", record.reply, call.reply))
        found += [
            f"record: {name} is {got!r:.200}, expected {wanted!r:.200}"
            for name, got, wanted in pairs
            if got != wanted
        ]
    return found


def _exchanges(traces: Path) -> Iterator[Exchange]:
    for path in sorted(traces.glob("*.jsonl.zst")):
        for located in read_records(path):
            if located.record is None:
                raise ValueError(f"{path.name}: {located.error}")
            if isinstance(located.record, Exchange):
                yield located.record


def _recorded(exchange: Exchange) -> Recorded:
    request, response = exchange.request, exchange.response
    return Recorded(
        route=exchange.route,
        run=exchange.session.run,
        method=request.method,
        path=request.path,
        outcome=exchange.outcome,
        started=exchange.started,
        request=_body(request.body),
        status=response.status if response is not None else None,
        headers=tuple(request.headers),
        reply=_body(response.body) if response is not None else None,
        reply_headers=tuple(response.headers) if response is not None else (),
        tap=tuple(exchange.tap),
    )


def _redacted(head: bytes) -> Fields:
    """Return the header lines of a head as a record has them."""
    texts = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in fields(head))
    return tuple((name, value if not is_secret(name) else REDACTED) for name, value in texts)


def _body(body: Body | None) -> Digest | None:
    return digest(body.raw()) if body is not None else None
