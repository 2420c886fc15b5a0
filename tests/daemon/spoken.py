"""Helpers of the protocol tests: bodies of streams, and bytes that no protocol foresees."""

import json
from typing import Any

from hypothesis import strategies as st

from daemon.protocols.conversation import (
    Reasoning,
    Reply,
    Said,
    Text,
    ToolCall,
    dialogue,
    replies,
)
from daemon.protocols.shape import ProtocolError


def dump(value: Any) -> bytes:
    return json.dumps(value).encode()


def stream(*documents: Any, done: bool = False, names: bool = False) -> bytes:
    """An event stream; ``names``: each event is named after its document's type."""
    events = [
        (f"event: {document['type']}\n" if names else "") + f"data: {json.dumps(document)}\n\n"
        for document in documents
    ]
    return ("".join(events) + ("data: [DONE]\n\n" if done else "")).encode()


def text_of(reply: Reply) -> str:
    return "".join(part.text for part in reply.message.parts if isinstance(part, Text))


def calls_of(reply: Reply) -> list[tuple[str, str, str]]:
    found = [part for part in reply.message.parts if isinstance(part, ToolCall)]
    return [(call.id, call.name, call.arguments) for call in found]


def reasoning_of(reply: Reply) -> list[Reasoning]:
    return [part for part in reply.message.parts if isinstance(part, Reasoning)]


def check_garbage(parse: Any, request: bytes, response: bytes | None, event_stream: bool) -> None:
    """Whatever comes, a reader answers or says that it can't, and its answer has a digest view."""
    try:
        said = parse(request, response, event_stream=event_stream)
        assert isinstance(said, Said)
        dialogue(said.request)
        replies(said)
    except ProtocolError:
        pass


NAMES = [
    *("messages", "role", "content", "text", "type", "tool_calls", "function", "name", "id"),
    *("arguments", "input", "index", "delta", "choices", "message", "usage", "prompt_tokens"),
    *("input_tokens", "output", "output_index", "item", "response", "status", "error", "system"),
    *("tools", "parameters", "input_schema", "source", "data", "image_url", "url", "prompt", "n"),
    *("content_block", "partial_json", "reasoning", "summary", "finish_reason", "call_id"),
    *("content_index", "parts", "function_call", "custom", "output_config", "format", "detail"),
]
WORDS = [
    *(
        "text",
        "user",
        "assistant",
        "system",
        "tool",
        "tool_use",
        "tool_result",
        "image",
        "thinking",
    ),
    *("message", "function_call", "function_call_output", "reasoning", "item_reference", "base64"),
    *("message_start", "content_block_start", "content_block_delta", "message_delta", "error"),
    *("response.output_item.added", "response.output_item.done", "response.output_text.delta"),
    *("response.function_call_arguments.done", "response.completed", "namespace", "completed", ""),
    "data:image/png;base64,?",
]
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 2**70),
        st.floats(),
        st.sampled_from(WORDS),
        st.text(max_size=4),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    ),
    max_leaves=25,
)
objects = st.dictionaries(st.sampled_from(NAMES), values, max_size=6)
requests = st.one_of(objects.map(dump), values.map(dump), st.binary(max_size=40))
answers = st.one_of(
    requests,
    st.lists(objects, max_size=4).map(lambda documents: stream(*documents, done=True)),
)
DEEP = [b"[" * 100_000, b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}", b'{"a":' * 5000]
