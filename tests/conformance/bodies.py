"""Requests and replies in the shapes of vLLM 0.30, made from a seed: its JSON and its SSE.

Events keep vLLM's framing (``data: …`` with a blank line, ``event:`` lines for Responses and
Messages, ``[DONE]`` at the end of chat and legacy completions), ids are drawn from the seed, and
text and tool arguments hold characters of two, three and four UTF-8 bytes.
"""

import json
import random
import re
from typing import Any, Literal

Protocol = Literal["chat", "completions", "responses", "messages"]
Content = Literal["text", "tools", "parallel tools", "reasoning"]

PROTOCOLS: tuple[Protocol, ...] = ("chat", "completions", "responses", "messages")
CONTENTS: tuple[Content, ...] = ("text", "tools", "parallel tools", "reasoning")
PATHS: dict[Protocol, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}

_MODEL = "smol"
_CREATED = 1_790_000_000
_WORDS = [
    "the",
    " sea",
    " is",
    " wide",
    ",",
    "\n",
    " naïve",
    " 漢字",
    " 🌊",
    " \\u00e9",
    ' "q"',
    ".",
]
_USAGE = {"prompt_tokens": 31, "total_tokens": 43, "completion_tokens": 12}
_TYPED_USAGE = {"input_tokens": 31, "output_tokens": 12}


def request(protocol: Protocol, content: Content, stream: bool, **more: Any) -> bytes:
    """Return a request body; ``more`` are further top-level fields."""
    ask = "How wide is the sea? Wie groß? 🌊"
    body: dict[str, Any] = {"model": _MODEL, "temperature": 0.7}
    if protocol == "completions":
        body |= {"prompt": ask, "max_tokens": 12}
    elif protocol == "responses":
        body |= {"input": ask, "max_output_tokens": 12}
    else:
        body |= {"messages": [{"role": "user", "content": ask}], "max_tokens": 12}
    if stream:
        body["stream"] = True
        if protocol in ("chat", "completions"):
            body["stream_options"] = {"include_usage": True}
    if content in ("tools", "parallel tools"):
        body |= _TOOLS[protocol]
    return json.dumps(body | more, ensure_ascii=False).encode()


def reply(protocol: Protocol, content: Content, stream: bool, seed: str, n: int = 1) -> list[bytes]:
    """Return a reply as the pieces in which vLLM hands it to its HTTP server: events or one JSON.

    ``n``: choices (chat and completions).
    """
    made = _Reply(content, random.Random(f"{seed} {protocol} {content}"), n)
    if stream:
        return [event.encode() for event in _STREAMED[protocol](made)]
    return [json.dumps(_WHOLE[protocol](made), ensure_ascii=False, separators=(",", ":")).encode()]


def error(protocol: Protocol, status: int, message: str) -> bytes:
    """Return an error body as vLLM sends it with ``status``."""
    kind = {400: "BadRequestError", 401: "Unauthorized", 404: "NotFoundError"}.get(status, "Error")
    if protocol == "messages":
        document: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
    else:
        document = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def with_tokens(protocol: Protocol, piece: bytes) -> bytes:
    """Return a piece of a reply as vLLM sends it to who asks for ``return_token_ids`` and
    ``logprobs``: with values in the fields that are null for others.
    """
    piece = piece.replace(b'"token_ids":null', b'"token_ids":[9707,0]')
    piece = piece.replace(b'"prompt_token_ids":null', b'"prompt_token_ids":[1,2,3]')
    told = b'{"content":[{"token":"}\\"]","logprob":-0.5,"bytes":[125],"top_logprobs":[]}]}'
    if protocol == "completions":
        told = b'{"text_offset":[0],"token_logprobs":[-0.5],"tokens":["}\\"]"],"top_logprobs":[{}]}'
    return re.sub(rb'"logprobs":null(?=[^{}]*"token_ids":\[)', b'"logprobs":' + told, piece)


class _Reply:
    """What the model is made to say."""

    def __init__(self, content: Content, rng: random.Random, n: int) -> None:
        self.n = n
        self.tokens = [rng.choice(_WORDS) for _ in range(12)]
        self.thoughts = [rng.choice(_WORDS) for _ in range(6)] if content == "reasoning" else []
        count = {"tools": 1, "parallel tools": 2}.get(content, 0)
        self.calls = [(f"call-{rng.randbytes(8).hex()}", "lookup", i) for i in range(count)]
        self.arguments = [['{"wo', 'rd": "m', "è", 're 🌊"', "}"] for _ in range(count)]
        self.id = rng.randbytes(16).hex()
        if self.calls:
            self.tokens = []

    @property
    def text(self) -> str:
        return "".join(self.tokens)

    @property
    def raw_tokens(self) -> list[str]:
        """The output as a legacy completion shows it: tool calls and thoughts as markup."""
        thoughts = ["<think>", *self.thoughts, "</think>"] if self.thoughts else []
        calls = []
        for _, name, i in self.calls:
            calls += [f'<tool_call>{{"name":"{name}","arguments":', *self.arguments[i]]
            calls.append("}</tool_call>")
        return thoughts + calls + self.tokens

    @property
    def finish(self) -> str:
        return "tool_calls" if self.calls else "stop"


