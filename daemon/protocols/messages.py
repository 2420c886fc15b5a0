"""Anthropic Messages, as its clients and vLLM write it.

Spec: Anthropic API reference, "Messages" and "Streaming messages"; vLLM 0.30's
``anthropic/protocol.py``, which takes system messages inside the history too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from daemon.protocols import parts, shape, stream
from daemon.protocols.conversation import (
    Content,
    Image,
    Message,
    Other,
    Part,
    Reasoning,
    Reply,
    Request,
    Said,
    ServerError,
    Text,
    Tool,
    ToolCall,
    ToolResult,
    Usage,
)


def parse(request: bytes, response: bytes | None, *, event_stream: bool) -> Said:
    """Read one exchange; ``event_stream`` says that the reply is ``text/event-stream``.

    Raises:
        ProtocolError: a body is not JSON or not of the protocol's shape.
    """
    asked = read_request(shape.decode(request))
    reply = _Assembly()
    if response is not None and event_stream:
        for name, event in stream.documents(response):
            if name != stream.DONE:
                reply.take_event(event)
    elif response is not None:
        reply.take_reply(shape.fields(shape.decode(response), "reply"))
    said = tuple(part for _, block in sorted(reply.blocks.items()) for part in _parts(block.raw()))
    return Said(
        protocol="messages",
        request=asked,
        replies={0: Reply(Message("assistant", said), reply.finish)} if reply.begun else {},
        usage=_usage(reply.usage) if reply.usage else None,
        complete=reply.done and reply.error is None,
        error=reply.error,
    )


def read_request(value: Any) -> Request:
    """Read a request's decoded body.

    Raises:
        ProtocolError: it is not of the protocol's shape.
    """
    body = shape.fields(value, "request")
    messages = []
    if system := _content(body.get("system")):
        messages.append(Message("system", tuple(system)))
    for element in shape.elements(body.get("messages"), "messages"):
        messages += _messages(shape.fields(element, "message"))
    output = shape.fields(body.get("output_config"), "output_config")
    format_ = output.get("format") or body.get("output_format")
    return Request(
        model=shape.string(body.get("model")),
        stream=bool(body.get("stream")),
        messages=tuple(messages),
        tools=tuple(_tool(tool) for tool in shape.elements(body.get("tools"), "tools")),
        response_format=shape.fields(format_, "output format") or None,
        max_tokens=shape.count(body.get("max_tokens")),
    )


def _messages(message: dict[str, Any]) -> Iterator[Message]:
    """One message, or several where tool results stand beside other content."""
    role = shape.string(message.get("role"))
    content = _content(message.get("content"))
    if role == "assistant":
        yield Message(role, tuple(content))
        return
    for is_result, run in groupby(content, lambda part: isinstance(part, ToolResult)):
        yield Message("tool" if is_result else role, tuple(run))


def _content(value: Any) -> list[Part]:
    if isinstance(value, str):
        return [Text(value)] if value else []
    return [part for block in shape.elements(value, "content") for part in _parts(block)]


def _parts(value: Any) -> tuple[Part, ...]:
    if isinstance(value, str):
        return (Text(value),)
    block = shape.fields(value, "content block")
    kind = shape.string(block.get("type"))
    match kind:
        case "thinking":
            signature = shape.optional(block.get("signature"))
            return (Reasoning(shape.string(block.get("thinking")), signature),)
        case "redacted_thinking":
            return (Reasoning("", shape.optional(block.get("data"))),)
        case "tool_use" | "server_tool_use" | "mcp_tool_use":
            space = shape.string(block.get("server_name"))
            name = shape.string(block.get("name"))
            return (
                ToolCall(
                    id=shape.string(block.get("id")),
                    name=f"{space}.{name}" if space else name,
                    arguments=shape.string(block.get("input")),
                ),
            )
    if kind.endswith("tool_result"):
        content = block.get("content")
        return (
            ToolResult(
                call_id=shape.string(block.get("tool_use_id")),
                content=tuple(_plain(part) for part in _blocks(content)),
                error=bool(block.get("is_error")),
            ),
        )
    return (_plain(block),)


def _blocks(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [] if content is None or content == "" else [content]


def _plain(value: Any) -> Content:
    """Read a block that may stand inside a tool's result."""
    if isinstance(value, str):
        return Text(value)
    block = shape.fields(value, "content block")
    kind = shape.string(block.get("type"))
    if kind == "text":
        return Text(shape.string(block.get("text")))
    if kind == "image":
        return _image(shape.fields(block.get("source"), "image source"))
    return Other(kind or "unknown", block)


