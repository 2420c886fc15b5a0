"""The matrix: four protocols, streamed and whole, by kind; and what only some of them have."""

import gzip
import random
from collections.abc import Iterator
from functools import cache

import brotli
import zstandard

from sidecar.traces.record import Outcome
from tests.conformance.bodies import CONTENTS, PATHS, PROTOCOLS, Content, Protocol
from tests.conformance.bodies import error as error_body
from tests.conformance.bodies import reply as reply_pieces
from tests.conformance.bodies import request as request_body
from tests.conformance.script import Ask, Case, Headers, Leave, Place, Reply

JSON: Headers = (("content-type", "application/json"),)
SSE: Headers = (("content-type", "text/event-stream; charset=utf-8"),)
_BIG = 20_000_000

# Status lines as uvicorn writes them; some with what else a client must see of them.
_ERRORS: dict[str, tuple[str, Headers]] = {
    "400": ("400 Bad Request", ()),
    "401": ("401 Unauthorized", (("www-authenticate", 'Bearer realm="vllm"'),)),
    "404": ("404 Not Found", ()),
    "413": ("413 Request Entity Too Large", ()),
    "422": ("422 Unprocessable Entity", ()),
    "429": ("429 Too Many Requests", (("retry-after", "7"), ("x-should-retry", "true"))),
    "500": ("500 Internal Server Error", ()),
    "503": ("503 Service Unavailable", (("Retry-After", "0"),)),
}


@cache
def all_cases() -> tuple[Case, ...]:
    """Return every case; ids are unique. With their large bodies they take some 300 MB."""
    cases = [case for p in PROTOCOLS for stream in (True, False) for case in _matrix(p, stream)]
    for protocol in PROTOCOLS:
        cases += [*_streams(protocol), *_wholes(protocol), *_sequences(protocol)]
    cases += _others()
    assert len({case.id for case in cases}) == len(cases)
    return tuple(cases)


def ask(protocol: Protocol, stream: bool, content: Content = "text", **more: object) -> Ask:
    """Return a plain model call as an SDK sends it; ``more`` are fields of ``Ask``."""
    fields: dict[str, object] = {
        "headers": (
            ("Accept", "application/json"),
            ("Accept-Encoding", "gzip, deflate"),
            ("User-Agent", "conformance/1"),
            ("Content-Type", "application/json"),
        ),
        "body": request_body(protocol, content, stream),
    }
    return Ask("POST", **({"target": PATHS[protocol]} | fields | more))  # type: ignore[arg-type]


def answer(
    protocol: Protocol, stream: bool, content: Content = "text", n: int = 1, **more: object
) -> Reply:
    """Return vLLM's reply to it; ``more`` are fields of ``Reply``."""
    fields: dict[str, object] = {
        "pieces": tuple(reply_pieces(protocol, content, stream, "seed 7", n)),
        "headers": SSE if stream else JSON,
        "framing": "chunked" if stream else "length",
        "generated": True,
    }
    return Reply(**(fields | more))  # type: ignore[arg-type]


