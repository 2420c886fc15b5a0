"""Versions made one after the other, in this process."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from deploy.errors import UserError
from tests.trainer.conftest import make_batch, reference_logprobs
from tokenization.sample import Sample
from trainer.config import TrainerConfig
from trainer.errors import TrainingRejected
from trainer.trainer import Trainer

Open = Callable[[], Trainer]


@pytest.fixture
def stages() -> list[str]:
    return []


@pytest.fixture
def reopen(config: TrainerConfig, model: Path, tmp_path: Path, stages: list[str]) -> Iterator[Open]:
    """Opens the same directory again, as a new process would."""
    opened: list[Trainer] = []

    def open_again() -> Trainer:
        for trainer in opened:
            trainer.close()
        opened[:] = [Trainer(config, model, tmp_path / "run", stages.append)]
        return opened[0]

    yield open_again
    for trainer in opened:
        trainer.close()


@pytest.fixture
def trainer(reopen: Open) -> Trainer:
    return reopen()


@pytest.fixture
def batch(model: Path, tmp_path: Path) -> Path:
    make_batch(model).save(tmp_path / "batch.npz")
    return tmp_path / "batch.npz"


@pytest.fixture
def second(model: Path, tmp_path: Path) -> Path:
    make_batch(model, seed=1, version=1).save(tmp_path / "second.npz")
    return tmp_path / "second.npz"


def test_a_repeated_step_is_answered_without_training(
    reopen: Open, batch: Path, second: Path, stages: list[str]
) -> None:
    trainer = reopen()
    assert trainer.bootstrap() == trainer.bootstrap()
    first = trainer.train(batch, "v0", "v1")
    assert "update" in stages
    stages.clear()
    assert trainer.train(batch, "v0", "v1") == first
    trainer = reopen()
    assert trainer.train(batch, "v0", "v1") == first
    with pytest.raises(TrainingRejected, match="exists already"):
        trainer.train(second, "v0", "v1")
    assert stages == []


def test_a_version_says_what_it_was_made_from(
    trainer: Trainer, model: Path, tmp_path: Path, batch: Path
) -> None:
    start = trainer.bootstrap()
    made = trainer.train(batch, "v0", "v1")
    assert (start.version, start.parent, start.batch_digest) == ("v0", None, None)
    assert (made.version, made.parent, made.step) == ("v1", "v0", 1)
    assert made.samples == [s.sample_id for s in make_batch().samples]
    assert made.metrics["logprob_abs_diff_max"] < 1e-4
    assert made.metrics["kl_rollout_trainer"] < 1e-6
    assert made.metrics["staleness_max"] == 0
    assert made.metrics["reward_mean"] == pytest.approx(2.5 / 6)

    assert len(start.canary.token_ids) == 48
    assert start.canary.token_ids == made.canary.token_ids
    for manifest, folder in ((start, model), (made, tmp_path / "run/weights/v1")):
        expected = canary_reference(folder, manifest.canary.token_ids)
        assert manifest.canary.logprobs == pytest.approx(expected, abs=2e-5)
    assert made.canary.logprobs != pytest.approx(start.canary.logprobs, abs=1e-3)


def canary_reference(folder: Path, token_ids: list[int]) -> list[float]:
    ids = np.array(token_ids, dtype=np.int32)
    nothing = np.zeros(len(ids), dtype=np.float32)
    sample = Sample("c", "c", (), ids, ids > 0, nothing, ids, 1.0)
    return reference_logprobs(folder, sample)[1:].tolist()


def test_going_back_trains_from_the_older_version(
    trainer: Trainer, batch: Path, second: Path
) -> None:
    trainer.bootstrap()
    trainer.train(batch, "v0", "v1")
    straight = trainer.train(second, "v1", "v2")
    again = trainer.train(second, "v1", "v3")
    assert again.canary == straight.canary
    with pytest.raises(TrainingRejected, match="keep_checkpoints"):
        trainer.train(batch, "v0", "v4")


def test_rejections_leave_the_trainer_ready(trainer: Trainer, tmp_path: Path, batch: Path) -> None:
    trainer.bootstrap()
    with pytest.raises(TrainingRejected, match="v7 does not exist"):
        trainer.train(batch, "v7", "v8")
    torn = tmp_path / "torn.npz"
    torn.write_bytes(batch.read_bytes()[:100])
    with pytest.raises(TrainingRejected, match="can't be read"):
        trainer.train(torn, "v0", "v1")
    equal = make_batch()
    equal = replace(equal, rollouts=tuple(replace(r, reward=0.5) for r in equal.rollouts))
    equal.save(tmp_path / "equal.npz")
    with pytest.raises(TrainingRejected, match="nothing to learn"):
        trainer.train(tmp_path / "equal.npz", "v0", "v1")
    assert trainer.train(batch, "v0", "v1").version == "v1"


def test_what_the_user_can_fix_is_said_in_one_line(
    config: TrainerConfig, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="does not exist"):
        Trainer(config, tmp_path / "nowhere", tmp_path / "run", print)
    many = msgspec.structs.replace(config, device="cuda", workers=64)
    with pytest.raises(UserError, match=r"trainer\.workers = 64"):
        Trainer(many, model, tmp_path / "run", print)


def test_settings_that_contradict_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="total_steps"):
        msgspec.convert({"schedule": "cosine"}, TrainerConfig)
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"learning_rat": 1e-5}, TrainerConfig)
