"""The engine on a tiny model, in this process, against plain Hugging Face and hand computations."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tests.trainer.conftest import make_batch, make_sample, reference_logprobs
from tokenization.sample import Sample
from trainer.advantage import rollout_advantages
from trainer.batch import Batch, Rollout
from trainer.config import TrainerConfig
from trainer.device import prepare
from trainer.engine import Engine, Logprobs
from trainer.errors import TrainingRejected
from trainer.plan import Row, select_rows, split
from trainer.step import Step, agreement
from trainer.worker import write_safetensors


def quiet(_: str) -> None:
    pass


def weights(engine: Engine, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir(parents=True, exist_ok=True)
    engine.export(folder, "float32")
    return load_file(folder / "model.safetensors")


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("packing", [False, True])
def test_logprobs_equal_plain_hugging_face(
    packing: bool, config: TrainerConfig, model: Path
) -> None:
    config = replace_config(config, packing=packing, max_tokens_per_micro_batch=128)
    engine = Engine(config, model, prepare(config))
    samples = [
        make_sample(k, f"run{k}", response=5 + k, temperature=t)
        for k, t in enumerate([1.0, 0.7, 1.3, 1.0])
    ]
    rows = select_rows(Batch(rollouts_of(samples), tuple(samples)), 512).rows
    for sample, row, found in zip(samples, rows, engine.logprobs(rows), strict=True):
        expected = reference_logprobs(model, sample)[8:-2]
        assert found[row.loss_mask] == pytest.approx(expected[row.loss_mask], abs=2e-5)
    engine.close()


def replace_config(config: TrainerConfig, **changes: object) -> TrainerConfig:
    return msgspec.structs.replace(config, **changes)


def rollouts_of(samples: Sequence[Sample]) -> tuple[Rollout, ...]:
    return tuple(Rollout(s.run, "group", float(k % 2)) for k, s in enumerate(samples))


def test_one_step_equals_a_hand_written_policy_gradient(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    batch = make_batch(model)
    step = Step.prepare(TrainerConfig(device="cpu", rollout_is="off"), batch)
    metrics = step.run(engine, 0, quiet)
    found = weights(engine, tmp_path / "w")

    network = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.0)
    advantages = rollout_advantages(batch.rollouts, "grpo")
    totals = {
        r.run: sum(s.loss_mask.sum() for s in batch.samples if s.run == r.run)
        for r in batch.rollouts
    }
    loss = torch.zeros(())
    for sample in batch.samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        scores = torch.log_softmax(network(ids).logits[0, :-1], -1)
        scores = scores.gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.from_numpy(sample.loss_mask[1:])
        weight = 1 / (len(batch.rollouts) * totals[sample.run])
        loss = loss - float(advantages[int(sample.run[3:])]) * weight * scores[mask].sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()

    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    # Adam's first step is a sign: entries with next to no gradient may go either way.
    close = [
        ((found[name] - p).abs() < 1e-5).float().mean().item()
        for name, p in network.state_dict().items()
    ]
    assert np.mean(close) > 0.999


@pytest.mark.parametrize("loss", ["vanilla", "cispo", "gspo"])
def test_splitting_a_rollout_leaves_the_gradient_unchanged(
    loss: str, config: TrainerConfig, model: Path
) -> None:
    """The same tokens as one sample, or as two with the same contexts, give the same norm."""
    whole = make_sample(1, "run0", model=model)
    half = whole.loss_mask.copy()
    half[: np.flatnonzero(half)[12]] = False
    parts = (
        masked(whole, "run0/a", whole.loss_mask & ~half),
        masked(whole, "run0/b", half),
    )
    other = make_sample(2, "run1", model=model)
    rollouts = (Rollout("run0", "g", 1.0), Rollout("run1", "g", 0.0))
    config = replace_config(config, loss=loss)
    norms = []
    for samples in ((whole, other), (*parts, other)):
        engine = Engine(config, model, prepare(config))
        step = Step.prepare(config, Batch(rollouts, samples))
        norms.append(step.run(engine, 0, quiet)["grad_norm"])
        engine.close()
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def masked(sample: Sample, name: str, mask: np.ndarray) -> Sample:
    return replace(
        sample,
        sample_id=name,
        loss_mask=mask,
        logprobs=np.where(mask, sample.logprobs, np.float32("nan")),
        versions=np.where(mask, sample.versions, -1).astype(np.int32),
    )


def test_several_mini_batches_and_epochs_step_several_times(
    engine: Engine, config: TrainerConfig, model: Path
) -> None:
    config = replace_config(config, epochs=2, mini_batches=3)
    metrics = Step.prepare(config, make_batch(model)).run(engine, 0, quiet)
    assert metrics["optimizer_steps"] == 6
    assert metrics["sampled_tokens"] == sum(s.loss_mask.sum() for s in make_batch().samples)
    assert metrics["logprob_abs_diff_max"] < 1e-4


def test_a_reward_for_one_token_is_learned(
    config: TrainerConfig, model: Path, tmp_path: Path
) -> None:
    """Sampling from the engine's own weights, reward = share of token 7: it rises far."""
    config = replace_config(config, learning_rate=5e-3)
    engine = Engine(config, model, prepare(config))
    network = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    random = torch.Generator().manual_seed(0)
    means = []
    for version in range(16):
        network.load_state_dict(weights(engine, tmp_path / str(version)))
        samples, rollouts = sample_rollouts(network, random, version)
        means.append(np.mean([r.reward for r in rollouts]))
        Step.prepare(config, Batch(rollouts, samples)).run(engine, version, quiet)
    engine.close()
    assert np.mean(means[:3]) < 0.1
    assert np.mean(means[-3:]) > np.mean(means[:3]) + 0.2


