"""OpenAI chat completions, with the fields that vLLM and others add.

Spec: OpenAI API reference, "Create chat completion" and "Streaming"; vLLM 0.30's
``chat_completion/protocol.py``.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from daemon.protocols import parts, shape, stream
from daemon.protocols.conversation import (
    Message,
    Part,
    Reasoning,
    Reply,
    Request,
    Said,
    ServerError,
    Text,
    Tool,
    ToolCall,
    Usage,
)


def parse(request: bytes, response: bytes | None, *, event_stream: bool) -> Said:
    """Read one exchange; ``event_stream`` says that the reply is ``text/event-stream``.

    Raises:
        ProtocolError: a body is not JSON or not of the protocol's shape. A broken *last* event of
            a stream is not an error: cancelled streams end anywhere.
    """
    asked = read_request(shape.decode(request))
    reply = _Assembly()
    if response is not None and event_stream:
        for name, chunk in stream.documents(response):
            if name == stream.DONE:
                reply.done = True
            else:
                reply.take(chunk, part="delta")
    elif response is not None:
        reply.take(shape.fields(shape.decode(response), "reply"), part="message")
        reply.done = reply.error is None
    return Said(
        protocol="chat",
        request=asked,
        replies={index: choice.reply() for index, choice in sorted(reply.choices.items())},
        usage=reply.usage.total(len(reply.choices)),
        complete=reply.done and reply.error is None,
        error=reply.error,
    )


def read_request(value: Any) -> Request:
    """Read a request's decoded body.

    Raises:
        ProtocolError: it is not of the protocol's shape.
    """
    body = shape.fields(value, "request")
    tools = [*shape.elements(body.get("tools"), "tools")]
    tools += [{"function": f} for f in shape.elements(body.get("functions"), "functions")]
    return Request(
        model=shape.string(body.get("model")),
        stream=bool(body.get("stream")),
        messages=tuple(_message(m) for m in shape.elements(body.get("messages"), "messages")),
        tools=tuple(_tool(tool) for tool in tools),
        response_format=shape.fields(body.get("response_format"), "response_format") or None,
        max_tokens=shape.count(body.get("max_completion_tokens") or body.get("max_tokens")),
        choices=shape.count(body.get("n")) or 1,
    )


def _message(value: Any) -> Message:
    message = shape.fields(value, "message")
    role = shape.string(message.get("role"))
    content = message.get("content")
    if role in ("tool", "function"):
        return parts.tool_message(message.get("tool_call_id"), content)
    found: list[Part] = []
    if reasoning := _reasoning(message):
        found.append(Reasoning(reasoning))
    found += parts.openai_content(content if content else message.get("refusal"))
    calls = [shape.fields(c, "tool call") for c in shape.elements(message.get("tool_calls"))]
    if message.get("function_call"):
        calls.append({"function": message["function_call"]})
    found += [_tool_call(call) for call in calls]
    return Message(role, tuple(found))


def _reasoning(message: dict[str, Any]) -> str:
    # vLLM calls the field ``reasoning``, other servers and older releases the other name.
    return shape.string(message.get("reasoning") or message.get("reasoning_content"))


def _function(call: dict[str, Any]) -> tuple[str, str]:
    """Name and arguments of a tool call; a custom tool's input stands as its arguments."""
    if custom := shape.fields(call.get("custom"), "custom tool call"):
        return shape.string(custom.get("name")), shape.string(custom.get("input"))
    function = shape.fields(call.get("function"), "function")
    return shape.string(function.get("name")), shape.string(function.get("arguments"))


def _tool_call(call: dict[str, Any]) -> ToolCall:
    return ToolCall(shape.string(call.get("id")), *_function(call))


def _tool(value: Any) -> Tool:
    raw = shape.fields(value, "tool")
    definition = shape.fields(raw.get("function") or raw.get("custom"), "function") or raw
    schema = definition.get("parameters", {} if "function" in raw else None)
    return Tool(
        name=shape.string(definition.get("name") or raw.get("type")),
        description=shape.string(definition.get("description")),
        schema=None if schema is None else shape.fields(schema, "tool schema"),
        raw=raw,
    )


