"""Chat completions: replies assembled from any stream, dialogues equal under any spelling."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.protocols import chat
from daemon.protocols.conversation import (
    Image,
    Message,
    Other,
    Reasoning,
    Said,
    ServerError,
    Text,
    Tool,
    ToolCall,
    ToolResult,
    Usage,
    dialogue,
    replies,
)
from daemon.protocols.shape import ProtocolError
from tests.daemon import samples, spoken
from tests.daemon.samples import chat_chunk as delta
from tests.daemon.spoken import calls_of, dump, reasoning_of, text_of

EMPTY = b'{"messages": []}'


def read_stream(*chunks, done=True) -> Said:
    return chat.parse(EMPTY, spoken.stream(*chunks, done=done), event_stream=True)


def read_whole(request: dict[str, Any], response: dict[str, Any]) -> Said:
    return chat.parse(dump(request), dump(response), event_stream=False)


def view(*messages, tools=()):
    body = dump({"messages": list(messages), "tools": list(tools)})
    return dialogue(chat.parse(body, None, event_stream=False).request)


def test_request():
    request = chat.parse(dump(samples.CHAT_REQUEST), None, event_stream=False).request
    assert (request.model, request.stream, request.choices) == ("m", True, 2)
    assert request.max_tokens == 100
    assert request.response_format == samples.ANSWER
    assert request.tools == (
        Tool("weather", "Look out of the window.", samples.SCHEMA, samples.CHAT_TOOL),
    )
    audio = samples.CHAT_REQUEST["messages"][1]["content"][3]
    assert request.messages == (
        Message("system", (Text("Be brief."),)),
        Message(
            "user",
            (
                Text("What is this?"),
                Image("data", "image/png", sha256=samples.PIXEL_SHA),
                Image("url", ref="https://example.org/a.png"),
                Other("input_audio", audio),
            ),
        ),
        Message(
            "assistant",
            (
                Reasoning("hm"),
                Text("Look."),
                ToolCall("c1", "weather", '{ "city": "Ulm" }'),
            ),
        ),
        Message("tool", (ToolResult("c1", (Text("rain"),)),)),
    )


def test_older_function_calls():
    request = chat.parse(
        dump(
            {
                "functions": [{"name": "f", "parameters": {}}],
                "messages": [
                    {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
                    {"role": "function", "name": "f", "content": "1"},
                ],
            }
        ),
        spoken.stream(
            delta(function_call={"name": "f", "arguments": '{"a"'}),
            delta(function_call={"arguments": ":1}"}),
        ),
        event_stream=True,
    )
    assert [tool.name for tool in request.request.tools] == ["f"]
    assert request.request.messages == (
        Message("assistant", (ToolCall("", "f", "{}"),)),
        Message("tool", (ToolResult("", (Text("1"),)),)),
    )
    assert calls_of(request.replies[0]) == [("", "f", '{"a":1}')]


def test_stream_and_whole_reply_are_the_same():
    whole = read_whole(samples.CHAT_REQUEST, samples.CHAT_REPLY)
    parts = read_stream(*samples.CHAT_STREAM)
    assert parts.replies == whole.replies
    assert replies(parts)[0].items == (("assistant", "I add."), ("call", "add", '{"a":1}'))
    assert parts.replies[0].finish == "tool_calls"
    assert reasoning_of(parts.replies[0]) == [Reasoning("Two numbers.")]
    assert whole.usage == parts.usage == Usage(3, 9, cached_tokens=2, reasoning_tokens=4)
    assert parts.complete and whole.complete


@pytest.mark.parametrize(
    "deltas",
    [
        pytest.param(
            [
                {"index": 0, "id": "x", "function": {"name": "a", "arguments": "{}"}},
                {"index": 1, "id": "y", "function": {"name": "b", "arguments": "["}},
                {"index": 1, "function": {"arguments": "]"}},
            ],
            id="by index",
        ),
        pytest.param(
            [
                {"index": 0, "id": "x", "function": {"name": "a", "arguments": "{"}},
                {"index": 1, "id": "y", "function": {"name": "b", "arguments": "["}},
                {"index": 0, "function": {"arguments": "}"}},
                {"index": 1, "function": {"arguments": "]"}},
            ],
            id="interleaved",
        ),
        pytest.param(
            [
                {"index": 0, "id": "x", "function": {"name": "a", "arguments": "{"}},
                {"index": 0, "id": "x", "function": {"name": "a", "arguments": "}"}},
                {"index": 1, "id": "y", "function": {"name": "b", "arguments": "[]"}},
            ],
            id="name repeated",
        ),
        pytest.param(
            [
                {"id": "x", "function": {"name": "a", "arguments": "{"}},
                {"id": "y", "function": {"name": "b", "arguments": "["}},
                {"id": "x", "function": {"arguments": "}"}},
                {"id": "y", "function": {"arguments": "]"}},
            ],
            id="by id",
        ),
        pytest.param(
            [
                {"index": 0, "id": "x", "function": {"name": "a", "arguments": "{"}},
                {"index": 0, "function": {"arguments": "}"}},
                {"index": 0, "id": "y", "function": {"name": "b", "arguments": "["}},
                {"index": 0, "function": {"arguments": "]"}},
            ],
            id="all index 0",
        ),
    ],
)
def test_tool_call_deltas(deltas):
    parsed = read_stream(*(delta(tool_calls=[d]) for d in deltas))
    assert calls_of(parsed.replies[0]) == [("x", "a", "{}"), ("y", "b", "[]")]


def test_tool_call_deltas_without_index_and_id():
    parsed = read_stream(
        delta(tool_calls=[{"function": {"name": "a", "arguments": "{"}}]),
        delta(tool_calls=[{"function": {"arguments": "}"}}]),
        delta(tool_calls=[{"function": {"name": "b", "arguments": "[]"}}]),
    )
    assert calls_of(parsed.replies[0]) == [("", "a", "{}"), ("", "b", "[]")]


def test_choices_are_kept_apart():
    parsed = read_stream(delta(1, content="b"), delta(0, content="a"), delta(1, content="B"))
    assert {k: text_of(reply) for k, reply in parsed.replies.items()} == {0: "a", 1: "bB"}


def test_running_counts_say_nothing_of_several_choices():
    def counted(index, tokens):
        return delta(index, content="a") | {
            "usage": {"prompt_tokens": 3, "completion_tokens": tokens}
        }

    assert read_stream(counted(0, 1), counted(0, 2)).usage == Usage(3, 2)
    assert read_stream(counted(0, 1), counted(1, 1)).usage is None
    final = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
    assert read_stream(counted(0, 2), final, counted(1, 2)).usage == Usage(3, 4)


def test_cut_stream_keeps_what_came():
    body = spoken.stream(delta(content="half")) + b'data: {"choices": [{"ind'
    parsed = chat.parse(EMPTY, body, event_stream=True)
    assert text_of(parsed.replies[0]) == "half"
    assert not parsed.complete and parsed.usage is None


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        ({"error": {"message": "boom", "type": "x", "code": 400}}, ServerError("boom", "x")),
        ({"error": {"message": "boom", "code": 503}}, ServerError("boom", "503")),
        ({"error": "boom"}, ServerError("boom")),
        (
            {"object": "error", "message": "boom", "type": "BadRequestError", "code": 400},
            ServerError("boom", "BadRequestError"),
        ),
        ({"detail": "boom"}, ServerError("boom")),
        ({"type": "error", "error": {"type": "x", "message": "boom"}}, ServerError("boom", "x")),
    ],
)
def test_server_errors(payload, error):
    streamed = read_stream(delta(content="a"), payload)
    assert (streamed.error, streamed.complete) == (error, False)
    whole = read_whole({"messages": []}, payload)
    assert (whole.error, whole.complete, whole.replies) == (error, False, {})


def test_a_refusal_is_what_was_said():
    assert text_of(read_stream(delta(refusal="I "), delta(refusal="won't")).replies[0]) == "I won't"


@pytest.mark.parametrize("reasoning", [{"reasoning": "hm"}, {"reasoning_content": "hm"}])
def test_reasoning_is_noted(reasoning):
    def reasoned(*chunks):
        return replies(read_stream(*chunks))[0].reasoned

    assert reasoned(delta(**reasoning), delta(content="x"))
    assert reasoned(delta(content="<think>a</think>x"))
    assert not reasoned(delta(content="x"))
    assert view({"role": "assistant", "content": "x", **reasoning}).reasoned


def test_spelling_does_not_matter():
    one = view(
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"b":1,"a":2}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42\n"},
    )
    other = view(
        {"role": "user", "content": [{"type": "text", "text": "hi "}], "cache_control": {}},
        {
            "role": "assistant",
            "content": "\n",
            "tool_calls": [
                {"id": "9", "function": {"name": "f", "arguments": '{ "a": 2, "b": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "9", "content": [{"type": "text", "text": "42"}]},
    )
    assert one == other


def test_context_is_the_leading_system_prompt_and_the_tools():
    user, system = {"role": "user", "content": "hi"}, {"role": "system", "content": "s"}
    plain = view(user)
    assert view(system, user).context != plain.context
    assert view({"role": "developer", "content": "s"}, user).context == view(system, user).context
    assert view(user, tools=[samples.CHAT_TOOL]).context != plain.context
    assert view({"role": "user", "content": "other"}).context == plain.context
    assert view(user, system).context == plain.context
    assert view(user, system).items == (("user", "hi"), ("system", "s"))


def test_images_differ_by_content():
    def image(url):
        return view({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})

    assert image("a") == image("a") != image("b")
    assert image("data:image/png;base64,aGk=") != image("data:image/png;base64,aGo=")


def test_what_json_forbids_and_servers_write():
    body = b'data: {"choices": [{"index": 0, "delta": {"content": "a\\ud83d"}, "lp": NaN}]}\n\n'
    assert text_of(chat.parse(EMPTY, body, event_stream=True).replies[0]) == "a\ufffd"


@pytest.mark.parametrize(
    ("request_body", "response", "event_stream"),
    [
        (b"nonsense", None, False),
        (b"[]", None, False),
        (b'{"messages": 3}', None, False),
        (b'{"messages": ["x"]}', None, False),
        (EMPTY, b"<html>", False),
        (EMPTY, b"data: {broken\n\ndata: {}\n\n", True),
        (EMPTY, b"data: []\n\ndata: {}\n\n", True),
        *((deep, None, False) for deep in spoken.DEEP[::2]),
        *((EMPTY, b"data: " + deep + b"\n\ndata: {}\n\n", True) for deep in spoken.DEEP[::2]),
    ],
)
def test_not_the_protocol(request_body, response, event_stream):
    with pytest.raises(ProtocolError):
        chat.parse(request_body, response, event_stream=event_stream)


@settings(deadline=None)
@given(spoken.requests, spoken.answers, st.booleans())
def test_any_bytes(request, response, event_stream):
    spoken.check_garbage(chat.parse, request, response, event_stream)
    spoken.check_garbage(chat.parse, EMPTY, response, event_stream)
