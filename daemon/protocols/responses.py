"""OpenAI Responses, as its clients and vLLM write it.

Spec: OpenAI API reference, "Responses" and "Streaming events"; vLLM 0.30's
``responses/protocol.py``. Items become messages: adjacent items of the assistant make one message,
since chat puts a turn's reasoning, text and tool calls into one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from daemon.protocols import parts, shape, stream
from daemon.protocols.conversation import (
    Message,
    Other,
    Part,
    Reasoning,
    Reply,
    Request,
    Said,
    ServerError,
    Tool,
    ToolCall,
    ToolResult,
    Usage,
)

_ENDED = ("completed", "incomplete")
_ARGUMENTS = ("arguments", "input", "code", "action", "operation", "queries")
"""Where the items of tool calls keep what the model wrote, by kind of tool."""


def parse(request: bytes, response: bytes | None, *, event_stream: bool) -> Said:
    """Read one exchange; ``event_stream`` says that the reply is ``text/event-stream``.

    The reply of a stream is what its last event holds, and put together from the items and deltas
    before where that event is missing or holds none.

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
        reply.take_response(shape.fields(shape.decode(response), "reply"))
    items = reply.items()
    heard = bool(items) or reply.ended
    message = Message("assistant", tuple(part for item in items for part in _parts(item)))
    return Said(
        protocol="responses",
        request=asked,
        replies={0: Reply(message, reply.finish)} if heard else {},
        usage=reply.usage,
        complete=reply.ended and reply.error is None,
        error=reply.error,
    )


def read_request(value: Any) -> Request:
    """Read a request's decoded body.

    Raises:
        ProtocolError: it is not of the protocol's shape.
    """
    body = shape.fields(value, "request")
    messages = []
    if instructions := shape.string(body.get("instructions")):
        messages.append(Message("system", parts.openai_content(instructions)))
    given = body.get("input")
    if isinstance(given, str):
        items = [{"role": "user", "content": given}]
    else:
        items = [_item(element) for element in shape.elements(given, "input")]
    messages += _messages(items)
    tools = shape.elements(body.get("tools"), "tools")
    text = shape.fields(body.get("text"), "text")
    return Request(
        model=shape.string(body.get("model")),
        stream=bool(body.get("stream")),
        messages=tuple(messages),
        tools=tuple(tool for element in tools for tool in _tools(element)),
        response_format=shape.fields(text.get("format"), "text.format") or None,
        max_tokens=shape.count(body.get("max_output_tokens")),
        referenced=bool(body.get("previous_response_id") or body.get("conversation"))
        or any(item.get("type") == "item_reference" for item in items),
    )


def _item(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"role": "user", "content": value}
    return shape.fields(value, "input item")


def _kind(item: dict[str, Any]) -> str:
    # A message may leave its type out.
    return shape.string(item.get("type")) or "message"


def _messages(items: Iterable[dict[str, Any]]) -> list[Message]:
    found: list[Message] = []
    for item in items:
        role = _role(item)
        said = _parts(item)
        if role == "assistant" and found and found[-1].role == role:
            found[-1] = Message(role, (*found[-1].parts, *said))
        else:
            found.append(Message(role, said))
    return found


def _role(item: dict[str, Any]) -> str:
    if _kind(item).endswith("_call_output"):
        return "tool"
    return shape.string(item.get("role")) or "assistant"


def _parts(item: dict[str, Any]) -> tuple[Part, ...]:
    kind = _kind(item)
    if kind == "message":
        return parts.openai_content(item.get("content"))
    if kind == "reasoning":
        texts = shape.elements(item.get("content")) or shape.elements(item.get("summary"))
        pieces = [shape.string(shape.fields(text, "reasoning").get("text")) for text in texts]
        return (Reasoning("\n".join(pieces), shape.optional(item.get("encrypted_content"))),)
    if kind.endswith("_call"):
        return (_tool_call(kind, item),)
    if kind.endswith("_call_output"):
        call = shape.string(item.get("call_id") or item.get("id"))
        failed = item.get("status") in ("failed", "incomplete")
        return (ToolResult(call, parts.openai_content(item.get("output")), failed),)
    return (Other(kind, item),)


def _tool_call(kind: str, item: dict[str, Any]) -> ToolCall:
    """``kind``: ``function_call``, ``custom_tool_call``, or one of the server's own tools, whose
    calls are named after their kind."""
    name = shape.string(item.get("name")) or kind.removesuffix("_call")
    space = shape.string(item.get("namespace") or item.get("server_label"))
    written = next((item[name] for name in _ARGUMENTS if item.get(name) is not None), None)
    return ToolCall(
        id=shape.string(item.get("call_id") or item.get("id")),
        name=f"{space}.{name}" if space else name,
        arguments=shape.string(written),
    )


