import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from deploy.demo import report
from deploy.demo.bystander import Reply
from deploy.demo.journal import Attempt
from deploy.demo.settings import Settings


def attempt(number: int, reward: float | None, gap: float = 0.1) -> Attempt:
    return Attempt(
        run=f"r{number}",
        group="g",
        started=float(number),
        ended=number + 1.0,
        failure="infrastructure" if reward is None else None,
        error="",
        reward=reward,
        parts={},
        calls=[],
        final_output=None,
        replies=2,
        longest_gap_s=gap,
    )


BYSTANDER = [Reply("bystander.1", "length", 0.2), Reply("bystander.2", None, 0.1, "cut")]


def version(number: int, reward: float, live_from: float | None, **more: float) -> dict:
    return {
        "version": f"v{number}",
        "step": number or None,
        "live_from": live_from,
        "reward_mean": reward,
        "rollouts": 32,
        "samples": 35,
        "sampled_tokens": 600,
        "staleness_max": 1,
        "kl_rollout_trainer": 1e-6,
        "swap_pause_s": 0.1 * number,
        **more,
    }


STATUS = {
    "checks": {"calls": 90, "failed": 0, "failures": {}},
    "versions": [
        version(0, 0.0, 1.0),
        version(
            1, 0.2, 2.0, logprob_abs_diff_mean=1e-5, logprob_compared_tokens=100, step_seconds=20.0
        ),
        version(2, 0.6, 3.0, logprob_abs_diff_mean=4e-5, logprob_compared_tokens=300),
        version(3, 0.9, None),
    ],
}
CALLS = [
    {"id": "c1", "run": "r1", "versions": [[0, "v0"]]},
    {"id": "c2", "run": "r2", "versions": [[0, "v0"], [5, "v1"]]},
]


@pytest.fixture
def built() -> dict:
    # Out of order, as attempts end out of order; one of them is an infrastructure failure.
    rewards = [0.1, 0.2, None, 0.3, 0.4, 0.5, 0.6, 0.8, 0.9]
    attempts = [attempt(k, reward, gap=0.1 * k) for k, reward in enumerate(rewards)]
    return report.build(Settings(seed=7, steps=2), attempts[::-1], BYSTANDER, STATUS, CALLS, 61.23)


def test_the_report_counts_what_was_published_and_graded(built: dict):
    assert built["seed"] == 7
    assert built["steps"] == 2
    assert built["rollouts"] == 8
    assert built["rollouts_repeated"] == 1
    assert built["checks"] == {"calls": 90, "failed": 0}
    assert [v["version"] for v in built["versions"]] == ["v1", "v2"]
    assert built["reward_first_quarter"] == pytest.approx(0.15)
    assert built["reward_last_quarter"] == pytest.approx(0.85)
    assert built["reward_risen"] is True


def test_logprob_difference_is_weighted_by_tokens(built: dict):
    assert built["logprob_abs_diff_mean"] == pytest.approx((1e-5 * 100 + 4e-5 * 300) / 400)


def test_streams_across_swaps_are_named(built: dict):
    assert built["streams_across_swaps"] == [
        {"call": "c2", "run": "r2", "versions": [[0, "v0"], [5, "v1"]]}
    ]
    assert built["longest_stream_gap_s"] == pytest.approx(0.8)


def test_every_version_has_the_documented_keys(built: dict):
    keys = {"version", "reward_mean", "rollouts", "samples", "sampled_tokens", "staleness_max"}
    for key in keys | {"kl_rollout_trainer", "swap_pause_s"}:
        assert all(row[key] is not None for row in built["versions"])


def test_files_and_table(built: dict, tmp_path: Path):
    report.write(built, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == built
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    console.print(report.table(built))
    text = console.export_text()
    assert "v1" in text
    assert "0.60" in text
    assert any("90 model calls checked, 0 failed" in line for line in report.summary(built))


def test_a_run_without_a_step_still_has_a_report(tmp_path: Path):
    status = {"checks": {"calls": 0, "failed": 0}, "versions": [version(0, 0.0, 1.0)]}
    empty = report.build(Settings(seed=0, steps=1), [], [], status, [], 1.0)
    assert empty["versions"] == []
    assert empty["reward_risen"] is False
    assert empty["logprob_abs_diff_mean"] is None
    report.write(empty, tmp_path)
    assert report.summary(empty)


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (0.2, 0.5, True),
        (0.1, 0.2, False),  # twice as much, but not by 0.15
        (0.6, 0.8, False),  # 0.2 more, but not 1.5 times
        (0.5, 0.4, False),
        (None, None, False),
    ],
)
def test_a_clear_rise_needs_both_ratio_and_difference(first, last, expected):
    assert report.risen(first, last) is expected


@given(st.lists(st.floats(0, 1), max_size=100))
def test_quarters_are_means_of_equally_many(rewards: list[float]):
    first, last = report.quarters(rewards)
    if len(rewards) < 4:
        assert (first, last) == (None, None)
    else:
        length = len(rewards) // 4
        assert first == pytest.approx(sum(rewards[:length]) / length)
        assert last == pytest.approx(sum(rewards[len(rewards) - length :]) / length)


def test_moving_average_looks_back_only():
    assert report.moving_average([0.0, 1.0, 2.0, 6.0], 3) == [0.0, 0.5, 1.0, 3.0]
