"""What the agent sees is what it would see without a sidecar, down to the byte."""

import contextlib
import itertools
import time
from urllib.parse import unquote

import pytest

from tests.sidecar.client import Connection, exchange, get, post
from tests.sidecar.test_records import call_of

CHAT = "/v1/chat/completions"


def undated(head: bytes) -> bytes:
    return b"\r\n".join(line for line in head.split(b"\r\n") if not line.startswith(b"date:"))


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("ask", [{}, {"reply": "é" * 90_000}, {"stream": True, "events": 50}])
def test_replies_are_identical_to_direct_ones(engine, sidecar, path, ask):
    direct = Connection(engine.port).ask(post(path, ask))
    through = Connection(sidecar.port).ask(post(path, ask))
    assert through[1] == direct[1]
    assert undated(through[0]) == undated(direct[0])


def test_the_request_arrives_as_sent_but_for_the_tap(engine, sidecar):
    request = post(f"/r/run/{CHAT[1:]}?b=%2F&a", {"reply": "x"}, "X-Odd:  a  b ", "x-odd: c")
    Connection(sidecar.port).ask(request)
    seen = engine.requests[-1]
    assert seen["path"] == CHAT
    assert seen["body"] == request.partition(b"\r\n\r\n")[2]
    assert len(seen["headers"]["x-ridealong-tap"]) == 32
    assert seen["headers"]["accept-encoding"] == "identity"


@pytest.mark.parametrize("run", ["a:b", "my%20run"])
def test_a_run_id_that_is_none_is_refused(engine, sidecar, run):
    before = len(engine.requests)
    head, body = Connection(sidecar.port).ask(post(f"/r/{run}{CHAT}", {}))
    assert head.startswith(b"HTTP/1.1 400")
    assert f"{unquote(run)!r} is not a run id".encode() in body
    assert len(engine.requests) == before
    Connection(sidecar.port).ask(get(f"/r/{run}/files"))
    assert len(engine.requests) == before + 1, "only calls of models are ours to judge"


def test_the_agent_can_not_ask_for_the_tap_itself(engine, sidecar):
    mine = "0123456789abcdef"
    _, body = Connection(sidecar.port).ask(
        post(CHAT, {"stream": True}, f"x-ridealong-tap: {mine}", f"X-Ridealong-Tap: {mine}")
    )
    assert mine not in engine.requests[-1]["headers"]["x-ridealong-tap"]
    assert b"ridealong" not in body and b": " + mine.encode() not in body


def test_events_arrive_one_by_one_and_in_time(sidecar):
    connection = Connection(sidecar.port)
    connection.ask(post(CHAT, {"stream": True, "events": 8, "delay": 0.1}))
    pieces = [(at, data) for at, data in connection.arrivals if b"data: {" in data]
    assert len(pieces) == 8
    assert all(data.count(b"data: {") == 1 for _, data in pieces)
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(pieces)]
    assert min(gaps) > 0.05, "events were held back and sent together"


def test_one_connection_serves_many_requests_and_outlives_the_upstream_one(engine, start, tmp_path):
    from tests.sidecar.fake_engine import FakeEngine

    impatient = FakeEngine(timeout_keep_alive=1)
    sidecar = start(impatient.url)
    connection = Connection(sidecar.port)
    for number in range(20):
        ask = {"stream": number % 2 == 0, "reply": str(number)}
        head, body = connection.ask(post(CHAT, ask))
        assert head.startswith(b"HTTP/1.1 200")
        assert number % 2 == 0 or body == str(number).encode()
    time.sleep(1.5)
    assert connection.ask(post(CHAT, {"reply": "again"}))[1] == b"again"
    assert len(sidecar.calls(21)) == 21
    impatient.close()


SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\nServer: x\r\nX-MiXeD: a\r\nx-mixed: b\r\n"
    b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
