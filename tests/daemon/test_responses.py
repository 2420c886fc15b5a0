"""Responses: items to messages, and replies put together from whatever part of a stream came."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.protocols import responses
from daemon.protocols.conversation import (
    Image,
    Message,
    Other,
    Reasoning,
    ServerError,
    Text,
    ToolCall,
    ToolResult,
    Usage,
    dialogue,
    replies,
)
from daemon.protocols.shape import ProtocolError
from tests.daemon import samples, spoken
from tests.daemon.samples import responses_event as event
from tests.daemon.spoken import calls_of, dump, reasoning_of, text_of

REQUEST = dump(samples.RESPONSES_REQUEST)


def read_request(**body):
    return responses.parse(dump(body), None, event_stream=False).request


def read_stream(*events):
    return responses.parse(REQUEST, spoken.stream(*events, names=True), event_stream=True)


def test_request():
    request = responses.parse(REQUEST, None, event_stream=False).request
    assert (request.model, request.stream, request.max_tokens) == ("m", True, 100)
    assert request.response_format == samples.RESPONSES_REQUEST["text"]["format"]
    tools = [(tool.name, tool.schema) for tool in request.tools]
    assert tools == [
        ("weather", samples.SCHEMA),
        ("patch", None),
        ("web_search", None),
        ("agents.spawn", samples.SCHEMA),
    ]
    assert request.messages == (
        Message("system", (Text("Be brief."),)),
        Message("developer", (Text("You are at home."),)),
        Message(
            "user",
            (
                Text("What is this?"),
                Image("data", "image/png", sha256=samples.PIXEL_SHA),
                Image("file", ref="file-1"),
            ),
        ),
        Message(
            "assistant",
            (
                Reasoning("hm", "gAAA"),
                Text("Look."),
                ToolCall("c1", "weather", '{ "city": "Ulm" }'),
            ),
        ),
        Message("tool", (ToolResult("c1", (Text("rain"),)),)),
        Message("assistant", (ToolCall("c2", "patch", "*** Begin"),)),
        Message("tool", (ToolResult("c2", (Text("done"),)),)),
    )


def test_input_as_text():
    request = read_request(input="hi")
    assert request.messages == (Message("user", (Text("hi"),)),)
    assert dialogue(request) == dialogue(read_request(input=[{"role": "user", "content": "hi"}]))


@pytest.mark.parametrize(
    "body",
    [
        {"input": [{"type": "item_reference", "id": "rs_1"}]},
        {"input": "hi", "previous_response_id": "resp_1"},
        {"input": "hi", "conversation": "conv_1"},
    ],
)
def test_history_that_the_server_keeps_has_no_dialogue(body):
    request = read_request(**body)
    assert request.referenced and dialogue(request) is None


def test_items_of_other_kinds():
    shell = {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}}
    spawn = {"type": "function_call", "call_id": "d", "name": "spawn", "arguments": "{}"}
    compaction = {"type": "compaction", "encrypted_content": "x"}
    request = read_request(
        input=[
            shell,
            {"type": "local_shell_call_output", "id": "c", "output": "a"},
            spawn | {"namespace": "agents"},
            {"type": "function_call_output", "call_id": "d", "output": "no", "status": "failed"},
            compaction,
        ]
    )
    assert request.messages == (
        Message("assistant", (ToolCall("c", "local_shell", '{"command":["ls"]}'),)),
        Message("tool", (ToolResult("c", (Text("a"),)),)),
        Message("assistant", (ToolCall("d", "agents.spawn", "{}"),)),
        Message("tool", (ToolResult("d", (Text("no"),), error=True),)),
        Message("assistant", (Other("compaction", compaction),)),
    )


def test_stream_and_whole_reply_are_the_same():
    whole = responses.parse(REQUEST, dump(samples.RESPONSES_REPLY), event_stream=False)
    assert read_stream(*samples.RESPONSES_STREAM) == whole
    reply = whole.replies[0]
    assert reply.message.parts == (
        Reasoning("Two numbers."),
        Text("I add."),
        ToolCall("x", "add", '{"a": 1}'),
    )
    assert reply.finish == "completed"
    assert whole.usage == Usage(3, 9, cached_tokens=2, reasoning_tokens=4)
    assert whole.complete


def test_last_event_may_hold_no_output():
    *before, last = samples.RESPONSES_STREAM
    bare = last | {"response": last["response"] | {"output": []}}
    assert read_stream(*before, bare) == read_stream(*samples.RESPONSES_STREAM)


def test_an_item_that_is_done_is_all_there_is_of_it():
    """The item's last event may hold what no delta told."""
    added, done = (
        {"type": "message", "role": "assistant", "content": content}
        for content in ([], [{"type": "output_text", "text": "a"}, {"type": "output_image"}])
    )
    said = read_stream(
        event("output_item.added", output_index=0, item=added),
        event("output_text.delta", output_index=0, content_index=0, delta="a"),
        event("output_item.done", output_index=0, item=done),
    )
    parts = (Text("a"), Other("output_image", {"type": "output_image"}))
    assert said.replies[0].message.parts == parts


