"""What the shards hold of an exchange."""

import time

import pytest

from sidecar.traces.record import Exchange, SidecarStarted
from tests.sidecar.client import Connection, get, post
from tests.sidecar.fake_engine import FakeEngine, FakeTornServer
from tests.sidecar.running import records

CHAT = "/v1/chat/completions"


def eventually(condition, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def call_of(sidecar, run: str) -> Exchange:
    """Return the call of a run, as soon as it is recorded."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        for call in sidecar.calls(0):
            if call.session.run == run:
                return call
        time.sleep(0.005)
    raise AssertionError(f"no call of run {run} was recorded")


def test_a_streamed_call(engine, sidecar):
    before = time.time()
    request = post(
        f"/r/streamed{CHAT}?key=QZQZ",
        {"stream": True, "events": 3, "delay": 0.01},
        "Authorization: Bearer QZQZ",
        "x-ridealong-session: session-1",
        "Accept-Encoding: gzip",
    )
    connection = Connection(sidecar.port)
    _, body = connection.ask(request)
    call = call_of(sidecar, "streamed")
    assert (call.outcome, call.route, call.error) == ("complete", "chat", None)
    assert (call.session.session, call.session.run) == ("session-1", "streamed")
    assert call.session.peer == "{}:{}".format(*connection.socket.getsockname())
    assert call.upstream == engine.url
    assert call.request.path == f"{CHAT}?key=REDACTED"
    assert call.request.body and call.request.body.raw() == request.partition(b"\r\n\r\n")[2]
    assert ("Accept-Encoding", "gzip") in call.request.headers
    assert "QZQZ" not in repr(call) and "x-ridealong-tap" not in repr(call)
    assert call.response and call.response.body and call.response.body.raw() == body
    assert call.response.status == 200
    assert call.tap_source == "inline"
    nonce = engine.requests[-1]["headers"]["x-ridealong-tap"]
    assert call.tap == engine.lines[nonce] and len(call.tap) == 5
    assert call.first_byte is not None
    assert before <= call.started <= call.first_byte <= call.ended <= time.time()
    assert call.ended - call.first_byte >= 0.03
    assert len(call.id) == 32 and call.id[12] == "7"


def test_a_call_that_is_not_streamed(engine, sidecar):
    _, body = Connection(sidecar.port).ask(post(f"/r/plain{CHAT}", {}))
    call = call_of(sidecar, "plain")
    assert call.response and call.response.body and call.response.body.raw() == body
    assert ("content-length", str(len(body))) in call.response.headers
    assert "x-ridealong-tap-length" not in dict(call.response.headers)
    nonce = engine.requests[-1]["headers"]["x-ridealong-tap"]
    assert (call.tap, call.tap_source) == (engine.lines[nonce], "inline")


def test_a_call_is_in_the_shard_before_the_agent_has_it_all(sidecar):
    connection = Connection(sidecar.port)
    for number in range(20):
        connection.ask(post(f"/r/now-{number}{CHAT}", {"stream": number % 2 == 0}))
        runs = [r.session.run for r in records(sidecar.traces) if isinstance(r, Exchange)]
        assert f"now-{number}" in runs


def test_binary_bodies_survive(start):
    from tests.sidecar.conftest import RawServer

    server = RawServer()
    body = bytes(range(256))
    server.answer = [b"HTTP/1.1 200 OK\r\nContent-Length: 256\r\n\r\n" + body]
    sidecar = start(server.url)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nX-Odd: \xe9\r\nContent-Length: 256\r\n\r\n"
    Connection(sidecar.port).ask(head.encode("latin-1") + body)
    (call,) = sidecar.calls(1)
    assert call.request.body and call.request.body.raw() == body
    assert call.response and call.response.body and call.response.body.raw() == body
    assert ("X-Odd", "\xe9") in call.request.headers
    server.close()


def test_cancelled_in_the_middle_of_a_stream(engine, sidecar):
    connection = Connection(sidecar.port)
    connection.socket.sendall(
        post(f"/r/cancelled{CHAT}", {"stream": True, "events": 50, "delay": 0.05})
    )
    received = connection.read_until(b'"token":3}\n\n\r\n')
    seen = len(engine.disconnects)
    hung_up = connection.close()
    eventually(lambda: len(engine.disconnects) > seen)
    assert engine.disconnects[-1] - hung_up < 0.25
    call = call_of(sidecar, "cancelled")
    assert (call.outcome, call.tap_source) == ("cancelled", "pulled")
    nonce = next(
        r["headers"]["x-ridealong-tap"] for r in reversed(engine.requests) if r["path"] == CHAT
    )
    assert call.tap == engine.lines[nonce], "the tokens that were produced, all of them"
    assert call.response and call.response.body
    reply = call.response.body.raw()
    assert reply.startswith(b'data: {"token":0}\n\n') and b'"token":3}' in reply
    assert b"ridealong" not in received


def test_cancelled_before_the_reply_begins(engine, sidecar):
    for number, ask in enumerate([{"first_delay": 30}, {"first_delay": 30, "stream": True}]):
        connection = Connection(sidecar.port)
        connection.socket.sendall(post(f"/r/early-{number}{CHAT}", ask))
        asked = len(engine.requests)
        eventually(lambda asked=asked: len(engine.requests) > asked - 1)
        time.sleep(0.1)
        seen = len(engine.disconnects)
        hung_up = connection.close()
        eventually(lambda seen=seen: len(engine.disconnects) > seen)
        assert engine.disconnects[-1] - hung_up < 0.25
        call = call_of(sidecar, f"early-{number}")
        assert (call.outcome, call.response, call.tap_source) == ("cancelled", None, "pulled")


def test_cancelled_while_still_sending_the_request(sidecar):
    connection = Connection(sidecar.port)
    whole = post(f"/r/sending{CHAT}", {"padding": "x" * 100_000})
    connection.socket.sendall(whole[:50_000])
    time.sleep(0.1)
    connection.close()
    call = call_of(sidecar, "sending")
    assert (call.outcome, call.response) == ("cancelled", None)
    assert call.request.body and 0 < len(call.request.body.raw()) < 100_000


def test_hanging_up_on_the_last_event_is_not_a_cancellation(sidecar):
    for number in range(30):
        connection = Connection(sidecar.port)
        ask = {"stream": True} if number % 2 else {"reply": "x" * number}
        connection.socket.sendall(post(f"/r/prompt-{number}{CHAT}", ask))
        connection.read_until(b"data: [DONE]\n\n" if number % 2 else b"\r\n\r\n" + b"x" * number)
        connection.close()
    for number in range(30):
        call = call_of(sidecar, f"prompt-{number}")
        assert (call.outcome, call.tap_source) == ("complete", "inline")


def test_without_tap_hanging_up_on_the_last_event_is_not_a_cancellation_either(start):
    from tests.sidecar.conftest import RawServer

    server = RawServer()
    event = b"e\r\ndata: [DONE]\n\n\r\n"
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    server.answer = [head, event, 0.5, b"0\r\n\r\n"]
    for tap in (True, False):
        sidecar = start(server.url, traces=None, token_source="tap" if tap else "none")
        connection = Connection(sidecar.port)
        connection.socket.sendall(post(CHAT, {}))
        connection.read_until(event)
        connection.close()
        call = sidecar.calls(1 if tap else 2)[-1]
        assert (call.outcome, call.tap_source) == ("complete", "none")
    server.close()


def test_upstream_breaks_off(raw_server, raw_sidecar):
    raw_server.reset = False
    raw_server.answer = [
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"9\r\ndata: 1\n\n\r\n"
    ]
    connection = Connection(raw_sidecar.port)
    connection.socket.sendall(post(f"/r/broken{CHAT}", {}))
    connection.read_to_end()
    call = call_of(raw_sidecar, "broken")
    assert call.outcome == "upstream_error" and call.error
    assert call.response and call.response.body and call.response.body.raw() == b"data: 1\n\n"


def test_an_upstream_with_prefix_and_https(start, tmp_path):
    certificate, key = self_signed(tmp_path)
    engine = FakeEngine(ssl_certfile=certificate, ssl_keyfile=key)
    sidecar = start(f"{engine.url}/prefix/", env={"SSL_CERT_FILE": certificate})
    assert Connection(sidecar.port).ask(post(f"/r/a{CHAT}", {"reply": "tls"}))[1] == b"tls"
    (call,) = sidecar.calls(1)
    assert (call.request.path, call.session.run) == (f"/prefix{CHAT}", "a")
    assert call.tap_source == "inline"
    assert sidecar.health()["tap_available"]
    engine.close()


def test_a_certificate_nobody_vouches_for_is_refused(start, tmp_path):
    certificate, key = self_signed(tmp_path)
    engine = FakeEngine(ssl_certfile=certificate, ssl_keyfile=key)
    sidecar = start(engine.url)
    connection = Connection(sidecar.port)
    connection.socket.sendall(post(CHAT, {}))
    assert connection.read_to_end() == b""
    (call,) = sidecar.calls(1)
    assert call.outcome == "upstream_error" and call.error and "erti" in call.error
    assert engine.requests == []
    engine.close()


def test_metrics_and_health_count(engine, start):
    sidecar = start(engine.url, token_source="tap")
    connection = Connection(sidecar.port)
    connection.ask(post(CHAT, {"stream": True, "events": 3}))
    connection.ask(get("/v1/models"))
    eventually(lambda: sidecar.health()["records_written"] == 3)
    health = sidecar.health()
    assert (health["status"], health["in_flight"], health["records_lost"]) == ("ok", 0, 0)
    prefix = "ridealong_sidecar_"
    complete = f'{prefix}calls_total{{outcome="complete",route="%s",token_source="%s"}}'
    assert sidecar.metric(complete % ("chat", "inline")) == 1
    assert sidecar.metric(complete % ("other", "none")) == 1
    assert sidecar.metric(f"{prefix}tap_lines_total") == 5
    assert sidecar.metric(f"{prefix}stream_chunks_total") >= 4
    assert sidecar.metric(f"{prefix}records_written_total") == 3
    assert sidecar.metric(f"{prefix}records_lost_total") == 0
    assert sidecar.metric(f'{prefix}body_bytes_total{{direction="reply"}}') > 60
    assert sidecar.metric(f'{prefix}call_seconds_count{{route="chat"}}') == 1
    assert sidecar.metric("ridealong_tap_available") == 1
    (started,) = [r for r in records(sidecar.traces) if isinstance(r, SidecarStarted)]
    assert started.upstream == engine.url


def test_an_upstream_without_the_tap_is_loud_and_harmless(start):
    engine = FakeEngine(tap=False)
    sidecar = start(engine.url)
    eventually(lambda: sidecar.health()["status"] == "degraded")
    assert Connection(sidecar.port).ask(post(CHAT, {"reply": "plain"}))[1] == b"plain"
    (call,) = sidecar.calls(1)
    assert (call.outcome, call.tap, call.tap_source) == ("complete", [], "none")
    assert "token tap" in sidecar.health()["reasons"][0]
    assert sidecar.metric("ridealong_tap_available") == 0
    assert sidecar.metric("ridealong_sidecar_untapped_calls_total") == 1
    status, errors = sidecar.stop()
    assert status == 0 and "NO TOKENS ARE CAPTURED" in errors and "ridealong serve" in errors
    engine.close()


def test_what_was_held_back_reaches_the_client_when_the_upstream_dies(start):
    server = FakeTornServer()
    sidecar = start(server.url)
    for stream, end in ((True, b"data: [DONE]\n\n\r\n"), (False, b'{"a":"b"}')):
        connection = Connection(sidecar.port)
        connection.socket.sendall(post(f"/r/torn-{stream}{CHAT}", {"stream": stream}))
        assert connection.read_to_end().endswith(end)
        call = call_of(sidecar, f"torn-{stream}")
        assert call.outcome == "upstream_error" and len(call.tap) == 1
        assert call.response and call.response.body
        assert call.response.body.raw().endswith(end.removesuffix(b"\r\n"))
    server.close()


@pytest.mark.parametrize(
    "fields",
    [
        b"Content-Length: 2\r\nX-Ridealong-Tap-Length: 5000\r\n",
        b"Content-Length: 2\r\nX-Ridealong-Tap-Length: " + b"9" * 5000 + b"\r\n",
        b"Content-Length: 2\r\nX-Ridealong-Tap-Length: -1\r\n",
        b"X-Ridealong-Tap-Length: 1\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Type: text/event-stream\r\nX-Ridealong-Tap-Length: 1\r\n"
        b"Transfer-Encoding: chunked\r\n",
    ],
)
def test_a_tap_length_that_can_not_be_true_changes_nothing(raw_server, raw_sidecar, fields):
    body = b"2\r\n{}\r\n0\r\n\r\n" if b"chunked" in fields else b"{}"
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
    raw_server.reset, raw_server.answer = False, [head + fields + b"\r\n" + body]
    connection = Connection(raw_sidecar.port)
    connection.socket.sendall(post(CHAT, {}, "Connection: close"))
    reply = connection.read_to_end()
    expected = b"".join(
        line for line in fields.splitlines(keepends=True) if not line.startswith(b"X-Ride")
    )
    assert reply == head + expected + b"\r\n" + body
    assert raw_sidecar.metric("ridealong_sidecar_faults_total") == 0


def test_a_session_that_is_not_utf8(engine, sidecar):
    request = post(f"/r/latin{CHAT}", {}, "x-ridealong-session: @@").replace(b"@@", b"\xff\xfe")
    Connection(sidecar.port).ask(request)
    assert call_of(sidecar, "latin").session.session == "\xff\xfe"


def test_an_offer_of_http2_goes_no_further(raw_server, start):
    """As Java's client makes it with every first request."""
    raw_server.reset, raw_server.answer = False, [b"HTTP/1.1 204 No Content\r\n\r\n"]
    sidecar = start(raw_server.url)
    fields = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    Connection(sidecar.port).socket.sendall(post(f"/r/java{CHAT}", {}, *fields))
    asked = dict(call_of(sidecar, "java").request.headers)
    assert asked["Upgrade"] == "h2c"
    head = raw_server.requests[-1].lower()
    assert b"upgrade" not in head and b"http2-settings" not in head and b"connection" not in head
    assert not [line for line in sidecar.errors() if "h2c" in line]


def test_trailers_of_a_reply_are_dropped_and_it_ends(raw_server, start):
    raw_server.reset, raw_server.answer = (
        False,
        [
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
            b"0\r\nX-T: 1\r\n\r\n",
            5.0,  # The upstream's connection stays open.
        ],
    )
    sidecar = start(raw_server.url)
    assert Connection(sidecar.port).ask(post(CHAT, {}))[1] == b"{}"
    (call,) = sidecar.calls(1)
    assert (call.outcome, call.error) == ("complete", None)
    eventually(lambda: sidecar.health()["in_flight"] == 0)


def self_signed(directory, host: str = "127.0.0.1") -> tuple[str, str]:
    """Write a certificate for an IP address and its key; return their paths."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address(host))
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, key_pem = directory / "cert.pem", directory / "key.pem"
    pem.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_pem.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return str(pem), str(key_pem)
