"""What two servers could read as different messages is refused, or goes on in one plain form."""

import re
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.sidecar.client import Connection, exchange, post
from tests.sidecar.running import RunningSidecar
from tests.sidecar.strict_server import StrictServer
from tests.sidecar.test_records import eventually

HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"5\r\nhello\r\n0\r\n\r\n"
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\n"
OTHER = b"POST /files HTTP/1.1\r\n"


@pytest.fixture(scope="module")
def upstream() -> Iterator[StrictServer]:
    with closing(StrictServer()) as running:
        yield running


@pytest.fixture(scope="module")
def limited(upstream, tmp_path_factory) -> Iterator[RunningSidecar]:
    folder = tmp_path_factory.mktemp("limited")
    running = RunningSidecar(
        upstream.url,
        folder / "traces",
        token_source="none",
        proxy="127.0.0.1:0",
        ca_dir=str(folder / "ca"),
        max_header_kib=16,
        max_header_fields=50,
        max_body_mib=1,
    )
    yield running
    running.stop()


def send(sidecar: RunningSidecar, upstream: StrictServer, *pieces: bytes) -> bytes:
    upstream.forget()
    connection = Connection(sidecar.port)
    try:
        for piece in pieces:
            connection.socket.sendall(piece)
        return connection.read_to_end()
    finally:
        connection.close()


REFUSED = {
    "length and chunked": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    "chunked and length": b"Transfer-Encoding: chunked\r\nContent-Length: 90\r\n\r\n" + CHUNKED,
    "two lengths": b"Content-Length: 5\r\nContent-Length: 44\r\n\r\nhello",
    "the same length twice": b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "a list of lengths": b"Content-Length: 5, 5\r\n\r\nhello",
    "a signed length": b"Content-Length: +5\r\n\r\nhello",
    "a negative length": b"Content-Length: -5\r\n\r\nhello",
    "a hexadecimal length": b"Content-Length: 0x5\r\n\r\nhello",
    "an empty length": b"Content-Length:\r\n\r\nhello",
    "a length with an underscore": b"Content-Length: 1_0\r\n\r\nhello",
    "a length in other digits": "Content-Length: ５\r\n\r\nhello".encode(),
    "an unknown coding": b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKED,
    "chunked is not last": b"Transfer-Encoding: chunked, identity\r\n\r\n" + CHUNKED,
    "chunked twice": b"Transfer-Encoding: chunked, chunked\r\n\r\n" + CHUNKED,
    "two codings": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n" + CHUNKED,
    "identity": b"Transfer-Encoding: identity\r\n\r\n" + CHUNKED,
    "gzip alone": b"Transfer-Encoding: gzip\r\n\r\n" + CHUNKED,
    "chunked in quotes": b'Transfer-Encoding: "chunked"\r\n\r\n' + CHUNKED,
    "a vertical tab before chunked": b"Transfer-Encoding: \x0bchunked\r\n\r\n" + CHUNKED,
    "a letter that lowers to k": "Transfer-Encoding: chun\u212aed\r\n\r\n".encode() + CHUNKED,
    "a blank before the colon": b"Transfer-Encoding : chunked\r\n\r\n" + CHUNKED,
    "a tab before the colon": b"Content-Length\t: 5\r\n\r\nhello",
    "a blank before the name": b" Content-Length: 5\r\n\r\nhello",
    "a folded coding": b"Transfer-Encoding:\r\n chunked\r\n\r\n" + CHUNKED,
    "a coding in a fold": b"X: a\r\n Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nhello",
    "a length in a fold": b"X: a\r\n\tContent-Length: 0\r\nContent-Length: 5\r\n\r\nhello",
    "a bad name": b"X(y): a\r\n\r\n",
    "an empty name": b": a\r\n\r\n",
    "no colon": b"nonsense\r\n\r\n",
    "a zero byte in a name": b"X\x00: a\r\n\r\n",
    "a zero byte in a value": b"X: a\x00b\r\n\r\n",
    "a carriage return in a value": b"X: a\rTransfer-Encoding: chunked\r\n\r\n",
    "a carriage return in a name": b"X\rContent-Length: 5\r\n\r\nhello",
    "an escape in a value": b"X: \x1b[2J\r\n\r\n",
    "a bare line feed as chunk end": b"Transfer-Encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n",
    "a chunk size with 0x": b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "a negative chunk size": b"Transfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n",
    "a signed chunk size": b"Transfer-Encoding: chunked\r\n\r\n+5\r\nhello\r\n0\r\n\r\n",
    "a chunk size with an underscore": b"Transfer-Encoding: chunked\r\n\r\n0_5\r\nhello\r\n0",
    "an empty chunk size": b"Transfer-Encoding: chunked\r\n\r\n\r\nhello\r\n0\r\n\r\n",
    "a chunk size that overflows": b"Transfer-Encoding: chunked\r\n\r\n"
    + b"0" * 20
    + b"5\r\nhello",
    "a chunk that is longer": b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloXX\r\n0\r\n\r\n",
    "a chunk with a bare line feed": b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\n0\r\n\r\n",
    "a line feed in an extension": b"Transfer-Encoding: chunked\r\n\r\n5;a\nb\r\nhello\r\n0\r\n",
    "a folded trailer": b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nA: b\r\n c\r\n\r\n",
}