def _matrix(protocol: Protocol, stream: bool) -> Iterator[Case]:
    """Yield what every protocol has, streamed and whole."""

    def case(
        kind: str,
        a: Ask | None = None,
        r: Reply | None = None,
        outcome: Outcome = "complete",
        **more: bool,
    ) -> Case:
        a = a or ask(protocol, stream)
        r = r or answer(protocol, stream)
        return Case(protocol, stream, kind, (a,), (r,), outcome, **more)

    def replying(**more: object) -> Reply:
        return answer(protocol, stream, **more)  # type: ignore[arg-type]

    for content in CONTENTS:
        yield case(content, ask(protocol, stream, content), replying(content=content))
    for name, (status, headers) in _ERRORS.items():
        body = error_body(protocol, int(name), f"Nein: “{name}” 漢")
        reply = Reply((body,), status, (*headers, *JSON))
        yield case(f"error {name}", r=reply)
    html = Reply(
        (b"<html>\r\n<h1>502</h1>\n",), "502 Bad Gateway", (("Content-Type", "text/html"),)
    )
    yield case("error html", r=html)
    yield case("error empty", r=Reply((), "500 Internal Server Error"))

    for how in ("fin", "rst"):
        shown = how.upper()
        silent = replying(stop="before the head", end="hang")
        yield case(
            f"client {shown} before the first byte",
            ask(protocol, stream, leave=Leave("asked", how)),
            silent,
            "cancelled",
        )
        yield case(
            f"client {shown} in the reply",
            ask(protocol, stream, leave=Leave("body", how)),
            replying(stop="in the body", end="hang"),
            "cancelled",
        )
        places: list[Place] = ["before the head", "in the head", "after the head", "in the body"]
        if stream:
            places.append("in a chunk")
        for place in places:
            yield case(
                f"upstream {shown} {place}",
                r=replying(stop=place, end=how),
                outcome="upstream_error",
            )
    yield case(
        "client FIN after the head",
        ask(protocol, stream, leave=Leave("head")),
        replying(stop="after the head", end="hang"),
        "cancelled",
    )
    yield case(
        "client FIN in the request",
        ask(protocol, stream, leave=Leave("half asked")),
        outcome="cancelled",
    )
    yield case(
        "client half-closes",
        ask(protocol, stream, leave=Leave("asked", "half-close")),
        replying(stop="before the head", end="hang"),
        "cancelled",
    )
    yield case("refused", outcome="upstream_error", refused=True)
    yield case("slow first byte", r=replying(wait=0.4))
    yield case("slow body", r=replying(gap=0.4))
    yield case("1-byte chunks", r=replying(framing="chunked", grain="byte chunks"))
    yield case("1-byte segments", r=replying(grain="byte segments"))
    yield case("request in 1-byte segments", ask(protocol, stream, grain="bytes"))
    yield case("chunked request", ask(protocol, stream, framing="chunked", grain="pieces"))
    yield case("reply until the connection ends", r=replying(framing="close", end="fin"))
    yield case(
        "upstream RST in a reply until then",
        r=replying(framing="close", stop="in the body", end="rst", generated=False),
        outcome="upstream_error",
    )
    yield case("run prefix", ask(protocol, stream, run="run-17.a_b"))
    if protocol in ("chat", "completions"):
        two = ask(protocol, stream, body=request_body(protocol, "text", stream, n=2))
        yield case("n=2", two, replying(n=2))
    yield case(
        "20 MB request", ask(protocol, stream, body=_big_request(protocol, stream)), heavy=True
    )
    yield case("20 MB reply", r=replying(pieces=_big_pieces(protocol, stream)), heavy=True)