def test_stream_that_breaks_off_anywhere():
    """Each event taken away leaves a prefix of what was said; done events change nothing."""
    events = samples.RESPONSES_STREAM
    whole = read_stream(*events).replies[0]
    for count in range(len(events)):
        said = read_stream(*events[:count])
        assert not said.complete
        if count < 3:
            assert said.replies == {}
            continue
        reply = said.replies[0]
        assert reply.finish is None
        assert text_of(whole).startswith(text_of(reply))
        assert "Two numbers.".startswith("".join(r.text for r in reasoning_of(reply)))
        for _, name, arguments in calls_of(reply):
            assert name == "add" and '{"a": 1}'.startswith(arguments)
    # Everything but the last event: nothing is missing except how it ended.
    assert reply.message == whole.message


def test_deltas_alone():
    """A stream joined in the middle, as after a reconnect."""
    said = read_stream(
        event("output_text.delta", output_index=1, content_index=0, delta="b"),
        event("reasoning_summary_text.delta", output_index=0, summary_index=0, delta="hm"),
        event("output_text.delta", output_index=1, content_index=1, delta="c"),
        event("custom_tool_call_input.delta", output_index=2, item_id="ctc", delta="*** "),
        event("custom_tool_call_input.done", output_index=2, item_id="ctc", input="*** Begin"),
        event("refusal.delta", item_id="msg_9", content_index=0, delta="no"),
    )
    assert said.replies[0].message.parts == (
        Reasoning("hm"),
        Text("b"),
        Text("c"),
        ToolCall("", "custom_tool", "*** Begin"),
        Text("no"),
    )


def test_parallel_calls_interleaved():
    def call(kind, index, **fields):
        return event(f"function_call_arguments.{kind}", output_index=index, **fields)

    added = [
        event(
            "output_item.added",
            output_index=k,
            item={"type": "function_call", "call_id": f"c{k}", "name": f"f{k}", "arguments": ""},
        )
        for k in range(2)
    ]
    said = read_stream(
        *added,
        call("delta", 0, delta="{"),
        call("delta", 1, delta="["),
        call("delta", 0, delta="}"),
        call("delta", 1, delta="]"),
    )
    assert calls_of(said.replies[0]) == [("c0", "f0", "{}"), ("c1", "f1", "[]")]


def test_incomplete():
    reply = samples.RESPONSES_REPLY | {
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
    }
    said = read_stream(event("incomplete", response=reply))
    assert said.complete and said.replies[0].finish == "max_output_tokens"


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (
            event(
                "failed",
                response={
                    "status": "failed",
                    "output": [],
                    "error": {"code": "server_error", "message": "boom"},
                },
            ),
            ServerError("boom", "server_error"),
        ),
        (
            {"type": "error", "code": "rate_limit", "message": "boom", "param": None},
            ServerError("boom", "rate_limit"),
        ),
        ({"error": {"message": "boom", "type": "x"}}, ServerError("boom", "x")),
        (
            event("failed", response={"status": "cancelled", "output": [], "error": None}),
            ServerError("the response cancelled"),
        ),
    ],
)
def test_server_errors(last, error):
    body = spoken.stream(*samples.RESPONSES_STREAM[:-1], last)
    said = responses.parse(REQUEST, body, event_stream=True)
    assert (said.error, said.complete) == (error, False)
    assert text_of(said.replies[0]) == "I add."


def test_reply_is_what_the_next_request_repeats():
    """The digest view of a reply: harnesses leave status, annotations and reasoning out."""
    said = read_stream(*samples.RESPONSES_STREAM)
    echo = [
        {"type": "message", "role": "assistant", "content": "I add. "},
        {"type": "function_call", "call_id": "x", "name": "add", "arguments": '{"a":1}'},
    ]
    after = read_request(
        **samples.RESPONSES_REQUEST | {"input": samples.RESPONSES_REQUEST["input"] + echo}
    )
    before, seen = dialogue(said.request), dialogue(after)
    assert before and seen
    assert seen.context == before.context
    assert seen.items == before.items + replies(said)[0].items
    assert replies(said)[0].reasoned and before.reasoned


@pytest.mark.parametrize(
    "body", [b"[]", b'{"input": 3}', b'{"input": [3]}', b'{"input": [], "tools": {}}']
)
def test_not_the_protocol(body):
    with pytest.raises(ProtocolError):
        responses.parse(body, None, event_stream=False)


@settings(deadline=None)
@given(spoken.requests, spoken.answers, st.booleans())
def test_any_bytes(request, response, event_stream):
    spoken.check_garbage(responses.parse, request, response, event_stream)
    spoken.check_garbage(responses.parse, REQUEST, response, event_stream)


@pytest.mark.parametrize("deep", spoken.DEEP)
def test_nested_deeply(deep):
    spoken.check_garbage(responses.parse, deep, None, False)
    spoken.check_garbage(responses.parse, REQUEST, deep, False)