def _tools(value: Any, space: str = "") -> list[Tool]:
    """The tools of one element; a namespace holds several."""
    raw = shape.fields(value, "tool")
    name = shape.string(raw.get("name") or raw.get("type"))
    if raw.get("type") == "namespace" and not space:
        inner = shape.elements(raw.get("tools"), "tools")
        return [tool for element in inner for tool in _tools(element, name)]
    schema = raw.get("parameters", {} if raw.get("type") == "function" else None)
    return [
        Tool(
            name=f"{space}.{name}" if space else name,
            description=shape.string(raw.get("description")),
            schema=None if schema is None else shape.fields(schema, "tool schema"),
            raw=raw,
        )
    ]


@dataclass(frozen=True)
class _Place:
    """Where the text of a kind of delta goes in its item; ``done`` is the field of the event that
    repeats the whole text at the end."""

    item: str
    done: str
    list_field: str | None = None
    part: str = ""


_PLACES = {
    "response.output_text": _Place("message", "text", "content", "output_text"),
    "response.refusal": _Place("message", "refusal", "content", "refusal"),
    "response.reasoning_text": _Place("reasoning", "text", "content", "reasoning_text"),
    "response.reasoning_summary_text": _Place("reasoning", "text", "summary", "summary_text"),
    "response.function_call_arguments": _Place("function_call", "arguments"),
    "response.mcp_call_arguments": _Place("mcp_call", "arguments"),
    "response.custom_tool_call_input": _Place("custom_tool_call", "input"),
    "response.code_interpreter_call_code": _Place("code_interpreter_call", "code"),
}


@dataclass
class _Item:
    """An output item that is being streamed: how it began, and the texts that came since."""

    start: dict[str, Any]
    texts: dict[tuple[_Place, int], list[str]] = field(default_factory=dict)
    done: bool = False

    def result(self) -> dict[str, Any]:
        item = dict(self.start)
        if self.done:
            return item
        lists: dict[str, list[Any]] = {}
        for (place, _), pieces in sorted(self.texts.items(), key=lambda entry: entry[0][1]):
            item.setdefault("type", place.item)
            text = "".join(pieces)
            if place.list_field is None:
                item[place.done] = text
            else:
                part = {"type": place.part, place.done: text}
                lists.setdefault(place.list_field, []).append(part)
        return item | lists


class _Assembly:
    def __init__(self) -> None:
        self._items: dict[int | str, _Item] = {}
        self._output: Sequence[dict[str, Any]] = ()
        self.usage: Usage | None = None
        self.finish: str | None = None
        self.ended = False
        self.error: ServerError | None = None

    def take_response(self, response: dict[str, Any]) -> None:
        """Take a response object: a whole reply, or what an event says of it so far."""
        output = shape.elements(response.get("output"), "output")
        self._output = [shape.fields(item, "item") for item in output]
        usage = shape.fields(response.get("usage"), "usage")
        if usage:
            read = shape.fields(usage.get("input_tokens_details"), "usage")
            written = shape.fields(usage.get("output_tokens_details"), "usage")
            self.usage = Usage(
                prompt_tokens=shape.count(usage.get("input_tokens")),
                completion_tokens=shape.count(usage.get("output_tokens")),
                cached_tokens=shape.count(read.get("cached_tokens")),
                reasoning_tokens=shape.count(written.get("reasoning_tokens")),
            )
        self.error = parts.server_error(response) or self.error
        status = response.get("status")
        if status in _ENDED:
            why = shape.fields(response.get("incomplete_details"), "incomplete_details")
            self.finish = shape.optional(why.get("reason")) or str(status)
            self.ended = True
        elif status in ("failed", "cancelled"):
            self.error = self.error or ServerError(f"the response {status}")

    def take_event(self, event: dict[str, Any]) -> None:
        kind = shape.string(event.get("type"))
        if "response" in event:
            self.take_response(shape.fields(event["response"], "response"))
        elif kind in ("response.output_item.added", "response.output_item.done"):
            item = self._item(event)
            item.start = shape.fields(event.get("item"), "item")
            item.done = kind.endswith(".done")
        elif kind == "error" or "error" in event:
            self.error = parts.server_error(event) or self.error
        else:
            name, _, verb = kind.rpartition(".")
            place = _PLACES.get(name)
            if place is not None and verb in ("delta", "done"):
                at = shape.count(event.get("content_index", event.get("summary_index"))) or 0
                pieces = self._item(event).texts.setdefault((place, at), [])
                if verb == "delta":
                    pieces.append(shape.string(event.get("delta")))
                elif event.get(place.done) is not None:
                    pieces[:] = [shape.string(event[place.done])]

    def _item(self, event: dict[str, Any]) -> _Item:
        """The item that an event is about, by its place in the output, else by its id."""
        index = shape.count(event.get("output_index"))
        if index is not None:
            return self._items.setdefault(index, _Item({}))
        identity = event.get("item_id") or shape.fields(event.get("item"), "item").get("id")
        return self._items.setdefault(shape.string(identity), _Item({}))

    def items(self) -> Sequence[dict[str, Any]]:
        if self._output:
            return self._output
        placed = [(key, item) for key, item in self._items.items() if isinstance(key, int)]
        named = [item for key, item in self._items.items() if isinstance(key, str)]
        ordered = [item for _, item in sorted(placed, key=lambda entry: entry[0])]
        return [item.result() for item in (*ordered, *named)]
