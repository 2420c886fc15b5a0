import argparse
from pathlib import Path

import pytest

from deploy.demo import program
from deploy.errors import UserError


def earlier_run(directory: Path) -> None:
    (directory / "state" / "weights" / "v3").mkdir(parents=True)
    (directory / "state" / "weights" / "v3" / "model.safetensors").write_text("heavy")
    (directory / "state" / "state.sqlite").write_text("state")
    (directory / "ridealong.toml").write_text("")
    (directory / "report.json").write_text("{}")


def test_an_earlier_run_is_kept_without_its_weights(tmp_path: Path):
    directory = tmp_path / "demo"
    earlier_run(directory)
    kept = program._fresh(directory)
    assert kept is not None
    assert not any(directory.iterdir())
    assert (kept / "report.json").is_file()
    assert (kept / "state" / "state.sqlite").is_file()
    assert not (kept / "state" / "weights").exists()


def test_a_folder_that_is_no_run_folder_is_left_alone(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="choose another --directory"):
        program._fresh(tmp_path)
    assert (tmp_path / "thesis.tex").is_file()


def test_an_empty_or_missing_folder_is_taken(tmp_path: Path):
    assert program._fresh(tmp_path / "new") is None
    assert program._fresh(tmp_path / "new") is None


def test_a_second_demo_does_not_move_the_first_ones_folder(tmp_path: Path):
    args = argparse.Namespace(steps=1, seed=0, directory=tmp_path / "demo")
    with program._owned(args.directory), pytest.raises(UserError, match="another demo runs"):
        program.run(args)


def test_steps_must_be_positive(tmp_path: Path):
    with pytest.raises(UserError, match="at least 1"):
        program.run(argparse.Namespace(steps=0, seed=0, directory=tmp_path))
