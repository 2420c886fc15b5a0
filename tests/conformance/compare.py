"""What counts as a difference between a run through the sidecar and the direct one.

Every byte that the client gets and every byte that the upstream gets counts, in order, and so does
the end of a connection (FIN, RST, refused, silence). Set aside is only what belongs to one hop
(RFC 9110, section 7.6.1; RFC 9112, sections 7 and 9) or is documented:

* chunks: where they begin and end, and their extensions. That a body is chunked counts, and so does
  whether its end came;
* which TCP connection carries a message, and whether an idle one is kept: how a connection ends
  counts only where the message needs it (it is incomplete, lasts until the end of the connection,
  or one side has said ``Connection: close``);
* towards the upstream, ``Host`` is the authority that was connected to: both runs must have exactly
  that, or both what the client wrote;
* towards the upstream, a model call has ``accept-encoding: identity`` (replies are captured as
  text) and, with the token tap, ``x-ridealong-tap`` as the last header; both are checked, then the
  client's own ``accept-encoding`` is put back;
* towards the upstream, with the ``api`` token source, a chat or legacy completion has
  ``"return_token_ids":true`` and ``"logprobs":…`` added at the end of its JSON, with the
  ``content-length`` that makes;
* whether the upstream sees that a client has gone as FIN or as RST, and when: that it sees it
  counts (``Seen.gone``), the time is measured.

``KNOWN`` lists what differs nevertheless.
"""

import dataclasses
import gzip
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import brotli
import zstandard

from tests.conformance.client import Received
from tests.conformance.http1 import Message
from tests.conformance.script import Case
from tests.conformance.upstream import Run
from tokenization.tap import wire

_ADDED_FIELDS = re.compile(rb',?"return_token_ids":true,"logprobs":(true|0)(?=\s*\}\s*$)')
_DECODE: dict[bytes, Callable[[bytes], bytes]] = {
    b"gzip": gzip.decompress,
    b"zstd": zstandard.decompress,
    b"br": brotli.decompress,
}
_TAP = wire.HEADER.encode()


@dataclass(frozen=True)
class Text:
    """One message as it is compared."""

    head: bytes
    framing: str
    body: bytes
    complete: bool
    trailers: bytes = b""


@dataclass(frozen=True)
class Seen:
    """One run as it is compared."""

    replies: tuple[Text, ...]
    stray: bytes
    end: str
    requests: tuple[Text, ...]
    gone: bool


@dataclass(frozen=True)
class Known:
    """A difference that is there by design or by mitmproxy's."""

    reason: str
    kinds: tuple[str, ...]
    """Of the cases it concerns."""
    through: Callable[[Seen], Seen]
    """What is seen directly to what must be seen through the sidecar."""
    ways: tuple[str, ...] = ("tap", "api", "none")
    streams: tuple[bool, ...] = (True, False)


def seen(run: Run, received: Received, port: int) -> Seen:
    """Return what a run has shown; ``port``: the upstream's, that the requests came in by."""
    case = run.case
    gone = any(arrival.left_at is not None for arrival in run.arrivals)
    texts = [_reply(message) for message in received.messages]
    if received.end == "left":
        texts = [_until_left(case, text) for text in texts]
    return Seen(
        replies=tuple(texts),
        stray=received.stray,
        end=received.end if _end_counts(case, received) else "kept or closed",
        requests=tuple(_request(run, k, port) for k in range(len(run.arrivals))),
        gone=gone and case.leaves,
    )


def differences(direct: Seen, through: Seen) -> list[str]:
    """Say what differs, a line for each; short enough to read."""
    found = []
    for name in ("end", "gone", "stray"):
        a, b = getattr(direct, name), getattr(through, name)
        if a != b:
            found.append(f"{name}: {_short(a)} directly, {_short(b)} through the sidecar")
    for name in ("replies", "requests"):
        found += _texts(name, getattr(direct, name), getattr(through, name))
    return found


def _texts(name: str, direct: tuple[Text, ...], through: tuple[Text, ...]) -> Iterator[str]:
    if len(direct) != len(through):
        counts = f"{len(direct)} directly, {len(through)} through the sidecar"
        yield f"{name}: {counts}: {through!r:.300}"
    for index, (a, b) in enumerate(zip(direct, through, strict=False)):
        for field in dataclasses.fields(Text):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if x != y:
                where = f"{name}[{index}].{field.name}"
                yield f"{where}: {_short(x, y)} directly, {_short(y, x)} through the sidecar"


def _short(value: object, other: object = b"") -> str:
    """Show a value; of a long one, from where it differs from the other."""
    if not isinstance(value, bytes) or not isinstance(other, bytes):
        return repr(value)
    start = next((k for k, (a, b) in enumerate(zip(value, other, strict=False)) if a != b), None)
    start = min(len(value), len(other)) if start is None else start
    start = max(0, start - 20)
    return f"{len(value)} bytes …{value[start : start + 90]!r}"


def _reply(message: Message) -> Text:
    return Text(
        message.head, message.framing, bytes(message.body), message.complete, message.trailers
    )


def _until_left(case: Case, text: Text) -> Text:
    """Cut a reply off where the client wanted to leave; what it got beyond is chance."""
    ask = next(ask for ask in case.asks if ask.leave)
    assert ask.leave is not None
    if ask.leave.when != "body":
        return dataclasses.replace(text, body=b"", complete=False)
    want = sum(len(piece) for piece in case.replies[0].pieces)
    return dataclasses.replace(text, body=text.body[:want], complete=False, trailers=b"")


