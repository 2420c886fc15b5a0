"""What an exchange said, the same for every protocol.

The types keep what was said as it was said. Two things are derived from them, both here: the
digest view that names why calls fork (``dialogue`` and ``reply``), and nothing else; training
tokens never come from text.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from daemon.protocols import shape
from daemon.protocols.shape import ProtocolError
from tokenization import calls
from tokenization.calls import Item

Protocol = Literal["chat", "completions", "responses", "messages"]

BILLING_PREFIX = "x-anthropic-billing-header"
"""Start of a system block that Claude Code changes from call to call and that vLLM does not
render."""


class Text(msgspec.Struct, frozen=True, tag="text"):
    text: str


class Image(msgspec.Struct, frozen=True, tag="image", omit_defaults=True):
    """An image by its source: ``sha256`` of its bytes where the request holds them, else ``ref``,
    a URL or a file id."""

    source: Literal["data", "url", "file"]
    media_type: str | None = None
    sha256: str | None = None
    ref: str | None = None


class Reasoning(msgspec.Struct, frozen=True, tag="reasoning", omit_defaults=True):
    """``opaque``: signature or encrypted content, which only its server can read."""

    text: str = ""
    opaque: str | None = None


class ToolCall(msgspec.Struct, frozen=True, tag="tool_call"):
    """``arguments`` is the text the model wrote; where the protocol parsed it, that JSON again."""

    id: str
    name: str
    arguments: str


class Other(msgspec.Struct, frozen=True, tag="other"):
    """Content of a kind that nothing here reads, as it came."""

    kind: str
    value: Any


class ToolResult(msgspec.Struct, frozen=True, tag="tool_result", omit_defaults=True):
    call_id: str
    content: tuple[Text | Image | Other, ...]
    error: bool = False


Content = Text | Image | Other
Part = Text | Image | Reasoning | ToolCall | ToolResult | Other


class Message(msgspec.Struct, frozen=True):
    """``role``: system, developer, user, assistant or tool, whose parts are all results; in a
    garbled request any other text."""

    role: str
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The text parts, one line apart."""
        return "\n".join(part.text for part in self.parts if isinstance(part, Text))


class Tool(msgspec.Struct, frozen=True):
    """A tool the model may call. ``schema`` is None for tools that the server itself defines;
    ``raw`` is the request's element. A tool of a namespace is named ``<namespace>.<tool>``."""

    name: str
    description: str
    schema: dict[str, Any] | None
    raw: dict[str, Any]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """``messages`` begin with the system prompts. ``prompts`` holds the raw prompts of legacy
    completions, text or token ids; it is None for the protocols of messages. ``referenced``: part
    of the history is stored at the server and only referred to. ``response_format`` is the
    request's structured-output field, as it came."""

    model: str
    stream: bool
    messages: tuple[Message, ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] | None = None
    tools: tuple[Tool, ...] = ()
    response_format: dict[str, Any] | None = None
    max_tokens: int | None = None
    choices: int = 1
    referenced: bool = False


class Reply(msgspec.Struct, frozen=True):
    """What the model said in one choice. ``finish``: the finish reason in the words of the
    protocol, None when the reply broke off."""

    message: Message
    finish: str | None = None


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token counts the server reported; None where it reported none.

    ``prompt_tokens`` includes those read from a cache (``cached_tokens``), ``completion_tokens``
    those of reasoning (``reasoning_tokens``). Both sum over all prompts and choices.
    """

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class ServerError(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error in the server's words. ``kind``: its type or code, where it has one."""

    message: str
    kind: str | None = None


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """One exchange. ``replies`` maps the choice's index to the reply; it holds what came before
    the break when the reply is not ``complete``. ``usage`` is then what was last heard."""

    protocol: Protocol
    request: Request
    replies: dict[int, Reply] = {}
    usage: Usage | None = None
    complete: bool = False
    error: ServerError | None = None


def dialogue(request: Request) -> calls.Dialogue | None:
    """Return what a request said, such that two spellings of one history are equal.

    Harnesses echo a reply with other ids, other JSON spacing, text as a string or as blocks. The
    context is made of the leading system prompts and the tools; system messages further on belong
    to the history. None where the request does not hold its history: raw prompts, references.

    Raises:
        ProtocolError: the request is nested too deeply for a digest.
    """
    if request.referenced or request.prompts is not None:
        return None
    lead = 0
    while lead < len(request.messages) and _is_system(request.messages[lead]):
        lead += 1
    system = [
        text
        for message in request.messages[:lead]
        for (_, text, *_) in items(message)
        if not text.startswith(BILLING_PREFIX)
    ]
    history = request.messages[lead:]
    return calls.Dialogue(
        context=shape.digest([system, [_tool_view(tool) for tool in request.tools]]),
        items=tuple(item for message in history for item in items(message)),
        reasoned=any(_reasoned(message) for message in history),
    )


def replies(said: Said) -> dict[int, calls.Reply]:
    """Return the replies in the same view as ``dialogue``: a reply's items are those that the next
    request's history holds for it.

    Raises:
        ProtocolError: a reply is nested too deeply for a digest.
    """
    return {
        index: calls.Reply(
            items=tuple(items(reply.message)),
            reasoned=_reasoned(reply.message),
            finish=reply.finish,
        )
        for index, reply in said.replies.items()
    }


def _is_system(message: Message) -> bool:
    return message.role in ("system", "developer")


def _reasoned(message: Message) -> bool:
    return any(
        isinstance(part, Reasoning) or (isinstance(part, Text) and "</think>" in part.text)
        for part in message.parts
    )


def items(message: Message) -> Iterable[Item]:
    """Yield what a message adds to a dialogue's items.

    One item per part: so it does not matter how parts are grouped into messages.
    """
    role = "system" if _is_system(message) else message.role
    for part in message.parts:
        match part:
            case ToolCall():
                yield ("call", part.name, _arguments(part.arguments))
            case ToolResult():
                yield ("result", _flat(part.content))
            case Reasoning():
                pass
            case _:
                if text := _flat([part]):
                    yield (role, text)


def _flat(content: Sequence[Content]) -> str:
    """Text of content; what is not text stands as its kind and digest."""
    texts = []
    for part in content:
        match part:
            case Text():
                texts.append(part.text)
            case Image():
                texts.append(f"<image {part.sha256 or part.ref}>")
            case Other():
                texts.append(f"<{part.kind} {shape.digest(part.value)}>")
    return "\n".join(text for text in texts if text).strip()


def _arguments(text: str) -> str:
    """Tool arguments with the spacing and key order taken out."""
    try:
        return shape.encode(shape.decode(text))
    except ProtocolError:
        return text.strip()


def _tool_view(tool: Tool) -> Any:
    """What the model is told of a tool: marks for caching and the like are left out."""
    if tool.schema is None:
        return {name: value for name, value in tool.raw.items() if name != "cache_control"}
    return [tool.name, tool.description, tool.schema]
