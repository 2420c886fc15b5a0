"""The daemon's readers on what the real vLLM says, in all four protocols."""

import json
from typing import Any

import httpx
import pytest

from daemon import exchange as exchanges
from daemon.protocols.conversation import Said, ToolCall
from daemon.protocols.read import read
from sidecar.routing.routes import route
from sidecar.traces.record import Body, Exchange, Outcome, Request, Response, Session
from tests.serving import protocols
from tests.serving.protocols import CHAT, COMPLETIONS, Protocol
from tests.serving.tapped import TappedReply, tapped_post

pytestmark = pytest.mark.vllm

EVERY_PROTOCOL = pytest.mark.parametrize("protocol", protocols.ALL, ids=lambda p: p.name)
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}}
TOOLS: dict[str, dict[str, Any]] = {
    "chat": {
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}],
        "tool_choice": "required",
    },
    "responses": {
        "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
        "tool_choice": "required",
    },
    "messages": {
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
    },
}


def recorded(
    path: str, body: dict[str, Any], reply: TappedReply, outcome: Outcome = "complete"
) -> Exchange:
    return Exchange(
        id="1",
        route=route("POST", path),
        session=Session(run="run-1"),
        upstream="",
        request=Request("POST", path, [], Body.of(json.dumps(body).encode())),
        started=1.0,
        ended=2.0,
        outcome=outcome,
        response=Response(reply.status, list(reply.headers.items()), Body.of(reply.body)),
        tap=reply.lines,
        tap_source="inline",
    )


def text(said: Said, index: int = 0) -> str:
    return said.replies[index].message.text


def ask(url: str, protocol: Protocol, body: dict[str, Any]) -> Exchange:
    reply = tapped_post(url, protocol.path, body)
    assert reply.status == 200, reply.body
    return recorded(protocol.path, body, reply)


@EVERY_PROTOCOL
@STREAM
def test_replies_are_read_and_pass_the_checks(
    vllm_server: str, protocol: Protocol, stream: bool
) -> None:
    # vLLM fills what a request leaves out with the model's own defaults, top_p for one.
    neutral = {"top_p": 1.0, "temperature": 1.0, "top_k": 0}
    found = ask(vllm_server, protocol, protocol.body(12, stream, **neutral))
    said = read(found)
    assert said.complete and said.error is None
    assert text(said) and said.request.max_tokens == 12
    assert said.usage is not None and said.usage.completion_tokens
    assert said.replies[0].finish
    (entry,) = exchanges.read(found)
    assert (entry.check, entry.left_out) == ("passed", None), entry.failures
    assert entry.call is not None and entry.call.reply is not None


@EVERY_PROTOCOL
def test_stream_and_whole_reply_say_the_same(vllm_server: str, protocol: Protocol) -> None:
    whole, streamed = (
        read(ask(vllm_server, protocol, protocol.body(12, stream, temperature=0.0)))
        for stream in (False, True)
    )
    assert text(whole) == text(streamed)
    assert whole.replies[0].finish == streamed.replies[0].finish
    assert whole.usage == streamed.usage


@pytest.mark.parametrize("name", TOOLS)
@STREAM
def test_tool_calls(vllm_server: str, name: str, stream: bool) -> None:
    (protocol,) = (p for p in protocols.ALL if p.name == name)
    found = ask(vllm_server, protocol, protocol.body(60, stream, **TOOLS[name]))
    said = read(found)
    calls = [part for part in said.replies[0].message.parts if isinstance(part, ToolCall)]
    assert [tool.name for tool in said.request.tools] == ["weather"]
    assert calls and all(call.name == "weather" and call.id for call in calls)
    assert isinstance(json.loads(calls[0].arguments), dict)
    (entry,) = exchanges.read(found)
    # A required tool is sampled under a grammar, which is the agent's choice; all counts fit.
    assert {failure.name for failure in entry.failures} == {"sampling filter"}


@pytest.mark.parametrize("protocol", [CHAT, COMPLETIONS], ids=lambda p: p.name)
@STREAM
def test_several_choices(vllm_server: str, protocol: Protocol, stream: bool) -> None:
    found = ask(vllm_server, protocol, protocol.body(8, stream, n=2, seed=3))
    said = read(found)
    assert sorted(said.replies) == [0, 1] and text(said, 0) and text(said, 1)
    entries = exchanges.read(found)
    assert len(entries) == 2
    assert not [f for e in entries for f in e.failures if f.name.endswith("count")]


@STREAM
def test_several_prompts(vllm_server: str, stream: bool) -> None:
    body = COMPLETIONS.body(6, stream, prompt=["One two three", "Red green"], n=2, echo=True)
    found = ask(vllm_server, COMPLETIONS, body)
    said = read(found)
    assert sorted(said.replies) == [0, 1, 2, 3]
    assert not [k for k in said.replies if text(said, k).startswith(("One two", "Red green"))]
    entries = exchanges.read(found)
    assert len(entries) == 4
    assert not [f for e in entries for f in e.failures if f.name.endswith("count")]


@EVERY_PROTOCOL
def test_stream_cut_anywhere(vllm_server: str, protocol: Protocol) -> None:
    found = ask(vllm_server, protocol, protocol.body(12, True, temperature=0.0))
    assert found.response is not None and found.response.body is not None
    whole, raw = text(read(found)), found.response.body.raw()
    body = protocol.body(12, True)
    for end in range(0, len(raw), 7):
        reply = TappedReply(
            200, httpx.Headers({"content-type": "text/event-stream"}), raw[:end], [], ""
        )
        said = read(recorded(protocol.path, body, reply, "cancelled"))
        assert whole.startswith(text(said) if said.replies else "")


@EVERY_PROTOCOL
@pytest.mark.parametrize(
    ("change", "status"),
    [({"model": "nobody"}, 404), ({"temperature": "hot"}, 400)],
    ids=["unknown model", "bad value"],
)
def test_errors(vllm_server: str, protocol: Protocol, change: dict[str, Any], status: int) -> None:
    body = protocol.body(4, False) | change
    reply = tapped_post(vllm_server, protocol.path, body)
    said = read(recorded(protocol.path, body, reply))
    assert reply.status == status
    assert said.error is not None and said.error.kind
    assert not said.error.message.startswith("{")
    assert said.replies == {} and not said.complete
