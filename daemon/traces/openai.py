"""Conversations in the format of OpenAI's fine-tuning files: one JSON object per conversation.

Format: https://platform.openai.com/docs/api-reference/fine-tuning/chat-input
"""

from collections.abc import Sequence
from typing import Any

from daemon.protocols.conversation import (
    Content,
    Image,
    Message,
    Part,
    Request,
    Text,
    Tool,
    ToolCall,
    ToolResult,
)
from daemon.traces.turns import Conversation


class NotExpressible(ValueError):
    """The format has no place for what a conversation holds."""


def example(conversation: Conversation) -> dict[str, Any]:
    """Return a training example; reasoning is left out, for which the format has no place.

    Raises:
        NotExpressible: a raw prompt, a history that is stored at the server, an image whose bytes
            the request did not name by URL, content of an unknown kind.
    """
    assert conversation.last.said is not None
    request = conversation.last.said.request
    _check(request)
    messages: list[dict[str, Any]] = []
    for message in conversation.messages:
        for one in _messages(message):
            if messages and one["role"] == messages[-1]["role"] == "assistant":
                _join(messages[-1], one)
            else:
                messages.append(one)
    found: dict[str, Any] = {"messages": messages}
    if request.tools:
        found["tools"] = [_tool(tool) for tool in request.tools]
    return found


def _check(request: Request) -> None:
    if request.prompts is not None:
        raise NotExpressible("a raw prompt is no conversation")
    if request.referenced:
        raise NotExpressible("part of the history is stored at the server")


def _messages(message: Message) -> list[dict[str, Any]]:
    results = [part for part in message.parts if isinstance(part, ToolResult)]
    found: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": result.call_id, "content": _content(result.content)}
        for result in results
    ]
    content = _content([part for part in message.parts if isinstance(part, Content)])
    calls = [_call(part) for part in message.parts if isinstance(part, ToolCall)]
    if calls:
        found.append({"role": message.role, "content": content or None, "tool_calls": calls})
    elif content or not results:
        found.append({"role": message.role, "content": content})
    return found


def _join(before: dict[str, Any], more: dict[str, Any]) -> None:
    """Some protocols say in several messages what is one here."""
    texts = [text for text in (before["content"], more["content"]) if text]
    if not all(isinstance(text, str) for text in texts):
        raise NotExpressible("a reply that holds images")
    before["content"] = "\n".join(texts) or None
    if calls := [*before.get("tool_calls", ()), *more.get("tool_calls", ())]:
        before["tool_calls"] = calls


def _content(parts: Sequence[Part]) -> str | list[dict[str, Any]]:
    if all(isinstance(part, Text) for part in parts):
        return "\n".join(part.text for part in parts if isinstance(part, Text))
    found: list[dict[str, Any]] = []
    for part in parts:
        match part:
            case Text():
                found.append({"type": "text", "text": part.text})
            case Image(source="url"):
                found.append({"type": "image_url", "image_url": {"url": part.ref}})
            case Image():
                raise NotExpressible("an image that is not given by its URL")
            case _:
                kind = getattr(part, "kind", type(part).__name__)
                raise NotExpressible(f"content of the kind {kind}")
    return found


def _call(part: ToolCall) -> dict[str, Any]:
    function = {"name": part.name, "arguments": part.arguments}
    return {"id": part.id, "type": "function", "function": function}


def _tool(tool: Tool) -> dict[str, Any]:
    if tool.schema is None:
        raise NotExpressible(f"the server's own tool {tool.name}")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.schema}
    return {"type": "function", "function": function}