def sample_rollouts(
    network: LlamaForCausalLM, random: torch.Generator, version: int
) -> tuple[tuple[Sample, ...], tuple[Rollout, ...]]:
    ids = torch.arange(4)[None].repeat(32, 1)
    scores = []
    for _ in range(16):
        with torch.no_grad():
            logits = torch.log_softmax(network(ids).logits[:, -1], -1)
        token = torch.multinomial(logits.exp(), 1, generator=random)
        scores.append(logits.gather(1, token))
        ids = torch.cat([ids, token], 1)
    mask = np.repeat([False, True], [4, 16])
    captured = torch.cat(scores, 1).numpy()
    samples, rollouts = [], []
    for k, row in enumerate(ids.numpy()):
        run = f"v{version}-{k}"
        logprobs = np.concatenate([np.full(4, np.nan), captured[k]]).astype(np.float32)
        versions = np.where(mask, version, -1).astype(np.int32)
        samples.append(
            Sample(f"{run}/0", run, (run,), row.astype(np.int32), mask, logprobs, versions, 1.0)
        )
        rollouts.append(Rollout(run, f"g{k // 8}", float((row[4:] == 7).mean() + 1e-6 * (k % 8))))
    return tuple(samples), tuple(rollouts)


def test_checkpoint_restores_weights_and_optimizer_exactly(
    engine: Engine, config: TrainerConfig, model: Path, tmp_path: Path
) -> None:
    step = Step.prepare(config, make_batch(model))
    step.run(engine, 0, quiet)
    engine.save(tmp_path / "checkpoint")
    step.run(engine, 1, quiet)
    straight = weights(engine, tmp_path / "a")
    engine.load(tmp_path / "checkpoint")
    step.run(engine, 1, quiet)
    assert difference(straight, weights(engine, tmp_path / "b")) == 0.0


def test_export_has_the_head_of_a_tied_model_and_loads_in_hugging_face(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    found = weights(engine, tmp_path)
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert difference(found, LlamaForCausalLM.from_pretrained(model).state_dict()) == 0.0


def test_export_is_split_into_shards_with_an_index(tmp_path: Path) -> None:
    tensors = {f"t{k}": torch.full((8,), float(k)) for k in range(5)}
    write_safetensors(iter(tensors.items()), tmp_path, shard_bytes=64)
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert files == [f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3)]
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= load_file(tmp_path / file)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert (tmp_path / "model.safetensors.index.json").is_file()


def test_equal_rewards_are_rejected_before_any_work(config: TrainerConfig) -> None:
    batch = make_batch()
    equal = tuple(replace(r, reward=1.0) for r in batch.rollouts)
    with pytest.raises(TrainingRejected, match="nothing to learn"):
        Step.prepare(config, replace(batch, rollouts=equal))


def test_rejecting_every_token_steps_nothing(
    engine: Engine, config: TrainerConfig, model: Path, tmp_path: Path
) -> None:
    batch = make_batch(model)
    Step.prepare(config, batch).run(engine, 0, quiet)  # gives Adam momentum
    before = weights(engine, tmp_path / "a")
    for sample in batch.samples:
        sample.logprobs[sample.loss_mask] -= 5
    strict = replace_config(config, rollout_rs="token_k3", rollout_rs_threshold=1e-6)
    with pytest.raises(TrainingRejected, match="rejected every token"):
        Step.prepare(strict, batch).run(WithLoss(engine, strict), 1, quiet)
    assert difference(before, weights(engine, tmp_path / "b")) == 0.0