JSON_HEAD = b"HTTP/1.1 200 Fine by me\r\ncontent-type: application/json\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def complete(reply: bytes) -> bool:
    """Say whether a reply ended before its connection did: nobody then looks at how that ended."""
    head, _, rest = reply.partition(b"\r\n\r\n")
    if b"204" in head or b"Length: 0" in head:
        return True
    if b"chunked" in head:
        return reply.endswith(b"0\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
    return bool(length) and len(rest) == int(length)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(
            [
                SSE_HEAD,
                0.05,
                chunk(b"data: 1\n\n"),
                0.05,
                chunk(b": ping\n\n"),
                0.05,
                chunk(b"data"),
                0.05,
                chunk(b": 2\r\n\r\n"),
                0.05,
                chunk(b"data: [DONE]\n\n"),
                b"0\r\n\r\n",
            ],
            id="chunks as they come",
        ),
        pytest.param(
            [JSON_HEAD + b"Connection: close\r\n\r\n", b'{"a":', 0.05, b"1}"], id="until closed"
        ),
        pytest.param(
            [JSON_HEAD + b"Content-Length: 7\r\nConnection: close\r\n\r\n", b'{"a":', 0.05, b"1}"],
            id="known length",
        ),
        pytest.param([JSON_HEAD + b"Content-Length: 0\r\nConnection: close\r\n\r\n"], id="empty"),
        pytest.param([b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"], id="no content"),
        pytest.param(
            [
                b"HTTP/1.1 429 Slow Down\r\nRetry-After: 7\r\n"
                b"Content-Length: 2\r\nConnection: close\r\n\r\n{}"
            ],
            id="error status",
        ),
        pytest.param(
            [SSE_HEAD, chunk(b"data: 1\n\n"), 0.05, b"5\r\nda"], id="breaks off in a chunk"
        ),
        pytest.param([SSE_HEAD, chunk(b"data: 1\n\n"), 0.05], id="breaks off between chunks"),
        pytest.param([JSON_HEAD + b"Content-Length: 70\r\n\r\n", b'{"a":', 0.05], id="half a body"),
        pytest.param([], id="no answer"),
        pytest.param([b"HTTP/1.1 20"], id="half a status line"),
    ],
)
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("path", [CHAT, "/metrics"])
def test_raw_replies_are_identical_to_direct_ones(raw_server, raw_sidecar, answer, reset, path):
    raw_server.answer, raw_server.reset = answer, reset
    request = post(path, {}, "Connection: close")
    ends = []

    def exchange(port: int) -> bytes:
        connection = Connection(port)
        connection.socket.sendall(request)
        received = connection.read_to_end()
        ends.append(connection.reset)
        connection.close()
        return received

    direct = exchange(raw_server.port)
    through = exchange(raw_sidecar.port)
    if not complete(direct):
        assert ends == [reset, reset], "broken off as the upstream broke off"
    if direct.endswith(b"da"):
        # Pieces of a chunk go on as they come, framed anew.
        direct = direct.replace(b"5\r\nda", b"2\r\nda\r\n")
    if direct == b"HTTP/1.1 20":
        direct = b""
    assert through == direct


def test_a_304_has_no_body_however_it_is_framed(raw_server, raw_sidecar):
    head = b"HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n"
    raw_server.answer, raw_server.reset = [head], False
    connection = Connection(raw_sidecar.port)
    connection.socket.sendall(get("/metrics"))
    assert connection.read_until(b"\r\n\r\n") == head
    connection.socket.settimeout(0.5)
    with contextlib.suppress(TimeoutError):
        assert connection.read_to_end() == b""
    connection.close()


INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\nX-A: b\r\n\r\n"
FINAL = JSON_HEAD + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}"


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param([INTERIM + FINAL], id="at once"),
        pytest.param([INTERIM[:30], 0.1, INTERIM[30:-1], 0.1, INTERIM[-1:], 0.1, FINAL], id="cut"),
    ],
)
def test_interim_replies_pass_and_the_reply_follows(raw_server, raw_sidecar, answer):
    raw_server.answer, raw_server.reset = answer, False
    assert exchange(raw_sidecar.port, post(f"/r/interim{CHAT}", {})) == INTERIM + FINAL
    call = call_of(raw_sidecar, "interim")
    assert call.outcome == "complete"
    assert call.response is not None and call.response.status == 200


