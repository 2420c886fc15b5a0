"""The ``api`` token source on vLLM's own reply code: its generators, engine outputs made by hand.

The same engine outputs go through vLLM twice: for the client's request, and for the request with
our fields. What the cutter makes of the second reply must be the first, byte for byte.
"""

import asyncio
import json
import types
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.responses import JSONResponse
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    FunctionCall,
    RequestResponseMetadata,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from sidecar.tokens import apitokens
from sidecar.tokens.apitokens import BodyCutter, SseCutter
from sidecar.tokens.splice import Spliced, splice
from tests.sidecar.test_strip import chunks_of, run

PROMPT = [11, 12, 13]
Kind = Literal["chat", "completions"]


class FakeParser:
    """Streams as vLLM's tool and reasoning parsers do: silent on some tokens, never mind which."""

    tool_parser_cls = object
    reasoning_parser = None

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def parse_delta(self, delta_text: str, finished: bool, **_: Any) -> DeltaMessage | None:
        if "silent" in delta_text or not delta_text:
            return None
        if "tool" in delta_text:
            call = DeltaFunctionCall(name="f", arguments=delta_text)
            return DeltaMessage(tool_calls=[DeltaToolCall(index=0, id="call_1", function=call)])
        if "think" in delta_text:
            return DeltaMessage(reasoning=delta_text)
        return DeltaMessage(content=delta_text)

    def parse(self, text: str, *_: Any, **__: Any) -> tuple[str | None, str, list[FunctionCall]]:
        calls = [FunctionCall(id="call_1", name="f", arguments=text)] if "tool" in text else []
        return ("think" if "think" in text else None), text, calls

    def count_reasoning_tokens(self, token_ids: Any) -> int:
        return len(token_ids) // 2


def _serving(kind: Kind, parser: bool) -> Any:
    cls: Any = OpenAIServingChat if kind == "chat" else OpenAIServingCompletion
    serving = object.__new__(cls)
    serving.parser_cls = FakeParser if parser else None
    serving.enable_auto_tools = parser
    serving._include_reasoning_tokens_details = parser
    serving.model_config = None
    serving.response_role = "assistant"
    serving.system_fingerprint = "vllm-0.30-tp1-abc"
    serving.return_tokens_as_token_ids = False
    serving.request_logger = None
    serving.enable_log_outputs = False
    for flag in ("force_include_usage", "prompt_tokens_details", "per_request_metrics"):
        setattr(serving, f"enable_{flag}", False)
    return serving


STEP = st.tuples(
    st.sampled_from(["", "a", "silent", "tool{", "think", '"token_ids":[1]', "é\n"]),
    st.lists(st.integers(0, 150_000), max_size=3),
    st.sampled_from([-0.0, -1.5, -1e-7, float("-inf")]),
)
OUTPUTS = st.lists(st.lists(STEP, min_size=1, max_size=5), min_size=1, max_size=2)


def _logprobs(ids: list[int], logprob: float, wanted: bool) -> list[dict[int, Logprob]] | None:
    if not wanted:
        return None
    return [{i: Logprob(logprob, 1, f'"{i}}}]'), i + 1: Logprob(-3.0, 2, "n")} for i in ids]


async def _steps(
    outputs: list[list[tuple[str, list[int], float]]], logprobs: bool, stream: bool
) -> AsyncIterator[RequestOutput]:
    """What the engine gives: one output a step in a stream, else all of it at the end."""
    whole = []
    for index, steps in enumerate(outputs):
        for k, (text, ids, logprob) in enumerate(steps):
            last = k == len(steps) - 1
            if stream:
                reason = "stop" if last else None
                found = _logprobs(ids, logprob, logprobs)
                step = CompletionOutput(index, text, ids, None, found, finish_reason=reason)
                yield RequestOutput("r", "p", PROMPT, None, [step], finished=last)
        ids = [i for _, some, _ in steps for i in some]
        text = "".join(text for text, _, _ in steps)
        found = _logprobs(ids, steps[0][2], logprobs)
        whole.append(CompletionOutput(index, text, ids, None, found, finish_reason="length"))
    if not stream:
        yield RequestOutput("r", "p", PROMPT, None, whole, finished=True)


async def _indexed(steps: AsyncIterator[RequestOutput]) -> AsyncIterator[tuple[int, RequestOutput]]:
    async for step in steps:
        yield 0, step


async def _reply(kind: Kind, body: bytes, outputs: Any, parser: bool) -> bytes:
    """What vLLM answers to a request, as its routers encode it."""
    serving = _serving(kind, parser)
    metadata = RequestResponseMetadata(request_id="r")
    raw = json.loads(body)
    stream = bool(raw.get("stream"))
    if kind == "chat":
        chat = ChatCompletionRequest(**raw)
        params = chat.to_sampling_params(9, {})
        steps = _steps(outputs, params.logprobs is not None, stream)
        if stream:
            events = serving.chat_completion_stream_generator(
                chat, steps, "r", "m", [], object(), metadata
            )
            return "".join([event async for event in events]).encode()
        answer = await serving.chat_completion_full_generator(
            chat, steps, "r", "m", [], None, metadata, parser=FakeParser() if parser else None
        )
    else:
        request = CompletionRequest(**raw)
        params = request.to_sampling_params(9, {})
        steps = _steps(outputs, params.logprobs is not None, stream)
        if stream:
            events = serving.completion_stream_generator(
                request, [None], _indexed(steps), "r", 1, "m", 1, None, metadata
            )
            return "".join([event async for event in events]).encode()
        final = [step async for step in steps]
        answer = serving.request_output_to_completion_response(
            final, request, "r", 1, "m", None, metadata
        )
    return bytes(JSONResponse(answer.model_dump()).body)


