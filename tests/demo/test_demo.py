"""The demo as the user starts it, with everything real: two steps, then a second run, ended early.

Minutes, for the model server's two starts and two training steps.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).parents[2]
RUN_SECONDS = 900


def start(directory: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "deploy", "demo", "--directory", str(directory), *options],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def left_running(directory: Path) -> list[list[str]]:
    """Return the command lines of processes that work for the demo in ``directory``."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "environ", "open_files"]):
        files = [file.path for file in process.info["open_files"] or []]
        if any(path.startswith(str(directory)) for path in files):
            found.append(process.info["cmdline"])
    return found


@pytest.mark.loop
def test_two_steps_and_then_a_second_run_that_is_interrupted(smol_model: Path, tmp_path: Path):
    directory = tmp_path / "demo"
    demo = start(directory, "--steps", "2", "--seed", "3")
    try:
        output, _ = demo.communicate(timeout=RUN_SECONDS)
    finally:
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)
    assert demo.returncode == 0, output
    assert "step 2/2  v2" in output
    report = json.loads((directory / "report.json").read_text())
    assert report["seed"] == 3
    assert report["checks"]["calls"] >= 64
    assert report["checks"]["failed"] == 0
    assert report["logprob_abs_diff_mean"] < 0.02
    assert [version["version"] for version in report["versions"]] == ["v1", "v2"]
    for version in report["versions"]:
        assert version["rollouts"] <= version["samples"] <= version["sampled_tokens"]
        assert version["staleness_max"] <= 1
        assert 0 < version["swap_pause_s"] < 30
    assert (directory / "reward.png").stat().st_size > 10_000
    assert left_running(directory) == []

    second = start(directory, "--steps", "2")
    deadline = time.monotonic() + 60
    while not (directory / "logs" / "serve.log").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(5)
    assert left_running(directory), "the model server was not started"
    second.send_signal(signal.SIGINT)
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 130, output
    assert left_running(directory) == []
    kept = [path for path in tmp_path.iterdir() if path.name.startswith("demo-")]
    assert len(kept) == 1
    assert (kept[0] / "report.json").is_file()