_FUNCTION = {
    "name": "lookup",
    "description": "Look a word up",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
}
_TOOLS: dict[Protocol, dict[str, Any]] = {
    "chat": {"tools": [{"type": "function", "function": _FUNCTION}]},
    "completions": {},
    "responses": {"tools": [{"type": "function", **_FUNCTION}]},
    "messages": {"tools": [{"name": "lookup", "input_schema": _FUNCTION["parameters"]}]},
}


def _data(document: Any) -> str:
    return f"data: {json.dumps(document, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _typed(document: dict[str, Any]) -> str:
    return f"event: {document['type']}\n{_data(document)}"


def _chat_tool(call: tuple[str, str, int], arguments: str) -> dict[str, Any]:
    return {
        "id": call[0],
        "type": "function",
        "function": {"name": call[1], "arguments": arguments},
    }


def _chat_whole(made: _Reply) -> dict[str, Any]:
    message = {
        "role": "assistant",
        "content": made.text or None,
        "refusal": None,
        "tool_calls": [_chat_tool(c, "".join(made.arguments[c[2]])) for c in made.calls],
        "reasoning": "".join(made.thoughts) or None,
    }
    choices = [
        {
            "index": i,
            "message": message,
            "logprobs": None,
            "finish_reason": made.finish,
            "stop_reason": None,
            "token_ids": None,
        }
        for i in range(made.n)
    ]
    return {
        "id": f"chatcmpl-{made.id}",
        "object": "chat.completion",
        "created": _CREATED,
        "model": _MODEL,
        "choices": choices,
        "service_tier": None,
        "usage": {**_USAGE, "prompt_tokens_details": None},
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "kv_transfer_params": None,
    }


def _chat_streamed(made: _Reply) -> list[str]:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning": thought} for thought in made.thoughts]
    for call in made.calls:
        first, *rest = made.arguments[call[2]]
        deltas.append({"tool_calls": [{"index": call[2], **_chat_tool(call, first)}]})
        deltas += [
            {"tool_calls": [{"index": call[2], "function": {"arguments": part}}]} for part in rest
        ]
    deltas += [{"content": token} for token in made.tokens]
    head = {
        "id": f"chatcmpl-{made.id}",
        "object": "chat.completion.chunk",
        "created": _CREATED,
        "model": _MODEL,
    }
    events = []
    for k, delta in enumerate(deltas):
        finish = made.finish if k == len(deltas) - 1 else None
        for i in range(made.n):
            choice = {"index": i, "delta": delta, "logprobs": None, "finish_reason": finish}
            if k:
                events.append(_data({**head, "choices": [choice | {"token_ids": None}]}))
            else:
                events.append(_data({**head, "choices": [choice], "prompt_token_ids": None}))
    return [*events, _data({**head, "choices": [], "usage": _USAGE}), "data: [DONE]\n\n"]


