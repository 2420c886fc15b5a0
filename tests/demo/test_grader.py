import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.demo.grader import ToolCall, Transcript, grade
from deploy.demo.tasks import Priced, Task, answer

TASK = Task("000-piano", Priced("piano", 37), Priced("lemon", 81))
RIGHT = ToolCall("price", '{"item": "piano"}')


def reward(calls: list[ToolCall], final_output: str | None) -> float:
    return grade(TASK, Transcript(calls, final_output)).reward


def test_everything_right_is_one():
    assert reward([RIGHT], "The piano costs 37 coins.") == 1.0
    assert reward([RIGHT], " The piano costs 37 coins.\n") == 1.0


def test_partial_credit_by_stage():
    assert reward([], "I can't say.") == 0.0
    assert reward([ToolCall("price", '{"item": "lemon"}')], "unknown") == 0.3
    assert reward([RIGHT], None) == 0.6
    assert reward([RIGHT], "The piano costs 38 coins.") == 0.6
    assert reward([RIGHT], "37") == 0.6


@pytest.mark.parametrize(
    "call",
    [
        ToolCall("cost", '{"item": "piano"}'),
        ToolCall("price", '{"item": "piano"'),
        ToolCall("price", '"piano"'),
        ToolCall("price", '{"name": "piano"}'),
        ToolCall("price", '{"item": "piano", "shop": "any"}'),
        ToolCall("price", '{"item": 3}'),
        ToolCall("price", ""),
    ],
)
def test_a_malformed_call_earns_nothing(call: ToolCall):
    assert reward([call], answer(TASK.asked)) == 0.0


def test_the_right_answer_without_asking_the_tool_earns_nothing():
    assert reward([], answer(TASK.asked)) == 0.0


def test_the_answer_of_the_example_earns_nothing_more():
    assert reward([RIGHT], answer(TASK.example)) == 0.6


def test_trying_items_one_after_another_does_not_pay():
    guesses = [ToolCall("price", json.dumps({"item": item})) for item in ("lemon", "piano")]
    assert reward(guesses, answer(TASK.asked)) == 0.3


@given(
    st.lists(st.builds(ToolCall, st.sampled_from(["price", "x"]), st.text())),
    st.none() | st.text(),
)
def test_any_transcript_has_a_reward_that_is_the_sum_of_its_parts(calls, final_output):
    graded = grade(TASK, Transcript(calls, final_output))
    assert 0.0 <= graded.reward <= 1.0
    assert graded.reward == pytest.approx(sum(graded.parts.values()))