def _image(source: dict[str, Any]) -> Image:
    media_type = shape.optional(source.get("media_type"))
    match source.get("type"):
        case "url":
            return parts.image_at(shape.string(source.get("url")))
        case "file":
            return Image("file", media_type, ref=shape.string(source.get("file_id")))
    return parts.image_data(media_type, shape.string(source.get("data")))


def _tool(value: Any) -> Tool:
    raw = shape.fields(value, "tool")
    schema = raw.get("input_schema")
    return Tool(
        name=shape.string(raw.get("name") or raw.get("type")),
        description=shape.string(raw.get("description")),
        schema=None if schema is None else shape.fields(schema, "tool schema"),
        raw=raw,
    )


def _usage(usage: dict[str, Any]) -> Usage:
    """``input_tokens`` leaves out what was read from or written to the prompt cache."""
    read = shape.count(usage.get("cache_read_input_tokens"))
    written = shape.count(usage.get("cache_creation_input_tokens"))
    prompt = shape.count(usage.get("input_tokens"))
    if prompt is not None:
        prompt += (read or 0) + (written or 0)
    details = shape.fields(usage.get("output_tokens_details"), "usage")
    return Usage(
        # No prompt is empty: vLLM starts a stream with 0 where it does not know the count yet.
        prompt_tokens=prompt or None,
        completion_tokens=shape.count(usage.get("output_tokens")),
        cached_tokens=read,
        reasoning_tokens=shape.count(details.get("thinking_tokens")),
    )


@dataclass
class _Block:
    """A content block that is being streamed: how it began, and the text of its deltas."""

    start: dict[str, Any]
    texts: dict[str, list[str]] = field(default_factory=dict)

    def take(self, delta: dict[str, Any]) -> None:
        for name in ("text", "thinking", "signature", "partial_json"):
            if isinstance(delta.get(name), str):
                self.texts.setdefault(name, []).append(delta[name])

    def raw(self) -> dict[str, Any]:
        block = dict(self.start)
        for name, pieces in self.texts.items():
            text = "".join(pieces)
            if name == "partial_json":
                block["input"] = text
            else:
                block[name] = shape.string(block.get(name)) + text
            # A delta without its start still says what it belongs to.
            kinds = {"text": "text", "partial_json": "tool_use"}
            block.setdefault("type", kinds.get(name, "thinking"))
        return block


@dataclass
class _Assembly:
    blocks: dict[int, _Block] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    finish: str | None = None
    begun: bool = False
    done: bool = False
    error: ServerError | None = None

    def take_reply(self, reply: dict[str, Any]) -> None:
        """Take a message object: a whole reply, or a stream's empty first one."""
        self.error = parts.server_error(reply)
        if self.error is not None:
            return
        for block in shape.elements(reply.get("content"), "content"):
            self.blocks[len(self.blocks)] = _Block(shape.fields(block, "content block"))
        self._count(reply.get("usage"))
        self.finish = shape.optional(reply.get("stop_reason"))
        self.begun = self.done = True

    def take_event(self, event: dict[str, Any]) -> None:
        match event.get("type"):
            case "message_start":
                self.take_reply(shape.fields(event.get("message"), "message"))
                self.done = False
            case "content_block_start":
                self.begun = True
                block = shape.fields(event.get("content_block"), "content block")
                self.blocks[self._index(event)] = _Block(block)
            case "content_block_delta":
                self.begun = True
                block_now = self.blocks.setdefault(self._index(event), _Block({}))
                block_now.take(shape.fields(event.get("delta"), "delta"))
            case "message_delta":
                delta = shape.fields(event.get("delta"), "delta")
                self.finish = shape.optional(delta.get("stop_reason")) or self.finish
                self._count(event.get("usage"))
            case "message_stop":
                self.done = True
            case _:
                self.error = parts.server_error(event) or self.error

    def _index(self, event: dict[str, Any]) -> int:
        return shape.count(event.get("index")) or 0

    def _count(self, usage: Any) -> None:
        """Later counts replace earlier ones, field by field."""
        heard = shape.fields(usage, "usage")
        self.usage |= {name: count for name, count in heard.items() if count is not None}
