"""The ``api`` token source through a real sidecar: what the client gets, what is recorded.

The upstream is a FakeVllm that spells its replies as vLLM does, since the real one can't be made to
break off or to be of another version; ``tests/serving`` has the real one.
"""

import gzip
import json
import threading
import zlib
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sidecar.tokens.sources import Sources, vllm_has_token_ids
from tests.sidecar.client import Connection, exchange, post
from tests.sidecar.conftest import RawServer
from tests.sidecar.test_records import call_of, eventually
from tokenization import calls
from tokenization.calls import Usage

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EXTRA = {
    "prompt": "[1,2,3]",
    "ids": "[7,8]",
    "chat": '{"content":[{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[]},'
    '{"token":"b","logprob":-1.0,"bytes":[98],"top_logprobs":[]}]}',
    "completions": '{"text_offset":[0,1],"token_logprobs":[-0.5,-1.0],"tokens":["a","b"],'
    '"top_logprobs":[{"a":-0.5},{"b":-1.0}]}',
}


def spelled(asked: dict[str, Any], chat: bool) -> dict[str, str]:
    """Return vLLM's spelling of the token fields in a reply to a request."""
    ids, logprobs = bool(asked.get("return_token_ids")), asked.get("logprobs")
    wanted = bool(logprobs) if chat else logprobs is not None
    return {
        "prompt": EXTRA["prompt"] if ids else "null",
        "ids": EXTRA["ids"] if ids else "null",
        "logprobs": EXTRA["chat" if chat else "completions"] if wanted else "null",
    }


def whole(asked: dict[str, Any], chat: bool) -> bytes:
    at = spelled(asked, chat)
    text = '"message":{"role":"assistant","content":"ab é"}' if chat else '"text":"ab é"'
    own = "" if chat else f',"prompt_token_ids":{at["prompt"]}'
    top = f',"prompt_token_ids":{at["prompt"]}' if chat else ""
    return (
        f'{{"id":"c-1","choices":[{{"index":0,{text},"logprobs":{at["logprobs"]},'
        f'"finish_reason":"stop","token_ids":{at["ids"]}{own}}}],'
        f'"usage":{{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}}{top}}}'
    ).encode()


def events(asked: dict[str, Any], chat: bool) -> list[bytes]:
    at = spelled(asked, chat)
    choice = f'"logprobs":{at["logprobs"]},"finish_reason":%s,"token_ids":{at["ids"]}'
    found = []
    if chat:
        first = '{"id":"c-1","choices":[{"index":0,"delta":{"role":"assistant","content":""},'
        found.append(
            f'{first}"logprobs":null,"finish_reason":null}}],"prompt_token_ids":{at["prompt"]}}}'
        )
        if at["ids"] != "null":
            found.append(f'{{"id":"c-1","choices":[{{"index":0,"delta":{{}},{choice % "null"}}}]}}')
        found.append(f'{{"id":"c-1","choices":[{{"index":0,"delta":{{}},{choice % '"stop"'}}}]}}')
    else:
        own = f',"prompt_token_ids":{at["prompt"]}'
        found.append(
            f'{{"id":"c-1","choices":[{{"index":0,"text":"a",{choice % '"stop"'}{own}}}]}}'
        )
    count = 4 if chat else 2
    usage = f'{{"prompt_tokens":3,"total_tokens":{count + 3},"completion_tokens":{count}}}'
    found += [f'{{"id":"c-1","choices":[],"usage":{usage}}}', "[DONE]"]
    return [f"data: {event}\n\n".encode() for event in found]