CHAT_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "logprobs": st.sampled_from([None, False, True]),
        "top_logprobs": st.sampled_from([None, 0]),
        "return_token_ids": st.sampled_from([None, False, True]),
        "include_reasoning": st.booleans(),
        "stream_options": st.fixed_dictionaries(
            {"include_usage": st.just(True)}, optional={"continuous_usage_stats": st.booleans()}
        ),
    },
)
COMPLETIONS_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "logprobs": st.sampled_from([None, 0, 1]),
        "return_token_ids": st.sampled_from([None, False, True]),
        "stream_options": st.just({"include_usage": True}),
    },
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(["chat", "completions"]),
    stream=st.booleans(),
    parser=st.booleans(),
    outputs=OUTPUTS,
    data=st.data(),
)
def test_the_client_gets_what_it_would_have_got(
    monkeypatch_time: None,
    kind: Kind,
    stream: bool,
    parser: bool,
    outputs: list[list[tuple[str, list[int], float]]],
    data: st.DataObject,
) -> None:
    fields = dict(data.draw(CHAT_FIELDS if kind == "chat" else COMPLETIONS_FIELDS))
    if not stream:
        fields.pop("stream_options", None)
    prompt: dict[str, Any] = {"messages": []} if kind == "chat" else {"prompt": "p"}
    body = {"model": "m", "stream": stream, "n": len(outputs), "max_tokens": 9} | prompt | fields
    asked = json.dumps(body).encode()
    spliced = splice(kind, asked)
    assert spliced is not None
    expected = asyncio.run(_reply(kind, asked, outputs, parser))
    fuller = asyncio.run(_reply(kind, spliced.text, outputs, parser))
    cutter = SseCutter(spliced.added) if stream else BodyCutter(spliced.added)
    cuts = data.draw(st.lists(st.integers(min_value=0), max_size=9))
    assert run(cutter, chunks_of(fuller, cuts)) == expected
    hidden = parser and kind == "chat" and fields.get("include_reasoning") is False
    if not hidden:
        _check_tokens(cutter.lines, outputs)


def test_a_token_of_a_chat_is_spelled_as_the_quick_way_expects() -> None:
    spliced = splice("chat", b'{"model":"m","stream":true,"messages":[]}')
    assert spliced is not None
    outputs = [[("a", [1], -1.5), ("é\n", [2], -1e-7), ("c", [3], -0.5)]]
    reply = asyncio.run(_reply("chat", spliced.text, outputs, False))
    role, *tokens, last, done, end = reply.split(b"\n\n")
    assert b'"role"' in role and b'"stop"' in last and done == b"data: [DONE]" and not end
    assert len(tokens) == 2
    assert all(apitokens._token.fullmatch(token + b"\n\n") for token in tokens)


def _check_tokens(lines: list[str], outputs: list[list[tuple[str, list[int], float]]]) -> None:
    """The lines hold all ids of every output, in order, and as many log-probs."""
    events = [json.loads(line) for line in lines]
    for index, steps in enumerate(outputs):
        choices = [c for event in events for c in event["choices"] if c["index"] == index]
        ids = [i for choice in choices for i in choice.get("token_ids") or []]
        assert ids == [i for _, some, _ in steps for i in some]
        logprobs = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
        found = [p for some in logprobs for p in some.get("content", some.get("token_logprobs"))]
        assert len(found) == len(ids)
        if any(steps[0][:2]):  # Else vLLM forgets the prompt of a streamed completion.
            assert PROMPT in [c.get("prompt_token_ids") for c in (*events, *choices)]


@pytest.fixture(scope="module")
def monkeypatch_time() -> Any:
    """Both replies are made in the same second."""
    with pytest.MonkeyPatch.context() as patch:
        clock = types.SimpleNamespace(time=lambda: 1_700_000_000.5)
        for name in ("chat_completion", "completion"):
            patch.setattr(f"vllm.entrypoints.openai.{name}.serving.time", clock)
            patch.setattr(f"vllm.entrypoints.openai.{name}.protocol.time", clock)
        patch.setattr(
            "vllm.entrypoints.openai.chat_completion.serving.make_tool_call_id", lambda: "call_1"
        )
        yield


def test_nothing_is_asked_that_the_request_model_does_not_know() -> None:
    for kind, model in (("chat", ChatCompletionRequest), ("completions", CompletionRequest)):
        prompt = b'"messages":[]' if kind == "chat" else b'"prompt":"p"'
        spliced = splice(kind, b'{"model":"m",' + prompt + b"}")  # type: ignore[arg-type]
        assert isinstance(spliced, Spliced)
        request = model(**json.loads(spliced.text))
        assert not request.model_extra
        assert request.to_sampling_params(9, {}).logprobs == 0
