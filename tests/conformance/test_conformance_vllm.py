"""The main cases against the real vLLM: the same bytes directly and through the sidecar.

What no two calls of vLLM share is set aside by ``without_chance``; so is the header ``date``.
``content-length`` must be that of the body. Text is sampled greedily and a tool call is forced by
a grammar, so both repeat themselves.
"""

import itertools
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sidecar.traces.record import Exchange
from tests.conformance.bodies import PATHS, PROTOCOLS, Protocol
from tests.conformance.bodies import request as request_body
from tests.conformance.http1 import Message, Reader
from tests.sidecar.running import RunningSidecar
from tokenization.tap import wire

pytestmark = pytest.mark.vllm

SOURCES = ("tap", "api", "none")
_JSON = ("Content-Type: application/json", "Accept-Encoding: gzip, deflate")
_LEAVE_SECONDS = 2.0

_FORCED: dict[str, dict[str, Any]] = {
    "chat": {"tool_choice": "required"},
    "responses": {"tool_choice": "required"},
    "messages": {"tool_choice": {"type": "any"}},
}
_SAMPLED = {"temperature": 0, "seed": 7}
# The Messages API has no seed and no ignore_eos; counting goes on for long by itself.
_LONG: dict[str, dict[str, Any]] = {
    "chat": {"max_tokens": 1500, "ignore_eos": True},
    "completions": {"max_tokens": 1500, "ignore_eos": True},
    "responses": {"max_output_tokens": 1500, "ignore_eos": True},
    "messages": {
        "max_tokens": 1500,
        "messages": [{"role": "user", "content": "Count from 1 to 1000: 1, 2, 3, 4, 5,"}],
    },
}


def _call(protocol: Protocol, stream: bool, kind: str) -> bytes:
    more: dict[str, Any] = {"temperature": 0}
    if protocol in ("chat", "completions"):
        more |= _SAMPLED
    content = "tools" if kind == "tools" else "text"
    if kind == "tools":
        more |= _FORCED[protocol] | {
            "max_output_tokens" if protocol == "responses" else "max_tokens": 60
        }
    elif kind == "unknown model":
        more["model"] = "nobody"
    elif kind == "bad request":
        more |= {"messages": "no list", "input": 3.5, "prompt": {"a": 1}}
    elif kind == "n=2":
        more |= {"n": 2, "temperature": 0.7}
    elif kind == "logprobs":
        more |= {"logprobs": True, "top_logprobs": 2} if protocol == "chat" else {"logprobs": 2}
    elif kind == "long":
        more |= _LONG[protocol]
    body = request_body(protocol, content, stream, **more)  # type: ignore[arg-type]
    return _request("POST", PATHS[protocol], body[:-3] if kind == "no JSON" else body)


def _request(method: str, target: str, body: bytes | None = None) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: model.test", "Connection: close"]
    if body is not None:
        lines += [*_JSON, f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


def _kinds(protocol: Protocol) -> list[str]:
    kinds = ["text", "bad request", "unknown model", "no JSON"]
    if protocol != "completions":
        kinds.append("tools")
    if protocol in ("chat", "completions"):
        kinds += ["n=2", "logprobs"]
    return kinds


CALLS = {
    f"{protocol}/{'streamed' if stream else 'whole'}/{kind}": _call(protocol, stream, kind)
    for protocol in PROTOCOLS
    for stream in (True, False)
    for kind in _kinds(protocol)
}
OTHERS = {
    "models": _request("GET", "/v1/models"),
    "HEAD": _request("HEAD", "/"),
    "unknown path": _request("POST", "/v1/nothing", b"{}"),
    "wrong method": _request("GET", PATHS["chat"]),
    "count_tokens": _request(
        "POST",
        "/v1/messages/count_tokens?beta=true",
        request_body("messages", "text", False),
    ),
}


def without_chance(body: bytes) -> bytes:
    """Blank times of creation and the ids that the server draws at random, and put the events of
    a stream in order of their choices: which one comes first is chance, within one it is not.
    """
    events = body.split(b"\n\n")
    events.sort(key=_choice)
    body = b"\n\n".join(events)
    body = re.sub(rb'"(created|created_at|completed_at)":\s*[\d.]+', rb'"\1":0', body)
    body = re.sub(
        rb"(chatcmpl-tool|chatcmpl|modelperm|cmpl|resp|msg|rs|fc|call|toolu|tool)[-_][0-9a-zA-Z_-]+",
        rb"\1",
        body,
    )
    return re.sub(rb'"(id|item_id|call_id)":\s*"[0-9a-f]{8,32}"', rb'"\1":"x"', body)


def _choice(event: bytes) -> int:
    found = re.search(rb'"choices":\[\{"index":(\d+)', event)
    return int(found[1]) if found else 99


@pytest.fixture(scope="module")
def sidecars(
    vllm_server: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, RunningSidecar]]:
    """One for each token source."""
    traces = tmp_path_factory.mktemp("conformance-vllm")
    running = {
        source: RunningSidecar(vllm_server, traces / source, token_source=source)
        for source in SOURCES
    }
    yield running
    for sidecar in running.values():
        sidecar.stop()