class WithLoss:
    """An engine that trains with another configuration's loss."""

    def __init__(self, engine: Engine, config: TrainerConfig) -> None:
        from trainer.loss import PolicyLoss

        engine._workers.everywhere("set_loss_fn", PolicyLoss(config))
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


def test_rejection_drops_only_what_drifted(config: TrainerConfig, model: Path) -> None:
    config = replace_config(config, rollout_rs="seq_mean_k3", rollout_rs_threshold=0.01)
    engine = Engine(config, model, prepare(config))
    batch = make_batch(model)
    drifted = batch.samples[2]
    drifted.logprobs[drifted.loss_mask] -= 2
    metrics = Step.prepare(config, batch).run(engine, 0, quiet)
    engine.close()
    assert metrics["rejected_tokens"] == drifted.loss_mask.sum()


class FakeBrokenEngine:
    """Gives what a diverged model gives: a log-probability or a gradient that is not finite."""

    def __init__(self, logprob: float, norm: float) -> None:
        self._logprob, self._norm = logprob, norm
        self.steps = 0

    def forward_backward(self, rows: Sequence[Row]) -> Logprobs:
        return [np.full(len(r.loss_mask), self._logprob, dtype=np.float32) for r in rows]

    logprobs = forward_backward

    def optimizer_step(self) -> float:
        self.steps += 1
        return self._norm

    def learning_rate(self) -> float:
        return 1.0

    def discard_gradient(self) -> None:
        pass

    def advance_schedule(self) -> None:
        raise AssertionError("a rejected step must not count")


def test_a_logprob_that_is_not_finite_never_reaches_the_optimizer(config: TrainerConfig) -> None:
    engine = FakeBrokenEngine(logprob=float("nan"), norm=1.0)
    with pytest.raises(TrainingRejected, match="not finite"):
        Step.prepare(config, make_batch()).run(engine, 0, quiet)
    assert engine.steps == 0


def test_a_gradient_that_is_not_finite_rejects_the_step(config: TrainerConfig) -> None:
    with pytest.raises(TrainingRejected, match="gradient norm inf"):
        Step.prepare(config, make_batch()).run(FakeBrokenEngine(-5.5, float("inf")), 0, quiet)


def test_a_real_gradient_that_is_not_finite_leaves_the_weights(
    engine: Engine, config: TrainerConfig, model: Path, tmp_path: Path
) -> None:
    rows = split(select_rows(make_batch(model), 512).rows, np.ones(6, dtype=np.float32), 1, 0)[0]
    before = weights(engine, tmp_path / "a")
    engine.forward_backward([replace(r, advantages=r.advantages * np.inf) for r in rows])
    assert not np.isfinite(engine.optimizer_step())
    assert difference(before, weights(engine, tmp_path / "b")) == 0.0


def test_agreement_compares_only_tokens_of_the_parent_version() -> None:
    rows = select_rows(make_batch(version=3), 512).rows
    rows = [replace(r, old_logprobs=r.rollout_logprobs + np.float32(0.25)) for r in rows]
    old = rows[0].versions.copy()
    old[rows[0].loss_mask] = 1
    wrong = rows[0].rollout_logprobs + np.float32(2.0)
    rows[0] = replace(rows[0], versions=old, old_logprobs=wrong)
    found = agreement(rows, parent=3)
    assert found["staleness_max"] == 2
    assert found["logprob_abs_diff_mean"] == pytest.approx(0.25)
    assert found["logprob_compared_tokens"] == sum(r.tokens for r in rows[1:])
    assert found["logprob_abs_diff_mean_all"] > 0.25
    assert found["kl_rollout_trainer"] > 0


def test_a_cosine_schedule_advances_once_a_step(model: Path) -> None:
    config = TrainerConfig(
        device="cpu", learning_rate=1e-3, schedule="cosine", warmup_steps=2, total_steps=6
    )
    engine = Engine(config, model, prepare(config))
    rates = []
    for _ in range(4):
        rates.append(engine.learning_rate())
        engine.advance_schedule()
    engine.close()
    assert rates[:3] == pytest.approx([0, 5e-4, 1e-3])
    assert rates[3] < 1e-3