@pytest.mark.parametrize(
    "field",
    [b"X A: 1\r\nContent-Length: 2", b"Transfer-Encoding: chunked\r\nContent-Length: 2"],
    ids=["name", "two lengths"],
)
def test_a_reply_that_is_not_valid_breaks_off_without_a_page_of_ours(
    raw_server, raw_sidecar, field
):
    raw_server.answer, raw_server.reset = [JSON_HEAD + field + b"\r\n\r\n{}"], False
    assert exchange(raw_sidecar.port, post(CHAT, {})) == b""


def test_a_refused_connection_looks_like_a_broken_one(start):
    from socket import create_server

    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sidecar = start(f"http://127.0.0.1:{port}")
    for path in (CHAT, "/v1/models"):
        connection = Connection(sidecar.port)
        connection.socket.sendall(post(path, {}))
        assert connection.read_to_end() == b"" and connection.reset
    first, second = sidecar.calls(2)
    assert (first.outcome, first.response, first.route) == ("upstream_error", None, "chat")
    assert (second.outcome, second.route) == ("upstream_error", "other")
    assert first.error and "Connect call failed" in first.error


def test_a_large_request_arrives_whole_in_chunks_too(raw_server, raw_sidecar, engine, sidecar):
    ask = {"reply": "ok", "padding": "x" * 5_000_000}
    assert Connection(sidecar.port).ask(post(CHAT, ask))[1] == b"ok"
    assert engine.requests[-1]["body"] == post(CHAT, ask).partition(b"\r\n\r\n")[2]

    connection = Connection(sidecar.port)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    connection.socket.sendall(head + chunk(b'{"reply"'))
    time.sleep(0.05)
    connection.socket.sendall(chunk(b': "chunked"}') + b"0\r\n\r\n")
    assert connection.reply()[1] == b"chunked"
    call = sidecar.calls(1)[-1]
    assert call.request.body and call.request.body.raw() == b'{"reply": "chunked"}'


def test_other_requests_pass_in_both_directions(sidecar, engine):
    body = bytes(range(256)) * 8_000
    request = (
        f"POST /files HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        "Accept-Encoding: br\r\n\r\n"
    ).encode()
    assert Connection(sidecar.port).ask(request + body)[1] == body[::-1]
    assert engine.requests[-1]["headers"]["accept-encoding"] == "br"
    assert Connection(sidecar.port).ask(get("/nowhere"))[0].startswith(b"HTTP/1.1 404")
    calls = [call for call in sidecar.calls(2) if call.route == "other"]
    assert calls[-1].request.body is None
    assert calls[-1].response and calls[-1].response.body is None


def test_expect_100_continue(sidecar):
    connection = Connection(sidecar.port)
    request = post(CHAT, {"reply": "ok"}, "Expect: 100-continue")
    head, _, body = request.partition(b"\r\n\r\n")
    connection.socket.sendall(head + b"\r\n\r\n")
    assert connection.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 100")
    connection.socket.sendall(body)
    assert connection.reply()[1] == b"ok"


def test_an_absolute_request_target_is_answered_as_without_us(engine, sidecar):
    """A client that takes the sidecar's base URL for an HTTP proxy."""
    for path in ("/files", f"/r/abs{CHAT}"):
        request = post(path, {"reply": "ok"})
        target = f"POST http://model.test{path}".encode()
        absolute = request.replace(f"POST {path}".encode(), target)
        direct = post(path.removeprefix("/r/abs"), {"reply": "ok"})
        expected = Connection(engine.port).ask(direct)[1]
        assert Connection(sidecar.port).ask(absolute)[1] == expected
        assert engine.requests[-1]["headers"]["host"] == f"127.0.0.1:{engine.port}"
