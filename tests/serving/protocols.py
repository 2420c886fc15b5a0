"""The four protocols of vLLM: how to ask, and where each one reports its token counts."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": QUESTION}]


@dataclass(frozen=True)
class Protocol:
    name: str
    path: str
    prompt: dict[str, Any]
    limit: str
    """The body's name for the largest number of output tokens."""
    usage: Callable[[dict[str, Any]], dict[str, Any] | None]
    counts: tuple[str, str]
    """The usage's names for prompt and output tokens."""

    def body(self, tokens: int, stream: bool, **params: Any) -> dict[str, Any]:
        body = {"model": "smol", "stream": stream, self.limit: tokens, **self.prompt, **params}
        if stream and self.path in ("/v1/chat/completions", "/v1/completions"):
            body["stream_options"] = {"include_usage": True}
        return body

    def token_counts(self, reply: bytes, stream: bool) -> tuple[int, int]:
        """Return prompt and output tokens as the reply's usage says; the last word counts."""
        documents = sse_documents(reply) if stream else [json.loads(reply)]
        counts = {}
        for document in documents:
            counts |= {k: v for k, v in (self.usage(document) or {}).items() if v is not None}
        return counts[self.counts[0]], counts[self.counts[1]]


def sse_documents(stream: bytes) -> list[dict[str, Any]]:
    data = [line[6:] for line in stream.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(text) for text in data if text != "[DONE]"]


def _top(document: dict[str, Any]) -> dict[str, Any] | None:
    return document.get("usage")


def _responses(document: dict[str, Any]) -> dict[str, Any] | None:
    return document.get("response", document).get("usage")


def _messages(document: dict[str, Any]) -> dict[str, Any] | None:
    return document.get("message", document).get("usage")


OPENAI_COUNTS = ("prompt_tokens", "completion_tokens")
TYPED_COUNTS = ("input_tokens", "output_tokens")
CHAT = Protocol(
    "chat", "/v1/chat/completions", {"messages": MESSAGES}, "max_tokens", _top, OPENAI_COUNTS
)
# Not a question: after that the model may well say nothing.
STORY = "Once upon a time, in a small village by the sea,"
COMPLETIONS = Protocol(
    "completions", "/v1/completions", {"prompt": STORY}, "max_tokens", _top, OPENAI_COUNTS
)
RESPONSES = Protocol(
    "responses",
    "/v1/responses",
    {"input": QUESTION},
    "max_output_tokens",
    _responses,
    TYPED_COUNTS,
)
ANTHROPIC = Protocol(
    "messages", "/v1/messages", {"messages": MESSAGES}, "max_tokens", _messages, TYPED_COUNTS
)
ALL = [CHAT, COMPLETIONS, RESPONSES, ANTHROPIC]
