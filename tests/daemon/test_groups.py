"""Which rollouts may be trained."""

import math
from dataclasses import replace

import pytest

from daemon.groups import Policy, RunView, decide

POLICY = Policy(reward_window=600, group_wait=60)
NOW = 1000.0
GRADED = RunView("a", 990.0, True, "completed", 1.0, 2, group_size=2)


def view(name: str, **changes) -> RunView:
    return replace(GRADED, id=name, **changes)


def test_complete_group_is_ready():
    decision = decide([view("a"), view("b", reward=0.0)], NOW, POLICY)
    assert decision.action == "ready"
    assert [run.id for run in decision.rollouts] == ["a", "b"]
    assert decision.ready_since == 990.0


@pytest.mark.parametrize(
    "changes",
    [{"ended": None, "settled": False}, {"settled": False}, {"reward": None}],
    ids=["goes on", "records on their way", "no reward yet"],
)
def test_waits(changes):
    assert decide([view("a"), view("b", **changes)], NOW, POLICY).action == "wait"


def test_waits_for_missing_rollouts_then_goes_on():
    runs = [view("a", group_size=3), view("b", reward=0.0, group_size=3)]
    assert decide(runs, NOW, POLICY).action == "wait"
    assert decide(runs, NOW + 60, POLICY).action == "ready"


def test_infrastructure_failure_is_no_sample_and_awaits_its_replacement():
    failed = view("b", status="infrastructure_failure", reward=0.0)
    assert decide([view("a"), failed], NOW, POLICY).action == "wait"
    decision = decide([view("a"), failed, view("c", reward=0.0)], NOW, POLICY)
    assert decision.action == "ready"
    assert [run.id for run in decision.rollouts] == ["a", "c"]
    assert decision.left_out == {"b": "infrastructure_failure"}


def test_agent_failure_with_a_reward_counts():
    runs = [view("a"), view("b", status="agent_failure", reward=0.0)]
    assert len(decide(runs, NOW, POLICY).rollouts) == 2


def test_left_out_reasons():
    runs = [
        view("a"),
        view("b", reward=0.0),
        view("c", trainable_calls=0),
        view("d", ended=300.0, reward=None),
    ]
    assert decide(runs, NOW, POLICY).left_out == {
        "c": "no trainable call",
        "d": "no reward inside the window",
    }


def test_one_graded_rollout_is_skipped():
    decision = decide([view("a"), view("b", trainable_calls=0)], NOW, POLICY)
    assert decision.action == "skip"
    assert decision.reason.startswith("1 of 2 rollouts usable, a baseline needs two")
    assert decision.left_out["b"] == "no trainable call"
    assert decision.left_out["a"].startswith("group skipped: ")


def test_zero_variance_is_skipped_unless_wanted():
    runs = [view("a"), view("b")]
    assert decide(runs, NOW, POLICY).reason == "zero reward variance (all 1)"
    assert decide(runs, NOW, replace(POLICY, skip_zero_variance=False)).action == "ready"


@pytest.mark.parametrize("reward", [math.inf, -math.inf, math.nan])
def test_run_whose_rewards_have_no_finite_sum_is_left_out(reward):
    runs = [view("a"), view("b", reward=0.0), view("c", reward=reward)]
    decision = decide(runs, NOW, POLICY)
    assert [run.id for run in decision.rollouts] == ["a", "b"]
    assert decision.left_out == {"c": "the sum of its rewards is not finite"}
