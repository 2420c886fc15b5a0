"""``deploy/setup.sh`` with an interpreter and an installer that only note what they are asked."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FILES = (
    "setup.cfg",
    "pyproject.toml",
    "deploy/setup.sh",
    *(f"deploy/{kind}-cpu.txt" for kind in ("constraints", "overrides")),
)


@pytest.mark.parametrize("absolute", [True, False])
def test_the_environment_that_is_named_is_installed_into(tmp_path: Path, absolute: bool) -> None:
    clone = tmp_path / "clone"
    (clone / "deploy").mkdir(parents=True)
    for name in FILES:
        shutil.copy(REPOSITORY / name, clone / name)
    venv = tmp_path / "elsewhere" if absolute else clone / "inside" / "venv"
    for name, script in (("python", "exit 0"), ("uv", 'echo "$VIRTUAL_ENV" > uv-was-asked')):
        program = venv / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    named = str(venv) if absolute else "inside/venv"
    subprocess.run(
        [clone / "deploy" / "setup.sh"],
        env=os.environ | {"RIDEALONG_VENV": named, "RIDEALONG_ENGINE": "cpu"},
        cwd=tmp_path,
        check=True,
        timeout=60,
    )
    assert (clone / "uv-was-asked").read_text() == f"{venv}\n"
    assert (venv / ".ridealong").is_file()