def _streams(protocol: Protocol) -> Iterator[Case]:
    """Yield what only event streams have."""

    def case(kind: str, r: Reply, a: Ask | None = None, patience: float = 20.0) -> Case:
        asks = (a or ask(protocol, True),)
        return Case(protocol, True, kind, asks, (r,), patience=patience)

    def replying(**more: object) -> Reply:
        return answer(protocol, True, **more)  # type: ignore[arg-type]

    pieces = answer(protocol, True).pieces
    crlf = tuple(piece.replace(b"\n", b"\r\n") for piece in pieces)
    yield case("CRLF events", replying(pieces=crlf))
    ping = b'event: ping\ndata: {"type": "ping"}\n\n'
    if protocol != "messages":
        ping = b": ping - 2026-11-30\n\n"
    pinged = tuple(part for piece in pieces for part in (ping, piece))
    yield case("comments and pings", replying(pieces=pinged))
    tap_like = (b": 0123456789abcdef0123456789abcdef {}\n\n", *pieces)
    yield case("comments like the tap's", replying(pieces=tap_like))
    open_end = (*pieces[:-1], pieces[-1].rstrip(b"\n"))
    yield case("no blank line at the end", replying(pieces=open_end))
    yield case("events cut anywhere", replying(pieces=_cut(b"".join(pieces))))
    yield case("all events in one chunk", replying(pieces=(b"".join(pieces),)))
    failed = (*pieces[:3], b"data: " + error_body(protocol, 500, "engine dead") + b"\n\n")
    yield case("error in the stream", replying(pieces=failed))
    yield case("no events", replying(pieces=()))
    leaving = ask(protocol, True, leave=Leave("body"))
    yield case("client FIN after the last event", replying(last_gap=1.0), leaving)
    yield case("stream of known length", replying(framing="length", generated=False))

    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    head += b"Transfer-Encoding: Chunked\r\n\r\n"
    extended = tuple(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    yield case("chunk extensions", Reply(raw=(head, *extended, b"0;z\r\n\r\n")))
    if protocol == "messages":
        trailed = (head, *extended, b"0\r\nx-checksum: 1\r\n\r\n")
        yield case("trailers", Reply(raw=trailed), patience=3.0)
        hint = b"HTTP/1.1 103 Early Hints\r\nlink: </style.css>\r\n\r\n"
        yield case("early hints", Reply(raw=(hint, head, *extended, b"0\r\n\r\n")), patience=3.0)


def _wholes(protocol: Protocol) -> Iterator[Case]:
    """Yield what is tried once, with a reply that is no stream."""

    def case(kind: str, a: Ask | None = None, r: Reply | None = None) -> Case:
        asks, replies = (a or ask(protocol, False),), (r or answer(protocol, False),)
        return Case(protocol, False, kind, asks, replies)

    def asking(**more: object) -> Ask:
        return ask(protocol, False, **more)  # type: ignore[arg-type]

    def replying(**more: object) -> Reply:
        return answer(protocol, False, **more)  # type: ignore[arg-type]

    yield case("JSON in chunks", r=replying(framing="chunked"))
    yield case("upstream FIN after the reply", r=replying(end="fin"))
    yield case("upstream RST after the reply", r=replying(end="rst"))
    unauthorized = Reply((error_body(protocol, 401, "key"),), "401 Unauthorized", JSON, early=True)
    long = asking(body=b"{" + b" " * 500_000 + b"}", grain="pieces")
    yield case("reply before the end of the request", long, unauthorized)
    yield case("no content", r=Reply((), "204 No Content", (), "none"))
    yield case("trailing garbage", r=Reply(raw=(_GARBAGE,)))
    yield case("many and odd headers", asking(headers=_ODD_REQUEST), replying(headers=_ODD_REPLY))
    yield case("HTTP/1.0 client", asking(version="HTTP/1.0"))
    yield case("expect 100-continue", asking(expects=True))
    yield case("query", asking(target=f"{PATHS[protocol]}?beta=true&x=%2F&y"))
    body = request_body(protocol, "text", False)
    packed = {
        "gzip": gzip.compress(body, mtime=0),
        "zstd": zstandard.compress(body),
        "br": brotli.compress(body),
    }
    for name, data in packed.items():
        headers = (*asking().headers, ("Content-Encoding", name))
        yield case(f"{name} request", asking(body=data, headers=headers))
    zipped = gzip.compress(b"".join(replying().pieces), mtime=0)
    headers = (*JSON, ("content-encoding", "gzip"))
    yield case("gzip reply", r=replying(pieces=(zipped,), headers=headers))
    closing: Headers = (("Connection", "close"), *JSON)
    yield case("connection: close", asking(headers=closing), replying(end="fin", headers=closing))


def _sequences(protocol: Protocol) -> Iterator[Case]:
    """Yield several calls on one connection."""
    calls: tuple[tuple[bool, Content], ...] = (
        (True, "text"),
        (False, "tools"),
        (True, "reasoning"),
    )
    asks = tuple(ask(protocol, stream, content) for stream, content in calls)
    replies = tuple(answer(protocol, stream, content) for stream, content in calls)
    yield Case(protocol, True, "three calls on one connection", asks, replies)
    yield Case(protocol, True, "pipelined calls", asks, replies, pipelined=True)


def _others() -> Iterator[Case]:
    """Yield what is no model call."""

    def other(kind: str, a: Ask, r: Reply, **more: object) -> Case:
        return Case("other", False, kind, (a,), (r,), **more)  # type: ignore[arg-type]

    text: Headers = (("content-type", "text/plain"),)
    models = Reply((b'{"object":"list","data":[{"id":"smol"}]}',), headers=JSON)
    yield other(
        "HEAD /",
        Ask("HEAD", "/"),
        Reply((), headers=(*text, ("content-length", "17")), framing="none"),
    )
    yield other("GET /v1/models", Ask("GET", "/v1/models"), models)
    yield other("models with a run", Ask("GET", "/v1/models?x=1", run="a"), models)
    count = Ask("POST", "/v1/messages/count_tokens?beta=true", JSON, b'{"messages":[]}')
    yield other("count_tokens", count, Reply((b'{"input_tokens":14}',), headers=JSON))
    missing = Reply((b'{"detail":"Not Found"}',), "404 Not Found", JSON)
    yield other("unknown path", Ask("GET", "/nowhere/./%7e//x?a=b#c"), missing)
    yield other("unknown path, POST", Ask("POST", "/v1/nothing", JSON, b"\x00\xff" * 99), missing)
    for method in ("OPTIONS", "DELETE", "PUT", "PATCH", "BREW", "get"):
        body = b"x" if method in ("PUT", "PATCH") else None
        not_allowed = Reply((b"no",), "405 Method Not Allowed", (("allow", "POST"), *text))
        yield other(f"method {method}", Ask(method, "/v1/models", body=body), not_allowed)
    yield other("path of raw bytes", Ask("GET", "/caf\xc3\xa9?\xff"), missing)
    yield other("long path", Ask("GET", "/x?" + "q" * 8000), missing)
    yield other("large header", Ask("GET", "/x", (("x-large", "v" * 16_000),)), missing)
    yield other("OPTIONS *", Ask("OPTIONS", "*"), Reply((b"ok",)))
    upgrade: Headers = (
        ("Connection", "Upgrade"),
        ("Upgrade", "websocket"),
        ("Sec-WebSocket-Version", "13"),
        ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
    )
    required = Reply((b"no",), "426 Upgrade Required", (("upgrade", "h2c"),))
    yield other("websocket refused", Ask("GET", "/v1/responses", upgrade), required)
    yield other("GET on a model call", Ask("GET", PATHS["chat"]), missing)
    packed = Reply((gzip.compress(b"models", mtime=0),), headers=(("content-encoding", "gzip"),))
    accepting = (("Accept-Encoding", "gzip, br"),)
    yield other("gzip reply", Ask("GET", "/v1/models", accepting), packed)
    yield other("no reason phrase", Ask("GET", "/x"), Reply((b"ok",), "200 "))
    yield other(
        "not modified", Ask("GET", "/x"), Reply((), "304 Not Modified", (("etag", '"1"'),), "none")
    )
    yield other(
        "redirect", Ask("GET", "/x"), Reply((), "307 Temporary Redirect", (("location", "/y?z"),))
    )
    yield other("HTTP/1.0 client", Ask("GET", "/x", version="HTTP/1.0"), Reply((b"ok",), end="fin"))
    event_stream = Reply((b"data: 1\n\n", b": x\n\n"), headers=SSE, framing="chunked")
    yield other("event stream", Ask("GET", "/events"), event_stream)
    for how in ("fin", "rst"):
        for place in ("before the head", "after the head", "in the body"):
            broken = Reply((b"a" * 999,), stop=place, end=how)
            name = f"upstream {how.upper()} {place}"
            yield other(name, Ask("GET", "/x"), broken, outcome="upstream_error")
    silent = Reply(stop="before the head", end="hang")
    leaving = Ask("GET", "/x", leave=Leave("asked"))
    yield other("client FIN before the first byte", leaving, silent, outcome="cancelled")
    yield other("refused", Ask("GET", "/x"), models, refused=True, outcome="upstream_error")
    big = b"0123456789abcdef" * (_BIG // 16)
    yield other("20 MB both ways", Ask("PUT", "/x", body=big), Reply((big,)), heavy=True)
    three = (Ask("GET", "/1"), Ask("POST", "/2", JSON, b"{}"), Ask("HEAD", "/3"))
    bodies = (Reply((b"1",)), Reply((b"2", b"2"), framing="chunked"), Reply((b"",)))
    yield Case("other", False, "three requests on one connection", three, bodies)
    yield Case("other", False, "pipelined requests", three, bodies, pipelined=True)


_GARBAGE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}garbage"
)
_ODD_REPLY: Headers = (
    ("CONTENT-type", "application/json"),
    ("X-MiXeD", "a"),
    ("x-mixed", "b"),
    ("set-cookie", "a=1; Path=/"),
    ("Set-Cookie", "b=2"),
    ("x-empty", ""),
    ("x-latin", "caf\xe9"),
    *((f"X-Many-{k}", str(k)) for k in range(60)),
)


