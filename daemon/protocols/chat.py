"""OpenAI chat completions: request and reply bytes → canonical dialogue, usage, finish reasons.

The dialogue is canonical so that two spellings of one message are equal: harnesses echo a reply
with other ids, other JSON spacing, text as a string or as blocks (see ``Dialogue``). It is used to
name why calls fork, never to make training tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import msgspec

from daemon.protocols import sse
from tokenization.calls import Dialogue, Item, Reply, Usage


class ProtocolError(ValueError):
    """The bytes are not a chat-completions exchange."""


@dataclass(frozen=True)
class ChatExchange:
    """What a chat-completions exchange said.

    ``replies`` maps the choice index to the assistant's reply. ``complete`` is False for a stream
    without its ``[DONE]``. ``error`` is the server's error message, if it sent one.
    """

    model: str
    stream: bool
    dialogue: Dialogue
    replies: dict[int, Reply]
    usage: Usage | None
    complete: bool
    error: str | None


def parse(request: bytes, response: bytes | None, *, event_stream: bool) -> ChatExchange:
    """Read one exchange; ``event_stream`` says that the reply is ``text/event-stream``.

    Raises:
        ProtocolError: a body is not JSON or not of the protocol's shape. A broken *last* event of
            a stream is not an error: cancelled streams end anywhere.
    """
    try:
        body = _object(msgspec.json.decode(request), "request")
        dialogue = _dialogue(body)
        reply = _Assembly()
        if response is not None:
            if event_stream:
                _read_stream(response, reply)
            else:
                reply.take(_object(msgspec.json.decode(response), "reply"), part="message")
                reply.done = True
        return ChatExchange(
            model=str(body.get("model", "")),
            stream=bool(body.get("stream")),
            dialogue=dialogue,
            replies={index: choice.reply() for index, choice in sorted(reply.choices.items())},
            usage=reply.usage,
            complete=reply.done,
            error=reply.error,
        )
    except (msgspec.DecodeError, AttributeError, TypeError, KeyError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a chat-completions exchange: {error}") from error


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ProtocolError(f"the {what} is not a JSON object")
    return value


def _read_stream(response: bytes, reply: "_Assembly") -> None:
    events = sse.events(response)
    for k, event in enumerate(events):
        if event.data.strip() == "[DONE]":
            reply.done = True
            continue
        try:
            chunk = msgspec.json.decode(event.data)
        except msgspec.DecodeError:
            if k == len(events) - 1:
                return
            raise
        reply.take(_object(chunk, "event"), part="delta")


@dataclass
class _ToolCall:
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class _Choice:
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[Any, _ToolCall] = field(default_factory=dict)
    finish: str | None = None

    def take(self, part: dict[str, Any]) -> None:
        if content := part.get("content") or part.get("refusal"):
            self.text.append(_text(content))
        # vLLM calls the field ``reasoning``, other servers and older releases the other name.
        if reasoning := part.get("reasoning") or part.get("reasoning_content"):
            self.reasoning.append(str(reasoning))
        for delta in part.get("tool_calls") or []:
            self._take_call(delta)

    def _take_call(self, delta: dict[str, Any]) -> None:
        function = delta.get("function") or {}
        identity, name = delta.get("id") or "", function.get("name") or ""
        key = delta.get("index")
        if key is None:
            key = identity or (next(reversed(self.calls), 0) if not name else len(self.calls))
        known = self.calls.get(key)
        if known and name and identity and known.id and identity != known.id:
            key = identity  # Some servers give every parallel call index 0.
        call = self.calls.setdefault(key, _ToolCall())
        call.id = call.id or identity
        call.name += name
        call.arguments += function.get("arguments") or ""

    def reply(self) -> Reply:
        text = "".join(self.text)
        items = list(_spoken("assistant", text))
        items += [("call", c.name, _arguments(c.arguments)) for c in self.calls.values()]
        reasoned = bool(self.reasoning) or "</think>" in text
        return Reply(items=tuple(items), reasoned=reasoned, finish=self.finish)


@dataclass
class _Assembly:
    choices: dict[int, _Choice] = field(default_factory=dict)
    usage: Usage | None = None
    done: bool = False
    error: str | None = None

    def take(self, payload: dict[str, Any], part: str) -> None:
        """Fold in a whole reply (``part="message"``) or one chunk (``part="delta"``)."""
        if error := payload.get("error"):
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)
        for choice in payload.get("choices") or []:
            state = self.choices.setdefault(choice.get("index", 0), _Choice())
            state.take(choice.get(part) or {})
            state.finish = choice.get("finish_reason") or state.finish
        if usage := payload.get("usage"):
            self.usage = Usage(usage.get("prompt_tokens"), usage.get("completion_tokens"))


def _dialogue(body: dict[str, Any]) -> Dialogue:
    items: list[Item] = []
    system: list[str] = []
    reasoned = False
    for message in body.get("messages") or []:
        role = message.get("role")
        text = _text(message.get("content"))
        if role in ("system", "developer"):
            system.append(text.strip())
            continue
        if message.get("reasoning") or message.get("reasoning_content") or "</think>" in text:
            reasoned = True
        if role in ("tool", "function"):
            items.append(("result", text.strip()))
            continue
        items += _spoken(str(role), text)
        for call in message.get("tool_calls") or []:
            function = call.get("function") or {}
            items.append(("call", function.get("name", ""), _arguments(function.get("arguments"))))
    return Dialogue(
        context=_digest([system, body.get("tools") or []]),
        items=tuple(items),
        reasoned=reasoned,
    )


def _spoken(role: str, text: str) -> Iterable[Item]:
    return [(role, text.strip())] if text.strip() else []


def _text(content: Any) -> str:
    """Text of a message; blocks that are not text stand as their type and digest."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for block in content:
        if isinstance(block, str):
            parts.append(block)
        elif "text" in block:
            parts.append(block["text"])
        else:
            parts.append(f"<{block.get('type')} {_digest(block)}>")
    return "\n".join(part for part in parts if part)


def _arguments(raw: Any) -> str:
    """Tool arguments with the spacing and key order taken out."""
    try:
        value = msgspec.json.decode(raw) if isinstance(raw, str) else raw
    except msgspec.DecodeError:
        return str(raw).strip()
    return msgspec.json.encode(value, order="deterministic").decode()


def _digest(value: Any) -> str:
    return sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]
