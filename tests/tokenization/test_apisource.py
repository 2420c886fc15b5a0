"""Tokens from a stock vLLM's API, put together and checked."""

import json
import math
from typing import Any

import pytest

from sidecar.traces.record import Body, Exchange, Outcome, Request, Response, Route, Session
from tokenization import apisource, calls
from tokenization.apisource import ApiTokensError
from tokenization.calls import Reading, Usage


def chat(index: int, ids: list[int], finish: str | None = None, **changes: Any) -> str:
    logprobs = {"content": [{"token": "x", "logprob": -0.5, "top_logprobs": []} for _ in ids]}
    choice = {"index": index, "finish_reason": finish, "token_ids": ids, "logprobs": logprobs}
    return json.dumps({"id": "chatcmpl-1", "choices": [choice | changes]})


def first(index: int, prompt: list[int]) -> str:
    choices = [{"index": index, "finish_reason": None, "logprobs": None}]
    return json.dumps({"id": "chatcmpl-1", "prompt_token_ids": prompt, "choices": choices})


def read(
    lines: list[str],
    usage: Usage | None = None,
    *,
    asked: dict[str, Any] | None = None,
    outcome: Outcome = "complete",
    route: Route = "chat",
) -> Reading:
    body = Body(text=json.dumps(asked or {"temperature": 0.7, "top_p": None}))
    exchange = Exchange(
        id="c",
        route=route,
        session=Session(),
        upstream="http://u",
        request=Request("POST", "/v1/chat/completions", [], body),
        started=1.0,
        ended=2.0,
        outcome=outcome,
        response=Response(200, []),
        tap=lines,
        tap_source="api",
    )
    return calls.read(exchange, usage=usage)


def failed(reading: Reading) -> list[str]:
    (call,) = reading.calls
    return [failure.name for failure in call.failures]


def test_a_stream_is_put_together() -> None:
    lines = [first(0, [1, 2]), chat(0, [3]), chat(0, []), chat(0, [4, 5], "tool_calls")]
    (call,) = read(lines, Usage(2, 3)).calls
    assert call.failures == ()
    assert (call.token_source, call.finish) == ("api", "stop")
    assert (call.prompt_ids.tolist(), call.output_ids.tolist()) == ([1, 2], [3, 4, 5])
    assert call.logprobs.tolist() == [-0.5] * 3 and call.versions.tolist() == [-1] * 3
    assert call.params == {"temperature": 0.7, "logprobs_mode": "unknown"}


def test_a_sound_call_is_not_trained_and_says_why() -> None:
    (call,) = read([first(0, [1]), chat(0, [3], "stop")], Usage(1, 1)).calls
    assert call.left_out == "tokens from the API: weight version unknown"
    (cut,) = read([first(0, [1]), chat(0, [3])], outcome="cancelled").calls
    assert cut.left_out == "cancelled" and len(cut.output_ids) == 1


def test_several_choices_and_prompts() -> None:
    lines = [first(0, [1]), first(1, [1]), chat(1, [4], "stop"), chat(0, [3], "length")]
    reading = read(lines, Usage(1, 2), asked={"n": 2})
    assert [(c.id, c.output_ids.tolist()) for c in reading.calls] == [
        ("c.0.0", [3]),
        ("c.0.1", [4]),
    ]
    choices = [
        {
            "index": k,
            "prompt_token_ids": [k // 2],
            "token_ids": [10 + k],
            "finish_reason": "stop",
            "logprobs": {"token_logprobs": [-0.25]},
        }
        for k in range(4)
    ]
    whole = json.dumps({"id": "cmpl-1", "choices": choices})
    reading = read([whole], Usage(2, 4), asked={"n": 2}, route="completions")
    assert [(c.id, c.prompt_ids.tolist(), c.output_ids.tolist()) for c in reading.calls] == [
        ("c.0.0", [0], [10]),
        ("c.0.1", [0], [11]),
        ("c.1.0", [1], [12]),
        ("c.1.1", [1], [13]),
    ]
    assert all(c.failures == () and c.logprobs.tolist() == [-0.25] for c in reading.calls)


END = chat(0, [3, 4], "stop")


@pytest.mark.parametrize(
    ("lines", "usage", "names"),
    [
        # Ids that a parser swallowed (vllm#27482), and log-probs that it did (vllm#37737).
        ([first(0, [1]), END], Usage(1, 5), ["output count"]),
        ([first(0, [1]), chat(0, [3], "stop", logprobs=None)], Usage(1, 1), ["logprob count"]),
        ([first(0, [1, 2]), END], Usage(1, 2), ["prompt count"]),
        ([END], Usage(1, 2), ["no prompt tokens", "prompt count"]),
        ([first(0, [1]), chat(0, [3])], Usage(1, 1), ["tap incomplete"]),
        ([first(0, [1]), END], None, ["no usage"]),
        ([first(0, [1]), END], Usage(1, None), ["no usage"]),
        ([first(0, [1]), chat(0, [3], "error")], Usage(1, 1), ["finish"]),
    ],
)
def test_checks(lines: list[str], usage: Usage | None, names: list[str]) -> None:
    assert failed(read(lines, usage)) == names


@pytest.mark.parametrize("logprob", [None, -9999.0, -9999.5, "absent"])
def test_a_logprob_that_is_none(logprob: Any) -> None:
    token = {"token": "x"} | ({} if logprob == "absent" else {"logprob": logprob})
    lines = [first(0, [1]), chat(0, [3], "stop", logprobs={"content": [token]})]
    reading = read(lines, Usage(1, 1))
    assert failed(reading) == ["logprob not finite"]
    assert math.isnan(reading.calls[0].logprobs[0])


@pytest.mark.parametrize(
    "lines",
    [
        ["{"],
        ["[]"],
        ['{"error":"an event could not be read"}'],
        [first(0, [1]), first(0, [2])],
        [chat(-1, [3])],
        [chat(0, [-3])],
        [chat(0, [3], logprobs={"content": [{"logprob": 0.5}]})],
        [chat(0, [3]), '{"error":"torn"}'],
    ],
)
def test_what_contradicts_itself_gives_no_call(lines: list[str]) -> None:
    with pytest.raises(ApiTokensError):
        apisource.decode(lines, {})
    reading = read(lines, Usage(1, 1))
    assert reading.calls == () and [f.name for f in reading.failures] == ["unreadable tap"]


def test_no_choice_gives_no_call() -> None:
    reading = read(['{"id":"x","choices":[]}'], Usage(0, 0))
    assert reading.calls == () and [f.name for f in reading.failures] == ["no engine tokens"]
