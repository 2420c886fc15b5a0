"""OpenAI legacy completions: raw prompts as text or token ids.

Spec: OpenAI API reference, "Create completion"; vLLM 0.30's ``completion/protocol.py``. With
several prompts the choices of prompt k have the indices k·n to k·n + n - 1.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from daemon.protocols import parts, shape, stream
from daemon.protocols.chat import Counts
from daemon.protocols.conversation import Message, Reply, Request, Said, ServerError, Text
from daemon.protocols.shape import ProtocolError


def parse(request: bytes, response: bytes | None, *, event_stream: bool) -> Said:
    """Read one exchange; ``event_stream`` says that the reply is ``text/event-stream``.

    A prompt that the server was asked to echo is not part of the reply, where it was given as text.

    Raises:
        ProtocolError: a body is not JSON or not of the protocol's shape.
    """
    body = shape.fields(shape.decode(request), "request")
    asked = read_request(body)
    reply = _Assembly()
    if response is not None and event_stream:
        for name, chunk in stream.documents(response):
            if name == stream.DONE:
                reply.done = True
            else:
                reply.take(chunk, whole=False)
    elif response is not None:
        reply.take(shape.fields(shape.decode(response), "reply"), whole=True)
        reply.done = True
    echoed = (asked.prompts or ()) if body.get("echo") else ()
    replies = {}
    for index, choice in sorted(reply.choices.items()):
        text = "".join(choice.text)
        prompt = index // asked.choices
        if prompt < len(echoed) and isinstance(echoed[prompt], str):
            text = text.removeprefix(str(echoed[prompt]))
        message = Message("assistant", (Text(text),) if text else ())
        replies[index] = Reply(message, choice.finish)
    return Said(
        protocol="completions",
        request=asked,
        replies=replies,
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
    return Request(
        model=shape.string(body.get("model")),
        stream=bool(body.get("stream")),
        prompts=_prompts(body.get("prompt")),
        response_format=shape.fields(body.get("response_format"), "response_format") or None,
        max_tokens=shape.count(body.get("max_tokens")),
        choices=shape.count(body.get("n")) or 1,
    )


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """One text, a list of texts, one list of token ids, or a list of such lists."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    elements = shape.elements(value, "prompt")
    if elements and all(isinstance(element, int) for element in elements):
        return (_ids(elements),)
    return tuple(
        element if isinstance(element, str) else _ids(shape.elements(element, "prompt"))
        for element in elements
    )


def _ids(elements: list[Any]) -> tuple[int, ...]:
    ids = [shape.count(element) for element in elements]
    if None in ids:
        raise ProtocolError("the prompt is neither text nor token ids")
    return tuple(k for k in ids if k is not None)


@dataclass
class _Choice:
    text: list[str] = field(default_factory=list)
    finish: str | None = None


@dataclass
class _Assembly:
    choices: defaultdict[int, _Choice] = field(default_factory=lambda: defaultdict(_Choice))
    usage: Counts = field(default_factory=Counts)
    done: bool = False
    error: ServerError | None = None

    def take(self, payload: dict[str, Any], *, whole: bool) -> None:
        """Fold in a reply or one chunk of it."""
        self.error = parts.server_error(payload) or self.error
        choices = shape.elements(payload.get("choices"), "choices")
        for value in choices:
            choice = shape.fields(value, "choice")
            state = self.choices[shape.count(choice.get("index")) or 0]
            state.text.append(shape.string(choice.get("text")))
            state.finish = shape.optional(choice.get("finish_reason")) or state.finish
        self.usage.take(payload, whole=whole or not choices)
