"""Requests and replies of each protocol, written after the API references.

``test_samples.py`` holds them against vLLM's own models, the tests of each protocol against what
they mean.
"""

from typing import Any

PIXEL = "aGk="
PIXEL_SHA = "8f434346648f6b96df89dda901c5176b10a6d83961dd3c1ac88b59b2dc327aa4"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
ANSWER = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}

CHAT_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Look out of the window.",
        "parameters": SCHEMA,
    },
}
CHAT_REQUEST: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "n": 2,
    "max_completion_tokens": 100,
    "response_format": ANSWER,
    "tools": [CHAT_TOOL],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is this?"},
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
                {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
                {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
            ],
        },
        {
            "role": "assistant",
            "reasoning": "hm",
            "content": "Look.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{ "city": "Ulm" }'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ],
}
CHAT_USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 9,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens_details": {"reasoning_tokens": 4},
}
CHAT_REPLY: dict[str, Any] = {
    "id": "chatcmpl-1",
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "I add.",
                "reasoning": "Two numbers.",
                "tool_calls": [
                    {
                        "id": "x",
                        "type": "function",
                        "function": {"name": "add", "arguments": '{"a": 1}'},
                    }
                ],
            },
            "finish_reason": "tool_calls",
        }
    ],
    "usage": CHAT_USAGE,
}


def chat_chunk(index: int = 0, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "model": "m",
        "choices": [{"index": index, "delta": delta, "finish_reason": finish}],
    }


CHAT_STREAM = [
    chat_chunk(role="assistant", content=""),
    chat_chunk(reasoning="Two "),
    chat_chunk(reasoning="numbers."),
    chat_chunk(content="I "),
    chat_chunk(content="add."),
    chat_chunk(tool_calls=[{"index": 0, "id": "x", "function": {"name": "add", "arguments": ""}}]),
    chat_chunk(tool_calls=[{"index": 0, "function": {"arguments": '{"a":'}}]),
    chat_chunk(tool_calls=[{"index": 0, "function": {"arguments": " 1}"}}]),
    chat_chunk(finish="tool_calls"),
    {"id": "chatcmpl-1", "model": "m", "choices": [], "usage": CHAT_USAGE},
]

COMPLETIONS_REQUEST: dict[str, Any] = {
    "model": "m",
    "prompt": ["One", "Red"],
    "n": 2,
    "max_tokens": 5,
    "echo": True,
    "logprobs": 1,
    "suffix": None,
}
COMPLETIONS_LOGPROBS = {
    "text_offset": [0],
    "token_logprobs": [None],
    "tokens": ["a"],
    "top_logprobs": [None],
}
COMPLETIONS_REPLY: dict[str, Any] = {
    "id": "cmpl-1",
    "model": "m",
    "choices": [
        {"index": 0, "text": "One two", "finish_reason": "stop", "logprobs": COMPLETIONS_LOGPROBS},
        {"index": 1, "text": "One day", "finish_reason": "length", "logprobs": None},
        {"index": 2, "text": "Red, Red", "finish_reason": "stop", "logprobs": None},
        {"index": 3, "text": "Redo", "finish_reason": "stop", "logprobs": None},
    ],
    "usage": {"prompt_tokens": 4, "completion_tokens": 8, "total_tokens": 12},
}
COMPLETIONS_STREAM: list[dict[str, Any]] = [
    {"id": "1", "model": "m", "choices": [{"index": 3, "text": "Red", "logprobs": None}]},
    {"id": "1", "model": "m", "choices": [{"index": 0, "text": "One two", "finish_reason": None}]},
    {"id": "1", "model": "m", "choices": [{"index": 2, "text": "Red, Red"}]},
    {"id": "1", "model": "m", "choices": [{"index": 1, "text": "One day"}]},
    {"id": "1", "model": "m", "choices": [{"index": 3, "text": "o", "finish_reason": "stop"}]},
    {"id": "1", "model": "m", "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]},
    {"id": "1", "model": "m", "choices": [{"index": 1, "text": "", "finish_reason": "length"}]},
    {"id": "1", "model": "m", "choices": [{"index": 2, "text": "", "finish_reason": "stop"}]},
    {"id": "1", "model": "m", "choices": [], "usage": COMPLETIONS_REPLY["usage"]},
]

RESPONSES_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "weather", "description": "Look.", "parameters": SCHEMA},
    {
        "type": "custom",
        "name": "patch",
        "description": "Apply a patch.",
        "format": {"type": "text"},
    },
    {"type": "web_search"},
    {
        "type": "namespace",
        "name": "agents",
        "description": "Other agents.",
        "tools": [{"type": "function", "name": "spawn", "parameters": SCHEMA}],
    },
]
RESPONSES_REQUEST: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 100,
    "instructions": "Be brief.",
    "text": {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}},
    "tools": RESPONSES_TOOLS,
    "input": [
        {"role": "developer", "content": "You are at home."},
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "What is this?"},
                {
                    "type": "input_image",
                    "image_url": f"data:image/png;base64,{PIXEL}",
                    "detail": "auto",
                },
                {"type": "input_image", "file_id": "file-1", "detail": "auto"},
            ],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "hm"}],
            "encrypted_content": "gAAA",
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Look.", "annotations": []}],
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "c1",
            "name": "weather",
            "arguments": '{ "city": "Ulm" }',
        },
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** Begin"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "done"}],
        },
    ],
}
RESPONSES_OUTPUT: list[dict[str, Any]] = [
    {
        "type": "reasoning",
        "id": "rs_2",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Two numbers."}],
    },
    {
        "type": "message",
        "id": "msg_2",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "I add.", "annotations": []}],
    },
    {
        "type": "function_call",
        "id": "fc_2",
        "call_id": "x",
        "name": "add",
        "arguments": '{"a": 1}',
        "status": "completed",
    },
]
RESPONSES_REPLY: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": "m",
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "output": RESPONSES_OUTPUT,
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "background": False,
    "max_output_tokens": 100,
    "service_tier": "auto",
    "truncation": "disabled",
    "usage": {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 12,
    },
}


