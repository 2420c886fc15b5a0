"""Which captured tokens may be trained on."""

import math

import pytest

from tests.daemon.recorded import PARAMS, exchange, tap_lines
from tokenization import calls, checks
from tokenization.calls import Usage
from tokenization.tap.wire import EngineOutput, EngineRequest


def request(**params) -> EngineRequest:
    return EngineRequest(0, "id", [1, 2], {**PARAMS, **params})


def output(**changes) -> EngineOutput:
    sound = {
        "ids": [5, 6],
        "logprobs": [-0.1, -0.2],
        "versions": ["v3", "v4"],
        "finish": "stop",
        "reported": 2,
    }
    return EngineOutput(0, **{**sound, **changes})


def names(failures) -> list[str]:
    return [failure.name for failure in failures]


def test_sound_output_passes():
    assert checks.check_output(request(), output(), "complete") == ()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"logprobs": [-0.1]}, "logprob count"),
        ({"versions": ["v1"]}, "version count"),
        ({"logprobs": [-0.1, math.nan]}, "logprob not finite"),
        ({"logprobs": [-0.1, -math.inf]}, "logprob not finite"),
        ({"reported": None, "finish": None}, "tap incomplete"),
        ({"reported": 3}, "tap incomplete"),
        ({"finish": "error"}, "finish"),
        ({"finish": "abort"}, "finish"),
        ({"versions": ["v1", "unknown"]}, "weight version"),
    ],
)
def test_unsound_output_fails(changes, name):
    assert names(checks.check_output(request(), output(**changes), "complete")) == [name]


def test_cancelled_call_with_complete_tokens_passes():
    assert checks.check_output(request(), output(finish="abort"), "cancelled") == ()


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0.9}, "sampling filter"),
        ({"top_k": 50}, "sampling filter"),
        ({"min_p": 0.1}, "sampling filter"),
        ({"repetition_penalty": 1.1}, "sampling filter"),
        ({"presence_penalty": 0.5}, "sampling filter"),
        ({"frequency_penalty": 0.5}, "sampling filter"),
        ({"min_tokens": 4}, "sampling filter"),
        ({"logit_bias": True}, "sampling filter"),
        ({"structured_outputs": True}, "sampling filter"),
        ({"bad_words": True}, "sampling filter"),
        ({"allowed_token_ids": True}, "sampling filter"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs mode"),
    ],
)
def test_distribution_that_the_trainer_cannot_reproduce(params, name):
    assert names(checks.check_sampling({**PARAMS, **params})) == [name]


def test_parameters_that_are_not_reported_fail():
    partial = {k: v for k, v in PARAMS.items() if k != "min_p"}
    (failure,) = checks.check_sampling(partial)
    assert failure.detail == "not reported: min_p"


def test_temperature_of_its_own_is_fine():
    assert checks.check_sampling({**PARAMS, "temperature": 0.7, "top_k": -1}) == []


def test_usage_sums_over_choices():
    recorded = exchange("c", prompt=[1, 2], outputs=[[4, 5], [6]])
    both = calls.read(recorded, usage=Usage(2, 3))
    assert [call.failures for call in both.calls] == [(), ()]
    wrong = calls.read(recorded, usage=Usage(3, 2))
    assert names(wrong.calls[0].failures) == ["prompt count", "output count"]
    assert names(wrong.calls[1].failures) == ["prompt count", "output count"]


def test_usage_may_be_absent():
    reading = calls.read(exchange("c"), usage=None)
    assert reading.calls[0].left_out is None
    assert calls.read(exchange("c"), usage=Usage(None, None)).calls[0].left_out is None


def test_several_outputs_and_prompts_become_several_calls():
    tap = tap_lines([1, 2], [[4], [5]]) + tap_lines([1, 3], [[6]], request=1)
    reading = calls.read(exchange("c", tap=tap), usage=Usage(4, 3))
    assert [c.id for c in reading.calls] == ["c.0.0", "c.0.1", "c.1.0"]
    assert all(c.exchange == "c" for c in reading.calls)
    assert [c.left_out for c in reading.calls] == [None, None, None]


def test_no_tap_and_broken_tap():
    assert names(calls.read(exchange("c", tap=[])).failures) == ["no engine tokens"]
    assert names(calls.read(exchange("c", tap=["{"])).failures) == ["unreadable tap"]
    prompt_only = tap_lines([1], [])
    assert names(calls.read(exchange("c", tap=prompt_only)).failures) == ["no engine tokens"]


def test_why_a_call_is_left_out():
    def left_out(**changes):
        return calls.read(exchange("c", **changes)).calls[0].left_out

    assert left_out() is None
    assert left_out(outcome="cancelled") == "cancelled"
    assert left_out(outcome="upstream_error") == "upstream_error"
    assert left_out(outputs=[[]]) == "no output tokens"
    assert left_out(params={"top_p": 0.5}) == "check failed: sampling filter"


def test_versions_as_spans():
    versions = calls.read(exchange("c", outputs=[[1, 2, 3, 4]], versions=["v1", "v1", "v2"]))
    assert calls.version_spans(versions.calls[0].versions) == [(0, 1), (2, 2)]
    assert calls.version_spans(versions.calls[0].versions[:0]) == []
