"""Anthropic Messages: blocks to messages, usage beside the prompt cache, streams that break off."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.protocols import messages
from daemon.protocols.conversation import (
    Image,
    Message,
    Other,
    Reasoning,
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
from tests.daemon.spoken import calls_of, dump, reasoning_of, text_of

REQUEST = dump(samples.MESSAGES_REQUEST)


def read_request(**body):
    return messages.parse(dump(body), None, event_stream=False).request


def read_stream(*events):
    return messages.parse(REQUEST, spoken.stream(*events, names=True), event_stream=True)


def test_request():
    request = messages.parse(REQUEST, None, event_stream=False).request
    assert (request.model, request.stream, request.max_tokens) == ("m", True, 100)
    assert request.response_format == samples.MESSAGES_REQUEST["output_config"]["format"]
    weather, time = samples.MESSAGES_REQUEST["tools"]
    assert request.tools == (
        Tool("weather", "Look.", samples.SCHEMA, weather),
        Tool("time", "", {"type": "object"}, time),
    )
    billing, brief = (block["text"] for block in samples.MESSAGES_REQUEST["system"])
    assert request.messages == (
        Message("system", (Text(billing), Text(brief))),
        Message(
            "user",
            (
                Text("What is this?"),
                Image("data", "image/png", sha256=samples.PIXEL_SHA),
                Image("url", ref="https://example.org/a.png"),
                Image("file", ref="file_1"),
            ),
        ),
        Message("system", (Text("Today is Monday."),)),
        Message(
            "assistant",
            (
                Reasoning("hm", "sig"),
                Reasoning("", "opaque"),
                Text("Look."),
                ToolCall("c1", "weather", '{"city":"Ulm"}'),
                ToolCall("c2", "time", "{}"),
            ),
        ),
        Message(
            "tool",
            (
                ToolResult("c2", (Text("no clock"),), error=True),
                ToolResult("c1", (Text("rain"),)),
            ),
        ),
        Message("user", (Text("Go on."),)),
    )


def test_blocks_of_other_kinds():
    document = {"type": "document", "source": {"type": "text", "data": "a"}}
    image = {"type": "image", "source": {"type": "base64", "data": samples.PIXEL}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [document, image]}
    request = read_request(
        system="s",
        messages=[
            {"role": "user", "content": ["plain", document]},
            {
                "role": "assistant",
                "content": [
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                    found,
                    {"type": "mcp_tool_use", "id": "t", "server_name": "a", "name": "b"},
                ],
            },
        ],
    )
    picture = Image("data", sha256=samples.PIXEL_SHA)
    assert request.messages[1:] == (
        Message("user", (Text("plain"), Other("document", document))),
        Message(
            "assistant",
            (
                ToolCall("s", "web_search", "{}"),
                ToolResult("s", (Other("document", document), picture)),
                ToolCall("t", "a.b", ""),
            ),
        ),
    )


def test_billing_header_and_cache_marks_are_not_part_of_the_context():
    search = {"type": "web_search_20250305", "name": "web_search", "cache_control": {}}
    body = samples.MESSAGES_REQUEST
    body = body | {"tools": [*body["tools"], search]}
    other = body | {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.cf6;"},
            {"type": "text", "text": "Be brief."},
        ],
        "tools": [
            {k: v for k, v in tool.items() if k != "cache_control"} for tool in body["tools"]
        ],
    }
    assert dialogue(read_request(**other)) == dialogue(read_request(**body))
    longer = body | {"system": "Be long."}
    assert dialogue(read_request(**longer)).context != dialogue(read_request(**body)).context


def test_system_messages_inside_the_history_belong_to_it():
    view = dialogue(read_request(**samples.MESSAGES_REQUEST))
    assert view is not None
    assert ("system", "Today is Monday.") in view.items
    assert view.reasoned


def test_stream_and_whole_reply_are_the_same():
    whole = messages.parse(REQUEST, dump(samples.MESSAGES_REPLY), event_stream=False)
    streamed = read_stream(*samples.MESSAGES_STREAM)
    assert replies(streamed) == replies(whole)
    assert reasoning_of(streamed.replies[0]) == [Reasoning("Two numbers.", "sig")]
    assert text_of(streamed.replies[0]) == "I add."
    # The stream has the model's own text, the whole reply only what it parsed to.
    assert calls_of(streamed.replies[0]) == [("x", "add", '{"a": 1}')]
    assert calls_of(whole.replies[0]) == [("x", "add", '{"a":1}')]
    assert whole.replies[0].finish == streamed.replies[0].finish == "tool_use"
    # input_tokens leaves out what was read from and written to the cache.
    assert whole.usage == streamed.usage == Usage(6, 9, cached_tokens=2)
    assert whole.complete and streamed.complete


def test_stream_that_breaks_off_anywhere():
    events = samples.MESSAGES_STREAM
    for count in range(len(events)):
        said = read_stream(*events[:count])
        assert not said.complete
        if count == 0:
            assert said.replies == {} and said.usage is None
            continue
        assert said.usage and said.usage.prompt_tokens == 6
        reply = said.replies[0]
        assert "I add.".startswith(text_of(reply))
        for _, name, arguments in calls_of(reply):
            assert name == "add" and (arguments == "{}" or '{"a": 1}'.startswith(arguments))
    assert reply.finish == "tool_use"


def test_prompt_count_that_a_stream_begins_without():
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 0, "output_tokens": 0}}}
    said = read_stream(start)
    assert said.usage == Usage(None, 0)


def test_deltas_without_their_start():
    def delta(index, **fields):
        return {"type": "content_block_delta", "index": index, "delta": fields}

    said = read_stream(
        delta(1, type="text_delta", text="a"),
        delta(0, type="thinking_delta", thinking="hm"),
        delta(2, type="input_json_delta", partial_json="{}"),
    )
    assert said.replies[0].message.parts == (Reasoning("hm"), Text("a"), ToolCall("", "", "{}"))


def test_server_errors():
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "boom"}}
    said = read_stream(*samples.MESSAGES_STREAM[:10], error)
    assert (said.error, said.complete) == (ServerError("boom", "overloaded_error"), False)
    assert text_of(said.replies[0]) == "I add."
    whole = messages.parse(REQUEST, dump(error), event_stream=False)
    assert (whole.error, whole.replies) == (said.error, {})


def test_reply_is_what_the_next_request_repeats():
    said = read_stream(*samples.MESSAGES_STREAM)
    echo = {"role": "assistant", "content": samples.MESSAGES_REPLY["content"][1:]}
    after = read_request(
        **samples.MESSAGES_REQUEST | {"messages": [*samples.MESSAGES_REQUEST["messages"], echo]}
    )
    before, seen = dialogue(said.request), dialogue(after)
    assert before and seen
    assert seen.items == before.items + replies(said)[0].items


@pytest.mark.parametrize(
    "body",
    [b"[]", b'{"messages": 3}', b'{"messages": [3]}', b'{"messages": [{"content": 3}]}'],
)
def test_not_the_protocol(body):
    with pytest.raises(ProtocolError):
        messages.parse(body, None, event_stream=False)


@settings(deadline=None)
@given(spoken.requests, spoken.answers, st.booleans())
def test_any_bytes(request, response, event_stream):
    spoken.check_garbage(messages.parse, request, response, event_stream)
    spoken.check_garbage(messages.parse, REQUEST, response, event_stream)


@pytest.mark.parametrize("deep", spoken.DEEP)
def test_nested_deeply(deep):
    spoken.check_garbage(messages.parse, deep, None, False)
    spoken.check_garbage(messages.parse, REQUEST, deep, False)
