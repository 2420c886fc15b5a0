"""What a step decides before a model is touched: advantages, weights, rows, mini-batches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.conftest import make_batch, make_sample
from trainer.advantage import rollout_advantages
from trainer.batch import Batch, Rollout
from trainer.errors import TrainingRejected
from trainer.normalise import token_weights
from trainer.plan import select_rows, split


def rollouts(*graded: tuple[str | None, float]) -> list[Rollout]:
    return [Rollout(f"run{k}", group, reward) for k, (group, reward) in enumerate(graded)]


def test_grpo_compares_within_groups_of_any_size() -> None:
    graded = rollouts(("a", 1.0), ("b", 3.0), ("a", 0.0), ("b", 5.0), ("b", 4.0))
    found = rollout_advantages(graded, "grpo")
    half = 0.5 / np.std([0, 1], ddof=1)
    assert found == pytest.approx([half, -1, -half, 1, 0], abs=1e-4)


def test_dr_grpo_and_rloo() -> None:
    graded = rollouts(("a", 1.0), ("a", 0.0), ("a", 0.5))
    assert rollout_advantages(graded, "dr_grpo") == pytest.approx([0.5, -0.5, 0.0])
    assert rollout_advantages(graded, "rloo") == pytest.approx([0.75, -0.75, 0.0])


def test_rollouts_without_a_group_are_whitened_among_themselves() -> None:
    graded = rollouts((None, 2.0), ("a", 1.0), (None, 4.0), ("a", 0.0), ("single", 6.0))
    found = rollout_advantages(graded, "dr_grpo")
    assert found[[1, 3]] == pytest.approx([0.5, -0.5])
    assert found[[0, 2, 4]].mean() == pytest.approx(0, abs=1e-6)
    assert found[[0, 2, 4]].std(ddof=1) == pytest.approx(1, abs=1e-4)


def test_a_lone_rollout_has_no_baseline_and_no_advantage() -> None:
    assert rollout_advantages(rollouts((None, 5.0)), "grpo").tolist() == [0.0]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 1000)), min_size=1, max_size=20),
)
def test_mass_is_one_and_equal_for_each_rollout(samples: list[tuple[int, int]]) -> None:
    owners, tokens = zip(*samples, strict=True)
    mass = token_weights(owners, tokens) * tokens
    assert mass.sum() == pytest.approx(1)
    for owner in set(owners):
        mine = sum(m for m, o in zip(mass, owners, strict=True) if o == owner)
        assert mine == pytest.approx(1 / len(set(owners)))


@given(st.integers(1, 9), st.integers(0, 5))
def test_mini_batches_keep_rollouts_whole_and_have_mass_one(parts: int, seed: int) -> None:
    rows = select_rows(make_batch(), 512).rows
    batches = split(rows, np.ones(6, dtype=np.float32), parts, seed)
    assert sorted(r.sample_id for b in batches for r in b) == sorted(r.sample_id for r in rows)
    assert len(batches) == min(parts, 6)
    owners = [{row.rollout for row in batch} for batch in batches]
    assert sum(len(o) for o in owners) == 6
    for batch in batches:
        assert sum(row.advantages.sum() for row in batch) == pytest.approx(1, abs=1e-5)


def test_rows_begin_before_the_first_and_end_with_the_last_trained_token() -> None:
    batch = make_batch()
    sample, row = batch.samples[0], select_rows(batch, 512).rows[0]
    assert row.prompt_length == 8
    assert row.token_ids.tolist() == sample.token_ids[:-2].tolist()
    assert row.loss_mask.tolist() == sample.loss_mask[8:-2].tolist()
    assert row.tokens == sample.loss_mask.sum()
    assert np.isfinite(row.rollout_logprobs).all()


def test_overlong_samples_are_left_out_by_name() -> None:
    batch = make_batch()
    longest = max(batch.samples, key=lambda s: len(s.token_ids))
    found = select_rows(batch, len(longest.token_ids) - 3)
    assert found.overlong == [longest.sample_id]
    assert len(found.rows) == len(batch.samples) - 1


def one(**changes: object) -> Batch:
    sample = make_sample(0, "run0")
    for name, value in changes.items():
        object.__setattr__(sample, name, value)
    return Batch((Rollout("run0", None, 1.0),), (sample,))


def first_token_sampled() -> Batch:
    batch = one()
    batch.samples[0].loss_mask[0] = True
    batch.samples[0].logprobs[0] = -1
    return batch


def missing_logprob() -> Batch:
    batch = one()
    batch.samples[0].logprobs[9] = np.nan
    return batch


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (one(run="elsewhere"), "has no rollout"),
        (one(temperature=0.0), "temperature"),
        (one(loss_mask=np.zeros(37, dtype=np.bool_)), "no sample has a token"),
        (first_token_sampled(), "no context precedes it"),
        (missing_logprob(), "log-probability is missing"),
        (Batch((Rollout("a", None, float("nan")),), ()), "not finite"),
        (Batch((Rollout("a", None, 0), Rollout("a", None, 1)), ()), "twice"),
    ],
)
def test_a_batch_that_contradicts_itself_is_rejected(batch: Batch, reason: str) -> None:
    with pytest.raises(TrainingRejected, match=reason):
        select_rows(batch, 512)


def test_only_overlong_samples_say_which_setting_to_raise() -> None:
    with pytest.raises(TrainingRejected, match="max_tokens_per_micro_batch = 10"):
        select_rows(one(), 10)
