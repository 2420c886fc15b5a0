"""Chat completions: replies assembled from any stream, dialogues equal under any spelling."""

import json

import pytest

from daemon.protocols import chat
from tokenization.calls import Usage


def stream(*chunks, done=True) -> bytes:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return ("".join(lines) + ("data: [DONE]\n\n" if done else "")).encode()


def delta(index=0, finish=None, **fields):
    return {"choices": [{"index": index, "delta": fields, "finish_reason": finish}]}


def read_stream(*chunks, done=True) -> chat.ChatExchange:
    return chat.parse(b'{"messages": []}', stream(*chunks, done=done), event_stream=True)


def items(*messages, tools=()):
    body = json.dumps({"messages": list(messages), "tools": list(tools)}).encode()
    return chat.parse(body, None, event_stream=False).dialogue


def test_stream_and_plain_reply_are_the_same():
    message = {
        "role": "assistant",
        "content": "I add.",
        "tool_calls": [
            {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        ],
    }
    plain = {
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 9},
    }
    whole = chat.parse(b'{"messages": []}', json.dumps(plain).encode(), event_stream=False)
    parts = read_stream(
        delta(role="assistant", content=""),
        delta(content="I "),
        delta(content="add."),
        delta(tool_calls=[{"index": 0, "id": "x", "function": {"name": "add", "arguments": ""}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"a":'}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": " 1}"}}]),
        delta(finish="tool_calls"),
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}},
    )
    assert whole.replies == parts.replies
    assert parts.replies[0].items == (("assistant", "I add."), ("call", "add", '{"a":1}'))
    assert parts.replies[0].finish == "tool_calls"
    assert whole.usage == parts.usage == Usage(3, 9)
    assert parts.complete and whole.complete


def calls(parsed: chat.ChatExchange):
    return [item for item in parsed.replies[0].items if item[0] == "call"]


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
                {"id": "x", "function": {"name": "a", "arguments": "{"}},
                {"id": "x", "function": {"arguments": "}"}},
                {"id": "y", "function": {"name": "b", "arguments": "[]"}},
            ],
            id="by id",
        ),
        pytest.param(
            [
                {"function": {"name": "a", "arguments": "{"}},
                {"function": {"arguments": "}"}},
                {"function": {"name": "b", "arguments": "[]"}},
            ],
            id="neither",
        ),
        pytest.param(
            [
                {"index": 0, "id": "x", "function": {"name": "a", "arguments": "{}"}},
                {"index": 0, "id": "y", "function": {"name": "b", "arguments": "[]"}},
            ],
            id="all index 0",
        ),
    ],
)
def test_tool_call_deltas(deltas):
    parsed = read_stream(*(delta(tool_calls=[d]) for d in deltas))
    assert calls(parsed) == [("call", "a", "{}"), ("call", "b", "[]")]


def test_choices_are_kept_apart():
    parsed = read_stream(delta(1, content="b"), delta(0, content="a"), delta(1, content="B"))
    assert {k: r.items for k, r in parsed.replies.items()} == {
        0: (("assistant", "a"),),
        1: (("assistant", "bB"),),
    }


def test_cut_stream_keeps_what_came():
    body = stream(delta(content="half"), done=False) + b'data: {"choices": [{"ind'
    parsed = chat.parse(b'{"messages": []}', body, event_stream=True)
    assert parsed.replies[0].items == (("assistant", "half"),)
    assert not parsed.complete and parsed.usage is None


def test_server_error_in_a_stream():
    assert read_stream({"error": {"message": "boom"}}).error == "boom"


@pytest.mark.parametrize("reasoning", [{"reasoning": "hm"}, {"reasoning_content": "hm"}])
def test_reasoning_is_noted(reasoning):
    assert read_stream(delta(**reasoning), delta(content="x")).replies[0].reasoned
    assert read_stream(delta(content="<think>a</think>x")).replies[0].reasoned
    assert items({"role": "assistant", "content": "x", **reasoning}).reasoned
    assert not read_stream(delta(content="x")).replies[0].reasoned


def test_spelling_does_not_matter():
    one = items(
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"b":1,"a":2}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42\n"},
    )
    other = items(
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


def test_context_is_system_prompt_and_tools():
    user = {"role": "user", "content": "hi"}
    plain = items(user)
    assert items({"role": "system", "content": "s"}, user).context != plain.context
    assert items(user, tools=[{"name": "t"}]).context != plain.context
    assert items({"role": "user", "content": "other"}).context == plain.context


def test_images_differ_by_content():
    def image(url):
        return items({"role": "user", "content": [{"type": "image_url", "image_url": url}]})

    assert image("a") == image("a") != image("b")


@pytest.mark.parametrize(
    ("request_body", "response", "event_stream"),
    [
        (b"nonsense", None, False),
        (b"[]", None, False),
        (b'{"messages": 3}', None, False),
        (b'{"messages": ["x"]}', None, False),
        (b'{"messages": []}', b"<html>", False),
        (b'{"messages": []}', b"data: {broken\n\ndata: {}\n\n", True),
        (b'{"messages": []}', b"data: []\n\ndata: {}\n\n", True),
    ],
)
def test_not_the_protocol(request_body, response, event_stream):
    with pytest.raises(chat.ProtocolError):
        chat.parse(request_body, response, event_stream=event_stream)
