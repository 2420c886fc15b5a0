"""The command line that ``ridealong serve`` becomes."""

from pathlib import Path

import pytest

from deploy.serve import command
from deploy.serve_config import ServeConfig


def served_as(model: str) -> str:
    argv, _ = command(ServeConfig(model=model), [])
    return argv[argv.index("--served-model-name") + 1]


def test_a_model_has_the_name_that_its_folder_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "snapshot-1f3a"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (tmp_path / "my-model").symlink_to(folder)
    assert served_as(str(tmp_path / "my-model")) == "my-model"
    monkeypatch.chdir(tmp_path)
    assert served_as("my-model/") == served_as("./my-model") == "my-model"
    (folder / "deeper").mkdir()
    monkeypatch.chdir(folder)
    assert served_as(".") == served_as("deeper/..") == "snapshot-1f3a"