class FakeVllm(BaseHTTPRequestHandler):
    """Answers ``/version`` and the two protocols; a request of ``"bad"`` gets 400."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/version":
            self._reply(200, b'{"version":"0.30.0"}')
        else:
            self._reply(404, b'{"detail":"Not Found"}')

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((dict(self.headers), raw))  # type: ignore[attr-defined]
        if self.headers.get("Content-Encoding") == "gzip":
            raw = gzip.decompress(raw)
        try:
            asked = json.loads(raw)
        except ValueError:
            asked = {"bad": True}
        chat = "chat" in self.path
        if asked.get("bad"):
            self._reply(400, b'{"error":{"message":"no"}}')
        elif not asked.get("stream"):
            self._reply(200, whole(asked, chat))
        else:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream; charset=utf-8")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for event in events(asked, chat):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
            self.wfile.write(b"0\r\n\r\n")

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server:
    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), FakeVllm)
        self._server.daemon_threads = True
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self._server.requests = self.requests  # type: ignore[attr-defined]
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def vllm() -> Iterator[Server]:
    with closing(Server()) as running:
        yield running


@pytest.fixture(scope="module")
def sidecar(vllm: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from tests.sidecar.running import RunningSidecar

    running = RunningSidecar(vllm.url, tmp_path_factory.mktemp("api") / "t", token_source="api")
    yield running
    running.stop()


def _without_date(head: bytes) -> list[bytes]:
    return [line for line in head.split(b"\r\n") if not line.lower().startswith(b"date:")]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream": True},
        {"logprobs": 1, "stream": True},
        {"return_token_ids": True},
        {"return_token_ids": True, "stream": True},
        {"bad": True},
        {"echo": True},
    ],
    ids=str,
)
def test_the_client_gets_the_bytes_of_a_plain_vllm(
    vllm: Server, sidecar: Any, path: str, fields: dict[str, Any]
) -> None:
    if path == CHAT and "logprobs" in fields:
        fields = fields | {"logprobs": True}
    ask = {"model": "m", "n": 1} | fields
    run = f"same-{path.count('/')}-{abs(hash(str(fields)))}"
    direct = Connection(vllm.port).ask(post(path, ask))
    through = Connection(sidecar.port).ask(post(f"/r/{run}{path}", ask))
    assert through[1] == direct[1]
    assert _without_date(through[0]) == _without_date(direct[0])
    call = call_of(sidecar, run)
    assert call.outcome == "complete" and call.response and call.response.body
    assert call.response.body.raw() == direct[1]
    assert call.request.body and json.loads(call.request.body.raw()) == ask
    if "bad" in fields or "echo" in fields:
        assert (call.tap, call.tap_source) == ([], "none")
        return
    assert call.tap_source == "api"
    count = 4 if path == CHAT and fields.get("stream") else 2
    (read,) = calls.read(call, usage=Usage(3, count)).calls
    assert read.failures == () and read.token_source == "api"
    assert read.prompt_ids.tolist() == [1, 2, 3]
    assert read.output_ids.tolist() == [7, 8] * (count // 2)
    assert read.logprobs.tolist() == [-0.5, -1.0] * (count // 2)
    assert read.versions.tolist() == [-1] * count
    assert read.left_out == calls.NO_VERSION


def test_the_request_differs_by_two_fields(vllm: Server, sidecar: Any) -> None:
    ask = post(f"/r/fields{CHAT}", {"model": "m", "messages": [], "n": 1})
    Connection(sidecar.port).ask(ask)
    headers, raw = vllm.requests[-1]
    body = ask.partition(b"\r\n\r\n")[2]
    assert raw == body[:-1] + b',"return_token_ids":true,"logprobs":true}'
    assert headers["Content-Length"] == str(len(raw)) and "x-ridealong-tap" not in headers


def test_a_compressed_request_is_asked_in_too(vllm: Server, sidecar: Any) -> None:
    body = gzip.compress(b'{"model":"m"}')
    head = f"POST /r/gzip{CHAT} HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    _, reply = Connection(sidecar.port).ask(request)
    assert reply == whole({}, chat=True)
    headers, raw = vllm.requests[-1]
    assert "Content-Encoding" not in headers and b"return_token_ids" in raw
    call = call_of(sidecar, "gzip")
    assert call.request.body and zlib.decompress(call.request.body.raw(), 31) == b'{"model":"m"}'
    assert calls.read(call, usage=Usage(3, 2)).calls[0].failures == ()


def test_other_protocols_and_unreadable_bodies_pass(vllm: Server, sidecar: Any) -> None:
    for path, body in (("/v1/responses", b'{"input":"x"}'), (CHAT, b'{"a":1,}'), (CHAT, b"")):
        head = f"POST /r/plain{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        Connection(sidecar.port).ask(head.encode() + body)
        assert vllm.requests[-1][1] == body


def test_a_reply_that_breaks_off_breaks_off(start: Any) -> None:
    server = RawServer()
    body = whole({"return_token_ids": True, "logprobs": True}, chat=True)
    reply = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    reply += b"Content-Length: %d\r\n\r\n" % len(body) + body
    sidecar = start(server.url, token_source="api")
    for number, at in enumerate([b"HTTP/1.1 200 OK\r\n", b'{"id":"c-1"']):
        server.answer = [reply[: reply.index(at) + len(at)]]
        assert exchange(sidecar.port, post(f"/r/broken-{number}{CHAT}", {"model": "m"})) == b""
        call = call_of(sidecar, f"broken-{number}")
        assert call.outcome == "upstream_error" and call.tap == []
    server.close()


def test_hanging_up_on_the_last_event_is_not_a_cancellation(sidecar: Any) -> None:
    for number in range(10):
        connection = Connection(sidecar.port)
        connection.socket.sendall(post(f"/r/prompt-{number}{CHAT}", {"stream": number % 2 > 0}))
        connection.read_until(b"data: [DONE]\n\n" if number % 2 else b'"prompt_token_ids":null}')
        connection.close()
    for number in range(10):
        call = call_of(sidecar, f"prompt-{number}")
        assert (call.outcome, call.tap_source) == ("complete", "api")


def test_auto_takes_the_api_of_a_vllm_without_tap(vllm: Server, start: Any) -> None:
    sidecar = start(vllm.url)
    eventually(lambda: sidecar.health()["token_sources"] == {vllm.url: "api"})
    assert "can't be trained" in sidecar.health()["reasons"][0]
    _, body = Connection(sidecar.port).ask(post(f"/r/auto{CHAT}", {"model": "m"}))
    assert body == whole({}, chat=True)
    assert call_of(sidecar, "auto").tap_source == "api"
    _, errors = sidecar.stop()
    assert "ridealong serve" in errors


def test_which_source() -> None:
    def of(configured: Any, route: Any) -> str:
        return Sources(configured, {"a": "api", "t": "tap", "n": "none"}).of("a", route)

    assert [of("auto", r) for r in ("chat", "completions", "responses")] == ["api", "api", "tap"]
    assert [of("api", r) for r in ("chat", "messages", "other")] == ["api", "none", "none"]
    assert [of("tap", "chat"), of("none", "chat"), of("auto", "other")] == ["tap", "none", "none"]
    for upstream in ("t", "n", "unknown"):
        assert Sources("auto", {"t": "tap", "n": "none"}).of(upstream, "chat") == "tap"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"version": "0.30.0"}, True),
        ({"version": "0.11.1rc2.dev5+g123"}, True),
        ({"version": "1.0"}, True),
        ({"version": "0.10.1"}, False),
        ({"version": "dev"}, False),
        ({"version": 1}, False),
        (["0.30.0"], False),
        ("0.30.0", False),
    ],
)
def test_which_vllm(answer: object, expected: bool) -> None:
    assert vllm_has_token_ids(answer) is expected