def responses_event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}", "sequence_number": 1, **fields}


def _begun(item: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return item | {"status": "in_progress"} | fields


_EMPTY_TEXT = {"type": "output_text", "text": "", "annotations": []}
_TEXT = RESPONSES_OUTPUT[1]["content"][0]
RESPONSES_STREAM = [
    responses_event("created", response=RESPONSES_REPLY | {"status": "in_progress", "output": []}),
    responses_event(
        "in_progress", response=RESPONSES_REPLY | {"status": "in_progress", "output": []}
    ),
    responses_event(
        "output_item.added", output_index=0, item=_begun(RESPONSES_OUTPUT[0], content=[])
    ),
    *(
        responses_event(
            "reasoning_text.delta", output_index=0, item_id="rs_2", content_index=0, delta=delta
        )
        for delta in ("Two ", "numbers.")
    ),
    responses_event(
        "reasoning_text.done", output_index=0, item_id="rs_2", content_index=0, text="Two numbers."
    ),
    responses_event("output_item.done", output_index=0, item=RESPONSES_OUTPUT[0]),
    responses_event(
        "output_item.added", output_index=1, item=_begun(RESPONSES_OUTPUT[1], content=[])
    ),
    responses_event(
        "content_part.added", output_index=1, item_id="msg_2", content_index=0, part=_EMPTY_TEXT
    ),
    *(
        responses_event(
            "output_text.delta",
            output_index=1,
            item_id="msg_2",
            content_index=0,
            delta=delta,
            logprobs=[],
        )
        for delta in ("I ", "add.")
    ),
    responses_event(
        "output_text.done",
        output_index=1,
        item_id="msg_2",
        content_index=0,
        text="I add.",
        logprobs=[],
    ),
    responses_event(
        "content_part.done", output_index=1, item_id="msg_2", content_index=0, part=_TEXT
    ),
    responses_event("output_item.done", output_index=1, item=RESPONSES_OUTPUT[1]),
    responses_event(
        "output_item.added", output_index=2, item=_begun(RESPONSES_OUTPUT[2], arguments="")
    ),
    *(
        responses_event(
            "function_call_arguments.delta", output_index=2, item_id="fc_2", delta=delta
        )
        for delta in ('{"a":', " 1}")
    ),
    responses_event(
        "function_call_arguments.done",
        output_index=2,
        item_id="fc_2",
        name="add",
        arguments='{"a": 1}',
    ),
    responses_event("output_item.done", output_index=2, item=RESPONSES_OUTPUT[2]),
    responses_event("completed", response=RESPONSES_REPLY),
]

MESSAGES_REQUEST: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "max_tokens": 100,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.db5;"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ],
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "tools": [
        {"name": "weather", "description": "Look.", "input_schema": SCHEMA},
        {
            "name": "time",
            "input_schema": {"type": "object"},
            "cache_control": {"type": "ephemeral"},
        },
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is this?"},
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": PIXEL},
                },
                {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
                {"type": "image", "source": {"type": "file", "file_id": "file_1"}},
            ],
        },
        {"role": "system", "content": "Today is Monday."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "sig"},
                {"type": "redacted_thinking", "data": "opaque"},
                {"type": "text", "text": "Look."},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Ulm"}},
                {"type": "tool_use", "id": "c2", "name": "time", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c2",
                    "content": "no clock",
                    "is_error": True,
                },
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "rain"}],
                },
                {"type": "text", "text": "Go on."},
            ],
        },
    ],
}
MESSAGES_REPLY: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [
        {"type": "thinking", "thinking": "Two numbers.", "signature": "sig"},
        {"type": "text", "text": "I add."},
        {"type": "tool_use", "id": "x", "name": "add", "input": {"a": 1}},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {
        "input_tokens": 1,
        "cache_read_input_tokens": 2,
        "cache_creation_input_tokens": 3,
        "output_tokens": 9,
    },
}
MESSAGES_STREAM: list[dict[str, Any]] = [
    {
        "type": "message_start",
        "message": MESSAGES_REPLY
        | {
            "content": [],
            "stop_reason": None,
            "usage": {"input_tokens": 6, "output_tokens": 0},
        },
    },
    {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "thinking", "thinking": ""},
    },
    {"type": "ping"},
    *(
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "thinking_delta", "thinking": text},
        }
        for text in ("Two ", "numbers.")
    ),
    {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "signature_delta", "signature": "sig"},
    },
    {"type": "content_block_stop", "index": 0},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    *(
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": text}}
        for text in ("I ", "add.")
    ),
    {"type": "content_block_stop", "index": 1},
    {
        "type": "content_block_start",
        "index": 2,
        "content_block": {"type": "tool_use", "id": "x", "name": "add", "input": {}},
    },
    *(
        {
            "type": "content_block_delta",
            "index": 2,
            "delta": {"type": "input_json_delta", "partial_json": text},
        }
        for text in ("", '{"a":', " 1}")
    ),
    {"type": "content_block_stop", "index": 2},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": MESSAGES_REPLY["usage"],
    },
    {"type": "message_stop"},
]