@pytest.mark.parametrize("line", [CHAT, OTHER], ids=["call", "other"])
@pytest.mark.parametrize("rest", REFUSED.values(), ids=REFUSED)
def test_ambiguous_requests_are_refused(limited, upstream, line, rest):
    reply = send(limited, upstream, line + b"Host: x\r\n" + rest + HIDDEN)
    assert reply.startswith(b"HTTP/1.1 400 Bad Request\r\n"), reply
    assert reply.count(b"HTTP/1.1") == 1 and b"connection: close" in reply
    assert b'"message"' in reply
    assert upstream.seen == [] and b"hidden" not in b"".join(upstream.raw)
    assert len(upstream.heads()) <= 1


LINES = {
    "a blank in the target": b"GET /a b HTTP/1.1",
    "no version": b"GET /hidden",
    "another protocol": b"GET / RTSP/1.0",
    "HTTP/2 in HTTP/1": b"POST / HTTP/2.0",
    "HTTP/3 in HTTP/1": b"POST / HTTP/3.0",
    "a version from the future": b"GET / HTTP/9.9",
    "a control character in the target": b"GET /\x01 HTTP/1.1",
    "a carriage return in the target": b"GET /\rX HTTP/1.1",
    "nothing": b"\x00",
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_bad_request_lines(limited, upstream, line):
    reply = send(
        limited, upstream, line + b"\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello" + HIDDEN
    )
    assert reply.startswith(b"HTTP/1.1 400") and reply.count(b"HTTP/1.1") == 1, reply
    assert upstream.seen == [] and upstream.heads() == []


PASSED = {
    "chunked": (b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED, b"hello"),
    "chunked in capitals": (b"TRANSFER-ENCODING: CHUNKED\r\n\r\n" + CHUNKED, b"hello"),
    "bare line feeds": (b"A: b\nContent-Length: 5\n\nhello", b"hello"),
    "blanks around the length": (b"Content-Length: \t 5 \r\n\r\nhello", b"hello"),
    "a chunk extension": (
        b"Transfer-Encoding: chunked\r\n\r\n5;a=GET / HTTP/1.1\r\nhello\r\n0;b\r\n\r\n",
        b"hello",
    ),
    "zeros and blanks at the chunk size": (
        b"Transfer-Encoding: chunked\r\n\r\n0005 \r\nhello\r\n000\r\n\r\n",
        b"hello",
    ),
    "trailers": (
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nContent-Length: 9\r\nA: b\r\n\r\n",
        b"hello",
    ),
    "a request in a body": (b"Content-Length: %d\r\n\r\n" % len(HIDDEN) + HIDDEN, HIDDEN),
    "names that look alike": (b"Content_Length: 3\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
}


@pytest.mark.parametrize("line", [CHAT, OTHER], ids=["call", "other"])
@pytest.mark.parametrize(("rest", "body"), PASSED.values(), ids=PASSED)
def test_odd_but_clear_requests_pass_in_one_form(limited, upstream, line, rest, body):
    head = b"Host: x\r\nConnection: close\r\n"
    reply = send(limited, upstream, b"\r\n" + line + head + rest)
    assert reply.startswith(b"HTTP/1.1 200") and reply.endswith(b"ok 1"), reply
    ((method, target, seen),) = upstream.seen
    assert (method, target, seen) == (b"POST", line.split()[1], body)
    raw = next(bytes(r) for r in upstream.raw if b"ridealong" not in r)
    sent = raw.partition(b"\r\n\r\n")[0]
    framing = re.findall(rb"(?im)^(?:content-length|transfer-encoding):", sent)
    assert len(framing) == 1
    assert b"\n" not in sent.replace(b"\r\n", b"") and upstream.errors == []


def test_what_follows_a_request_is_the_next_one(limited, upstream):
    first = CHAT + b"Host: x\r\nContent-Length: 5\r\n\r\nhello"
    reply = send(limited, upstream, first + b"Smuggled: 1\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 400" in reply
    assert upstream.seen == [(b"POST", b"/v1/chat/completions", b"hello")]


@pytest.mark.parametrize("apart", [False, True])
def test_pipelined_requests_are_answered_in_order(limited, upstream, apart):
    requests = [
        post("/v1/chat/completions", {"n": 1}),
        OTHER + b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED,
        post("/v1/messages", {"n": 2}),
        b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    ]
    everything = b"".join(requests)
    pieces = (
        [everything[i : i + 7] for i in range(0, len(everything), 7)] if apart else [everything]
    )
    reply = send(limited, upstream, *pieces)
    assert re.findall(rb"ok \d", reply) == [b"ok 1", b"ok 2", b"ok 3", b"ok 4"]
    assert [target for _, target, _ in upstream.seen] == [
        b"/v1/chat/completions",
        b"/files",
        b"/v1/messages",
        b"/last",
    ]


def test_pipelined_bytes_do_not_pile_up(engine, start):
    sidecar = start(engine.url, max_header_kib=16)
    connection = Connection(sidecar.port)
    connection.socket.sendall(post("/r/piled/v1/chat/completions", {"hang": True}))
    eventually(lambda: sidecar.health()["in_flight"] == 1)
    with pytest.raises(OSError, match=r"reset|Broken pipe"):
        for _ in range(1000):
            connection.socket.sendall(bytes(65_536))
    eventually(lambda: sidecar.health()["in_flight"] == 0)


def test_a_header_may_be_large_but_not_too_large(limited, upstream):
    def request(size: int) -> bytes:
        return CHAT + b"Host: x\r\nConnection: close\r\nX: " + b"a" * size + b"\r\n\r\n"

    assert send(limited, upstream, request(15_000)).startswith(b"HTTP/1.1 200")
    reply = send(limited, upstream, request(16_400))
    assert reply.startswith(b"HTTP/1.1 431 ") and b"max_header_kib" in reply
    assert upstream.seen == []
    # One that never ends is not collected, and the client can read the reply.
    reply = send(limited, upstream, request(16_400)[:-4], *[b"a" * 65_536] * 20)
    assert reply.startswith(b"HTTP/1.1 431 ") and upstream.heads() == []


def test_the_number_of_fields_is_bounded(limited, upstream):
    def request(count: int) -> bytes:
        return CHAT + b"Connection: close\r\nHost: x\r\n" + b"A: b\r\n" * (count - 2) + b"\r\n"

    assert send(limited, upstream, request(50)).startswith(b"HTTP/1.1 200")
    assert send(limited, upstream, request(51)).startswith(b"HTTP/1.1 431 ")
    assert upstream.seen == []


@pytest.mark.parametrize("line", [CHAT, OTHER], ids=["call", "other"])
def test_the_body_is_bounded(limited, upstream, line):
    def sized(size: int) -> bytes:
        return line + b"Connection: close\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size

    size = 1 << 20
    assert send(limited, upstream, sized(size), bytes(size)).startswith(b"HTTP/1.1 200")
    reply = send(limited, upstream, sized(size + 1), bytes(size + 1))
    assert reply.startswith(b"HTTP/1.1 413 ") and b"max_body_mib" in reply
    assert upstream.seen == [] and upstream.heads() == []

    chunk = b"%x\r\n" % (1 << 16) + bytes(1 << 16) + b"\r\n"
    head = line + b"Connection: close\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    reply = send(limited, upstream, head, *[chunk] * 17, b"0\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 413 ") and upstream.seen == []


def test_lines_before_chunks_and_trailers_are_bounded(limited, upstream):
    head = CHAT + b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    reply = send(limited, upstream, head, b"5;" + b"a" * 20_000)
    assert reply.startswith(b"HTTP/1.1 400")
    reply = send(limited, upstream, head, b"0\r\n" + b"a: b\r\n" * 5_000)
    assert reply.startswith(b"HTTP/1.1 431")
    assert upstream.seen == []


def test_twenty_megabytes_pass_by_default(engine, sidecar):
    body = b"x" * 20_000_000
    head = OTHER + b"Host: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert exchange(sidecar.port, head + body).endswith(body[::-1])


@pytest.mark.parametrize("tunnel", [False, True], ids=["absolute", "tunnel"])
def test_the_proxy_is_as_strict(limited, upstream, tunnel):
    upstream.forget()
    host = upstream.url.removeprefix("http://").encode()
    connection = Connection(int(limited.health()["ways"]["proxy"].rpartition(":")[2]))
    rest = b"Host: %s\r\n" % host + REFUSED["length and chunked"] + HIDDEN
    if tunnel:
        connection.socket.sendall(b"CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n" % (host, host))
        assert connection.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200")
        connection.socket.sendall(CHAT + rest)
    else:
        connection.socket.sendall(CHAT.replace(b"/v1", b"http://%s/v1" % host) + rest)
    reply = connection.read_to_end()
    assert reply.startswith(b"HTTP/1.1 400 ") and reply.count(b"HTTP/1.1") == 1
    assert upstream.heads() == []


def test_refusals_are_counted(limited, upstream):
    before = limited.metric('ridealong_sidecar_refused_total{status="400"}')
    send(limited, upstream, b"nonsense\r\n\r\n")
    assert limited.metric('ridealong_sidecar_refused_total{status="400"}') == before + 1