def _end_counts(case: Case, received: Received) -> bool:
    if case.leaves:
        return True
    replies = [message for message in received.messages if not message.interim]
    if len(replies) < len(case.asks) or not all(message.complete for message in replies):
        return True
    closing = any(
        name.lower() == "connection" and value.lower() == "close"
        for ask in case.asks
        for name, value in ask.headers
    )
    last = replies[-1]
    return (
        closing
        or last.framing == "close"
        or (last.value(b"connection") or b"").lower() == b"close"
        or case.asks[-1].version == "HTTP/1.0"
    )


def _request(run: Run, number: int, port: int) -> Text:
    """Return the request of this number as it arrived, without what is set aside."""
    message = run.arrivals[number].message
    lines = message.head.split(b"\r\n")[:-2]
    host = b"Host: 127.0.0.1:%d" % port
    lines = [b"Host: <authority>" if line == host else line for line in lines]
    if run.way != "direct" and run.case.protocol != "other":
        lines = _without_what_the_sidecar_asks(run, number, lines)
    body = bytes(message.body)
    if run.way == "api" and run.case.protocol in ("chat", "completions"):
        body = _ADDED_FIELDS.sub(b"", body)
        longer = b"content-length: %d" % len(message.body)
        length = b"Content-Length: %d" % len(body)
        lines = [length if line.lower() == longer else line for line in lines]
    head = b"\r\n".join([*lines, b"", b""])
    return Text(head, message.framing, body, message.complete, message.trailers)


def _without_what_the_sidecar_asks(run: Run, number: int, lines: list[bytes]) -> list[bytes]:
    """Take back the two documented changes; leave anything else for the comparison to find."""
    if run.way == "tap" and lines[-1].startswith(_TAP + b": "):
        nonce = lines.pop()[len(_TAP) + 2 :].decode()
        if not wire.NONCE.fullmatch(nonce):
            lines.append(b"<a malformed nonce>")
    ask = run.case.asks[min(number, len(run.case.asks) - 1)]
    own = [f"{k}: {v}".encode() for k, v in ask.headers if k.lower() == "accept-encoding"]
    place = [k for k, line in enumerate(lines) if line.lower().startswith(b"accept-encoding:")]
    if [lines[k].lower() for k in place] == [b"accept-encoding: identity"]:
        lines[place[0] : place[0] + 1] = own[:1]
    return lines


def _refused(direct: Seen) -> Seen:
    return dataclasses.replace(direct, end="rst")


def _without_stray(direct: Seen) -> Seen:
    return dataclasses.replace(direct, stray=b"")


def _without_trailers(direct: Seen) -> Seen:
    replies = tuple(dataclasses.replace(text, trailers=b"\r\n") for text in direct.replies)
    return dataclasses.replace(direct, replies=replies)


def _unpacked(direct: Seen) -> Seen:
    (text,) = direct.requests
    coding = re.search(rb"\r\nContent-Encoding: (\w+)", text.head)
    assert coding is not None
    body = _DECODE[coding[1]](text.body)
    head = text.head.replace(coding[0], b"")
    head = re.sub(rb"(?<=\r\nContent-Length: )\d+", b"%d" % len(body), head)
    return dataclasses.replace(direct, requests=(dataclasses.replace(text, head=head, body=body),))


def _nothing_asked(direct: Seen) -> Seen:
    return dataclasses.replace(direct, requests=(), gone=False)


def _nothing_replied(direct: Seen) -> Seen:
    return dataclasses.replace(direct, replies=())


def _stayed(direct: Seen) -> Seen:
    return dataclasses.replace(direct, gone=False)


def _without_expect(direct: Seen) -> Seen:
    requests = tuple(
        dataclasses.replace(text, head=text.head.replace(b"\r\nExpect: 100-continue", b""))
        for text in direct.requests
    )
    return dataclasses.replace(direct, requests=requests)


KNOWN: tuple[Known, ...] = (
    Known(
        "The client has connected to the sidecar by the time that the upstream refuses: it sees "
        "its connection break, not a refusal.",
        ("refused",),
        _refused,
    ),
    Known(
        "mitmproxy reads a head before it passes it on: of half a head nothing arrives.",
        ("upstream FIN in the head", "upstream RST in the head"),
        _without_stray,
    ),
    Known(
        "mitmproxy answers Expect: 100-continue itself (RFC 9110, section 10.1.1, lets a proxy).",
        ("expect 100-continue",),
        _without_expect,
    ),
    Known(
        "What follows the end of a reply belongs to no message: mitmproxy drops it.",
        ("trailing garbage",),
        _without_stray,
    ),
    Known(
        "Trailers of a reply are dropped (RFC 9110, section 6.5.1, lets a proxy).",
        ("trailers",),
        _without_trailers,
    ),
    Known(
        "With tokens the last event waits for the end of the reply, a moment later, so that they "
        "are recorded: a client that leaves at it leaves a reply that has ended.",
        ("client FIN after the last event",),
        _stayed,
        ("tap", "api"),
    ),
    Known(
        "To add fields to a request, the api source waits for all of it.",
        ("client FIN in the request",),
        _nothing_asked,
        ("api",),
    ),
    Known(
        "To add fields to a compressed request, the api source sends it on uncompressed.",
        ("gzip request", "zstd request", "br request"),
        _unpacked,
        ("api",),
    ),
    Known(
        "To take fields out of a reply that is no stream, the api source waits for all of it: a "
        "broken one has not begun.",
        (
            "client FIN after the head",
            "client FIN in the reply",
            "client RST in the reply",
            "upstream FIN after the head",
            "upstream FIN in the body",
            "upstream RST after the head",
            "upstream RST in the body",
        ),
        _nothing_replied,
        ("api",),
        (False,),
    ),
)


def known(case: Case, way: str) -> Known | None:
    """Return the known difference of a case by a way through a sidecar."""
    return next(
        (
            known
            for known in KNOWN
            if case.kind in known.kinds and way in known.ways and case.stream in known.streams
        ),
        None,
    )