_ODD_REQUEST: Headers = (
    ("content-type", "application/json"),
    ("accept-encoding", "br"),
    ("x-API-key", "sk-secret"),
    ("authorization", "Bearer sk-secret"),
    ("X-Dup", "1"),
    ("x-dup", "2"),
    ("X-Empty", ""),
    ("X-Latin", "caf\xe9"),
    ("cookie", "a=1"),
    *((f"x-Stainless-{k}", "v" * k) for k in range(60)),
)


def _cut(body: bytes) -> tuple[bytes, ...]:
    """Cut anywhere: inside events, lines and characters."""
    rng, pieces = random.Random(7), []
    while body:
        size = rng.randint(1, 40)
        pieces.append(body[:size])
        body = body[size:]
    return tuple(pieces)


def _big_request(protocol: Protocol, stream: bool) -> bytes:
    body = request_body(protocol, "text", stream, metadata={"padding": "<padding>"})
    return body.replace(b"<padding>", b"wide sea " * (_BIG // 9))


def _big_pieces(protocol: Protocol, stream: bool) -> tuple[bytes, ...]:
    """A reply with one very long word in it, streamed in events of 16 KB."""
    pieces = answer(protocol, stream).pieces
    if not stream:
        return (pieces[0].replace(b"{", b'{"padding":"' + b"wide sea " * (_BIG // 9) + b'",', 1),)
    event = b'data: {"padding":"' + b"wide sea " * 1800 + b'"}\n\n'
    return (*pieces[:2], *[event] * (_BIG // len(event)), *pieces[2:])