@dataclass
class _ToolCall:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class _ToolCalls:
    """Merges deltas by index, else by id; a name without either begins a new call."""

    def __init__(self) -> None:
        self._calls: list[_ToolCall] = []
        self._by_index: dict[int, _ToolCall] = {}
        self._by_id: dict[str, _ToolCall] = {}

    def take(self, delta: dict[str, Any]) -> None:
        identity = shape.string(delta.get("id"))
        name, arguments = _function(delta)
        call = self._find(shape.count(delta.get("index")), identity, name)
        call.id = call.id or identity
        if name != call.name:  # Some servers repeat the whole name in every delta.
            call.name += name
        call.arguments.append(arguments)

    def _find(self, index: int | None, identity: str, name: str) -> _ToolCall:
        if index is not None:
            known = self._by_index.get(index)
            # Some servers give every parallel call index 0.
            other = known is not None and name and identity and known.id not in ("", identity)
            if known is None or other:
                known = self._by_index[index] = self._by_id.get(identity) or self._new(identity)
            return known
        if identity:
            return self._by_id.get(identity) or self._new(identity)
        return self._new("") if name or not self._calls else self._calls[-1]

    def _new(self, identity: str) -> _ToolCall:
        call = _ToolCall(identity)
        self._calls.append(call)
        if identity:
            self._by_id[identity] = call
        return call

    def result(self) -> list[ToolCall]:
        return [ToolCall(call.id, call.name, "".join(call.arguments)) for call in self._calls]


class Counts:
    """The usage of a reply. A stream may carry running counts, which are of one choice only and so
    say nothing of a reply with several; its last chunk, without choices, has the whole."""

    def __init__(self) -> None:
        self._whole: Usage | None = None
        self._running: Usage | None = None

    def take(self, payload: dict[str, Any], *, whole: bool) -> None:
        usage = shape.fields(payload.get("usage"), "usage")
        if not usage:
            return
        prompt = shape.fields(usage.get("prompt_tokens_details"), "usage")
        completion = shape.fields(usage.get("completion_tokens_details"), "usage")
        counts = Usage(
            prompt_tokens=shape.count(usage.get("prompt_tokens")),
            completion_tokens=shape.count(usage.get("completion_tokens")),
            cached_tokens=shape.count(prompt.get("cached_tokens")),
            reasoning_tokens=shape.count(completion.get("reasoning_tokens")),
        )
        if whole:
            self._whole = counts
        else:
            self._running = counts

    def total(self, choices: int) -> Usage | None:
        return self._whole or (self._running if choices <= 1 else None)


@dataclass
class _Choice:
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: _ToolCalls = field(default_factory=_ToolCalls)
    finish: str | None = None
    whole: Message | None = None

    def take(self, delta: dict[str, Any]) -> None:
        for content in parts.openai_content(delta.get("content") or delta.get("refusal")):
            if isinstance(content, Text):
                self.text.append(content.text)
        self.reasoning.append(_reasoning(delta))
        calls = [shape.fields(c, "tool call") for c in shape.elements(delta.get("tool_calls"))]
        if delta.get("function_call"):
            calls.append({"index": 0, "function": delta["function_call"]})
        for call in calls:
            self.calls.take(call)

    def reply(self) -> Reply:
        if self.whole is not None:
            return Reply(self.whole, self.finish)
        found: list[Part] = []
        if reasoning := "".join(self.reasoning):
            found.append(Reasoning(reasoning))
        if text := "".join(self.text):
            found.append(Text(text))
        return Reply(Message("assistant", (*found, *self.calls.result())), self.finish)


@dataclass
class _Assembly:
    choices: defaultdict[int, _Choice] = field(default_factory=lambda: defaultdict(_Choice))
    usage: Counts = field(default_factory=Counts)
    done: bool = False
    error: ServerError | None = None

    def take(self, payload: dict[str, Any], part: str) -> None:
        """Fold in a whole reply (``part="message"``) or one chunk (``part="delta"``)."""
        self.error = parts.server_error(payload) or self.error
        choices = shape.elements(payload.get("choices"), "choices")
        for value in choices:
            choice = shape.fields(value, "choice")
            state = self.choices[shape.count(choice.get("index")) or 0]
            said = shape.fields(choice.get(part), part)
            if part == "message":
                state.whole = _message({**said, "role": "assistant"})
            else:
                state.take(said)
            state.finish = shape.optional(choice.get("finish_reason")) or state.finish
        self.usage.take(payload, whole=part == "message" or not choices)
