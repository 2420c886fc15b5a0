"""Two workers on Ray do what one does."""

from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from tests.trainer.conftest import make_batch
from trainer.batch import Manifest
from trainer.config import TrainerConfig
from trainer.trainer import Trainer


def train(config: TrainerConfig, model: Path, folder: Path, batch: Path) -> list[Manifest]:
    """One step twice: the second time from the parent's checkpoint."""
    trainer = Trainer(config, model, folder, print)
    trainer.bootstrap()
    made = [trainer.train(batch, "v0", version) for version in ("v1", "v2")]
    trainer.close()
    return made


def test_two_workers_equal_one(config: TrainerConfig, model: Path, tmp_path: Path) -> None:
    batch = tmp_path / "batch.npz"
    make_batch(model).save(batch)  # 7 samples: one worker gets a filler row
    one = train(config, model, tmp_path / "one", batch)
    two = train(msgspec.structs.replace(config, workers=2), model, tmp_path / "two", batch)
    for a, b in zip(one, two, strict=True):
        assert b.samples == a.samples
        assert b.canary.logprobs == pytest.approx(a.canary.logprobs, abs=2e-4)
        for key in ("grad_norm", "loss", "logprob_abs_diff_mean_all", "sampled_tokens"):
            assert b.metrics[key] == pytest.approx(a.metrics[key], rel=1e-3, abs=1e-6), key
        assert b.canary == two[0].canary
    a, b = (load_file(tmp_path / f / "weights/v2/model.safetensors") for f in ("one", "two"))
    assert a.keys() == b.keys()
    for name in a:
        # Adam turns rounding differences of tiny gradients into whole steps: compare most entries.
        assert ((a[name] - b[name]).abs() < 1e-5).float().mean() > 0.995, name
