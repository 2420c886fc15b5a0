"""The demo while its programs are killed: it goes on, nothing is lost or trained twice."""

import json
import signal
import sqlite3
import subprocess
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from sidecar.traces import record
from sidecar.traces.reader import read_records
from tests.loop.conftest import RIDEALONG

pytestmark = pytest.mark.vllm

STEPS = 2
SECONDS = 900


class Demo:
    """A demo in a process of its own, and what can be seen of it from outside."""

    def __init__(self, directory: Path, log: Path) -> None:
        self.directory = directory
        self.log = log
        with log.open("wb") as output:
            argv = [*RIDEALONG, "demo", "--steps", str(STEPS), "--seed", "5"]
            self.process = subprocess.Popen(
                [*argv, "--directory", str(directory)], stdout=output, stderr=subprocess.STDOUT
            )
        self.deadline = time.monotonic() + SECONDS

    def __enter__(self) -> "Demo":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(120)

    def wait(self, what: str, condition: Callable[[], Any]) -> Any:
        while time.monotonic() < self.deadline:
            code = self.process.poll()
            assert code is None, f"the demo ended with {code} before {what}:\n{self.tail()}"
            try:
                if found := condition():
                    return found
            except (httpx.HTTPError, OSError, KeyError):
                pass
            time.sleep(0.1)
        pytest.fail(f"no {what}:\n{self.tail()}")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def settings(self) -> dict[str, Any]:
        return tomllib.loads((self.directory / "ridealong.toml").read_text())

    def status(self) -> dict[str, Any]:
        return httpx.get(f"http://{self.settings()['daemon']['listen']}/v1/status").json()

    def training(self, step: int) -> bool:
        found = self.status()
        return bool(found["step"]) and found["step"]["number"] == step and bool(found["trainer"])

    def streams_in_flight(self) -> bool:
        text = httpx.get(f"http://{self.settings()['sidecar']['admin']}/metrics").text
        lines = [
            line for line in text.splitlines() if line.startswith("ridealong_sidecar_in_flight")
        ]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines) > 0

    def kill(self, words: str) -> None:
        """kill -9 the process below the demo whose command line holds ``words``."""
        (victim,) = [
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if words in " ".join(child.cmdline())
        ]
        victim.send_signal(signal.SIGKILL)


def _complete_exchanges(traces: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    seen = set()
    for shard in traces.glob("*.jsonl.zst"):
        for located in read_records(shard):
            assert located.error is None
            entry = located.record
            if isinstance(entry, record.Exchange) and entry.outcome == "complete":
                assert entry.id not in seen
                seen.add(entry.id)
                if entry.response is not None and entry.response.status == 200:
                    found[entry.session.run or ""] += 1
    return found


def test_the_loop_survives_kill_9_of_each_program(tmp_path: Path, smol_model: Path) -> None:
    with Demo(tmp_path / "demo", tmp_path / "demo.log") as demo:
        demo.wait("step 1 in training", lambda: demo.training(1))
        demo.kill("trainer.service")
        demo.wait("v1 live", lambda: demo.status()["live_version"] == "v1")
        demo.wait("a stream in flight", demo.streams_in_flight)
        demo.kill("deploy sidecar")
        demo.wait("step 2 in training", lambda: demo.training(2))
        demo.kill("deploy daemon")
        code = demo.process.wait(max(1, demo.deadline - time.monotonic()))
        assert code == 0, demo.tail()

    database = sqlite3.connect(demo.directory / "state" / "daemon.db")
    steps = database.execute("SELECT number, parent, version, status FROM steps").fetchall()
    assert steps == [(n, f"v{n - 1}", f"v{n}", "published") for n in range(1, STEPS + 1)]
    total, distinct = database.execute(
        "SELECT count(*), count(DISTINCT sample_id) FROM step_samples"
    ).fetchone()
    assert total == distinct > 0
    # A run's calls are all in its one step, so no call is trained by two samples' steps.
    assert database.execute("SELECT count(*), count(DISTINCT run) FROM step_runs").fetchone() == (
        database.execute("SELECT count(*) FROM runs WHERE state = 'trained'").fetchone() * 2
    )
    manifests = sorted((demo.directory / "state" / "weights").glob("v*/manifest.json"))
    trained = [json.loads(path.read_text()) for path in manifests]
    for earlier, later in pairwise([m for m in trained if m["step"]]):
        assert not set(earlier["samples"]) & set(later["samples"])

    complete = _complete_exchanges(demo.directory / "traces")
    attempts = [json.loads(line) for line in (demo.directory / "rollouts.jsonl").open()]
    missing = {a["run"]: a["replies"] - complete[a["run"]] for a in attempts}
    assert not [run for run, lost in missing.items() if lost > 0], "completed calls are missing"
    replies = sum(a["replies"] for a in attempts)
    repeated = sum(a["failure"] == "infrastructure" for a in attempts)
    print(
        f"\nkilled trainer, sidecar, daemon: {len(steps)} steps, {total} samples,"
        f" {distinct} distinct; {replies} replies completed at the agent,"
        f" {sum(complete.values())} in the shards; {repeated} rollouts repeated"
    )

    report = json.loads((demo.directory / "report.json").read_text())
    assert report["seed"] == 5
    assert report["checks"]["calls"] >= 64 and report["checks"]["failed"] == 0
    assert report["logprob_abs_diff_mean"] < 0.02
    assert [v["version"] for v in report["versions"]] == ["v1", "v2"]
    for version in report["versions"]:
        assert version["samples"] <= version["sampled_tokens"]
        assert version["staleness_max"] <= 1
        assert 0 < version["swap_pause_s"] < 60
    assert (demo.directory / "reward.png").stat().st_size > 10_000


def _ends_with_everything_it_started(demo: Demo) -> None:
    started = psutil.Process(demo.process.pid).children(recursive=True)
    assert started
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(90) == 130
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive, [" ".join(p.cmdline())[:120] for p in alive]


def test_ctrl_c_and_a_second_run(tmp_path: Path, smol_model: Path) -> None:
    with Demo(tmp_path / "demo", tmp_path / "first.log") as first:
        first.wait("a stream", first.streams_in_flight)
        _ends_with_everything_it_started(first)
    with Demo(tmp_path / "demo", tmp_path / "second.log") as second:
        second.wait("the server's log", (tmp_path / "demo" / "logs" / "serve.log").exists)
        time.sleep(3)
        _ends_with_everything_it_started(second)
    kept = [path for path in tmp_path.iterdir() if path.name.startswith("demo-")]
    assert len(kept) == 1 and (kept[0] / "traces").is_dir()