def _sources(name: str) -> list[str]:
    """The token sources that make a difference to a case; without any there is nothing to do."""
    sources = ["tap"]
    if name.startswith(("chat/", "completions/")):
        sources.append("api")
    if name.endswith("/text"):
        sources.append("none")
    return sources


def _exchange(port: int, request: bytes) -> tuple[Message, str]:
    """Return the reply and how the connection ended."""
    reader = Reader(lambda *_: request.startswith(b"HEAD"))
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.sendall(request)
        end = "fin"
        try:
            while data := connection.recv(65536):
                reader.feed(data)
        except ConnectionResetError:
            end = "rst"
    reader.end()
    (message,) = reader.messages
    assert message.complete and not reader.rest
    return message, end


def _comparable(found: tuple[Message, str]) -> tuple[object, ...]:
    message, end = found
    length = message.value(b"content-length")
    if length is not None and message.body:
        assert int(length) == len(message.body)
    fields = [(k, v) for k, v in message.fields if k not in (b"date", b"content-length")]
    return message.start, fields, message.framing, without_chance(bytes(message.body)), end


def _record(sidecar: RunningSidecar, seen: int) -> Exchange:
    """Return the one record that was made since there were ``seen``."""
    found = sidecar.calls(seen + 1)
    assert len(found) == seen + 1
    return max(found, key=lambda exchange: exchange.started)


@pytest.mark.parametrize("name", [*CALLS, *OTHERS])
def test_the_same_bytes(vllm_server: str, sidecars: dict[str, RunningSidecar], name: str) -> None:
    request = CALLS.get(name) or OTHERS[name]
    port = int(vllm_server.rsplit(":", 1)[1])
    _exchange(port, request)  # Fills the prefix cache, which usage tells of.
    direct = _comparable(_exchange(port, request))
    # How many tokens an event holds, and the last digits of log-probs, depend on how busy the
    # engine is.
    attempts = 4 if "/streamed/" in name or name.endswith("/logprobs") else 1
    if name.endswith(("/text", "/tools", "/n=2", "/logprobs")):
        assert direct[0] == b"HTTP/1.1 200 OK", direct
    for source in _sources(name):
        sidecar = sidecars[source]
        for attempt in range(attempts):
            seen = len(sidecar.calls(0))
            through = _exchange(sidecar.port, request)
            if _comparable(through) == direct or attempt == attempts - 1:
                break
            direct = _comparable(_exchange(port, request))
        assert _comparable(through) == direct, source
        record = _record(sidecar, seen)
        assert record.outcome == "complete"
        assert record.response is not None
        if name in OTHERS:
            assert record.route == "other" and record.request.body is None
            continue
        assert record.request.body is not None and record.response.body is not None
        assert record.request.body.raw() == request.partition(b"\r\n\r\n")[2]
        assert record.response.body.raw() == bytes(through[0].body)
        if source == "tap":
            told = wire.decode(record.tap)
            assert bool(told) == (direct[0] == b"HTTP/1.1 200 OK")
            assert all(o.reported == len(o.ids) for r in told for o in r.outputs.values())


def _running(url: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=10).text
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("vllm:num_requests_running{")
    )


def _until_running(url: str, count: int) -> float:
    """Wait until so many requests run in the engine; return the seconds it took."""
    began = time.monotonic()
    while _running(url) != count:
        assert time.monotonic() - began < 20, f"the engine does not get to {count} requests"
        time.sleep(0.005)
    return time.monotonic() - began


@pytest.mark.parametrize("when", ["before the first byte", "in the reply", "whole reply"])
@pytest.mark.parametrize(
    ("protocol", "source"),
    [
        *itertools.product(PROTOCOLS, ("direct", "tap")),
        # The protocols differ in nothing else that leaving depends on.
        ("chat", "api"),
        ("chat", "none"),
    ],
)
def test_a_client_that_leaves_frees_the_engine(
    vllm_server: str,
    sidecars: dict[str, RunningSidecar],
    protocol: Protocol,
    when: str,
    source: str,
) -> None:
    sidecar = sidecars.get(source)
    port = sidecar.port if sidecar is not None else int(vllm_server.rsplit(":", 1)[1])
    seen = len(sidecar.calls(0)) if sidecar is not None else 0
    _until_running(vllm_server, 0)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(_call(protocol, when != "whole reply", "long"))
        if when == "in the reply":
            received = b""
            while received.count(b"data: ") < 8:
                received += connection.recv(65536)
        else:
            _until_running(vllm_server, 1)
    seconds = _until_running(vllm_server, 0)
    print(f"{protocol}, {when}, {source}: free after {seconds * 1000:.0f} ms")
    assert seconds < _LEAVE_SECONDS
    if sidecar is None:
        return
    record = _record(sidecar, seen)
    assert record.outcome == "cancelled"
    if source == "tap":
        (request,) = wire.decode(record.tap)
        assert all(output.finish == "abort" for output in request.outputs.values())