def _completions_whole(made: _Reply) -> dict[str, Any]:
    text = "".join(made.raw_tokens)
    return {
        "id": f"cmpl-{made.id}",
        "object": "text_completion",
        "created": _CREATED,
        "model": _MODEL,
        "choices": [
            {
                "index": i,
                "text": text,
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
            for i in range(made.n)
        ],
        "usage": _USAGE,
    }


def _completions_streamed(made: _Reply) -> list[str]:
    head = {
        "id": f"cmpl-{made.id}",
        "object": "text_completion",
        "created": _CREATED,
        "model": _MODEL,
    }
    events = []
    for k, token in enumerate(made.raw_tokens):
        for i in range(made.n):
            choice = {
                "index": i,
                "text": token,
                "logprobs": None,
                "finish_reason": None,
                "stop_reason": None,
                "prompt_token_ids": None,
                "token_ids": None,
            }
            if k:
                del choice["prompt_token_ids"]
            events.append(_data({**head, "choices": [choice]}))
    return [*events, _data({**head, "choices": [], "usage": _USAGE}), "data: [DONE]\n\n"]


def _responses_items(made: _Reply) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if made.thoughts:
        text = {"type": "reasoning_text", "text": "".join(made.thoughts)}
        items.append({"id": f"rs_{made.id}", "type": "reasoning", "summary": [], "content": [text]})
    for call in made.calls:
        items.append(
            {
                "id": f"fc_{made.id}{call[2]}",
                "type": "function_call",
                "call_id": call[0],
                "name": call[1],
                "arguments": "".join(made.arguments[call[2]]),
                "status": "completed",
            }
        )
    if made.tokens:
        part = {"type": "output_text", "text": made.text, "annotations": []}
        items.append(
            {
                "id": f"msg_{made.id}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    return items


def _response(made: _Reply, status: str) -> dict[str, Any]:
    done = status == "completed"
    return {
        "id": f"resp_{made.id}",
        "object": "response",
        "created_at": _CREATED,
        "model": _MODEL,
        "status": status,
        "output": _responses_items(made) if done else [],
        "usage": _TYPED_USAGE if done else None,
    }


def _responses_whole(made: _Reply) -> dict[str, Any]:
    return _response(made, "completed")


def _responses_streamed(made: _Reply) -> list[str]:
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": _response(made, "in_progress")},
        {"type": "response.in_progress", "response": _response(made, "in_progress")},
    ]
    for index, item in enumerate(_responses_items(made)):
        where = {"item_id": item["id"], "output_index": index}
        events.append({"type": "response.output_item.added", "output_index": index, "item": item})
        if item["type"] == "reasoning":
            kind, parts = "response.reasoning_text", made.thoughts
        elif item["type"] == "function_call":
            call = next(c for c in made.calls if c[0] == item["call_id"])
            kind, parts = "response.function_call_arguments", made.arguments[call[2]]
        else:
            kind, parts = "response.output_text", made.tokens
        events += [{"type": f"{kind}.delta", **where, "delta": part} for part in parts]
        events.append({"type": f"{kind}.done", **where})
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": "response.completed", "response": _response(made, "completed")})
    return [_typed({**event, "sequence_number": k}) for k, event in enumerate(events)]


def _messages_blocks(made: _Reply) -> list[tuple[dict[str, Any], str, str, list[str]]]:
    """Return for each block: it, the type of its deltas, their field, their texts."""
    blocks: list[tuple[dict[str, Any], str, str, list[str]]] = []
    if made.thoughts:
        block = {"type": "thinking", "thinking": ""}
        blocks.append((block, "thinking_delta", "thinking", made.thoughts))
    for call in made.calls:
        use: dict[str, Any] = {"type": "tool_use", "id": call[0], "name": call[1], "input": {}}
        blocks.append((use, "input_json_delta", "partial_json", made.arguments[call[2]]))
    if made.tokens:
        blocks.append(({"type": "text", "text": ""}, "text_delta", "text", made.tokens))
    return blocks


def _message(made: _Reply, content: list[dict[str, Any]], stop: str | None) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{made.id}",
        "type": "message",
        "role": "assistant",
        "content": content,
        "model": _MODEL,
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": _TYPED_USAGE,
    }


def _messages_whole(made: _Reply) -> dict[str, Any]:
    content = []
    for block, _, _, texts in _messages_blocks(made):
        text = "".join(texts)
        key = {"thinking": "thinking", "tool_use": "input", "text": "text"}[block["type"]]
        content.append({**block, key: json.loads(text) if key == "input" else text})
    return _message(made, content, "tool_use" if made.calls else "end_turn")


def _messages_streamed(made: _Reply) -> list[str]:
    events: list[dict[str, Any]] = [{"type": "message_start", "message": _message(made, [], None)}]
    for index, (block, delta, field, texts) in enumerate(_messages_blocks(made)):
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        events += [
            {
                "type": "content_block_delta",
                "index": index,
                "delta": {"type": delta, field: text},
            }
            for text in texts
        ]
        events.append({"type": "content_block_stop", "index": index})
    stop = {"stop_reason": "tool_use" if made.calls else "end_turn", "stop_sequence": None}
    events.append({"type": "message_delta", "delta": stop, "usage": _TYPED_USAGE})
    events.append({"type": "message_stop"})
    return [_typed(event) for event in events]


_WHOLE = {
    "chat": _chat_whole,
    "completions": _completions_whole,
    "responses": _responses_whole,
    "messages": _messages_whole,
}
_STREAMED = {
    "chat": _chat_streamed,
    "completions": _completions_streamed,
    "responses": _responses_streamed,
    "messages": _messages_streamed,
}
