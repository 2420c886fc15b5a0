"""The daemon is killed outright at random moments and always goes on without training twice."""

import multiprocessing
import random
import sqlite3
import time
from collections import Counter
from pathlib import Path

import msgspec

from daemon.config import DaemonConfig
from daemon.program import DATABASE
from daemon.state import State
from tests.daemon.fakes import read_journal
from tests.daemon.killable import main
from tests.daemon.recorded import append, exchange
from trainer.batch import Manifest

GROUPS, SIZE, KILLS = 40, 4, 20


def write_traces(traces: Path) -> list[str]:
    """Forty groups of four runs with two calls each, in four shards; returns the run ids."""
    traces.mkdir()
    runs = []
    for group in range(GROUPS):
        frames = []
        for k in range(SIZE):
            run = f"g{group}-{k}"
            runs.append(run)
            first, second = [100 + group, k], [100 + group, k, 7, 8, 3]
            frames.append(
                [
                    exchange(f"{run}-a", run=run, prompt=first, outputs=[[7, 8]], started=1.0),
                    exchange(f"{run}-b", run=run, prompt=second, outputs=[[9]], started=2.0),
                ]
            )
        append(traces / f"shard-{group % 4}", frames)
    return runs


def announce(directory: Path, runs: list[str]) -> None:
    """Register, end and reward all runs, as a rollout controller has done before the first kill."""
    state = State(directory / DATABASE)
    for run in runs:
        group = run.split("-")[0]
        state.register_run(run, group, SIZE, "task", [])
        state.end_run(run, "completed")
        value = float(run.split("-")[1])
        state.add_reward(run=run, call=None, name="reward", value=value, key=None, window=600)
    state.close()


def lines(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


def count(database: Path, sql: str) -> int:
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30) as db:
        return db.execute(sql).fetchone()[0]


def test_killed_at_random_moments_every_sample_ends_in_exactly_one_step(tmp_path):
    traces, directory = tmp_path / "traces", tmp_path / "state"
    runs = write_traces(traces)
    announce(directory, runs)
    config = DaemonConfig(
        traces=str(traces),
        directory=str(directory),
        listen="127.0.0.1:0",
        poll_seconds=0.05,
        engine_poll_seconds=0.05,
        settle_seconds=0.0,
        groups_per_step=2,
        max_staleness=1000,
    )
    database, log = directory / DATABASE, tmp_path / "log"
    steps = GROUPS // 2
    generator = random.Random(7)
    # Forked from a process that has done the imports: a restart takes milliseconds.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tests.daemon.killable"])
    deadline = time.monotonic() + 120
    killed_after = []

    def published() -> int:
        return count(database, "SELECT count(*) FROM steps WHERE status = 'published'")

    while published() < steps:
        process = processes.Process(target=main, args=(config, log))
        process.start()
        try:
            # Kill it a few log lines into its life, at a random moment after the last of them.
            kill = len(killed_after) < KILLS
            until = lines(log) + generator.randint(0, 4)
            while published() < steps and (not kill or lines(log) < until):
                assert process.is_alive() and time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.002)
            if kill and published() < steps:
                time.sleep(generator.random() * 0.05)
                process.kill()
                killed_after.append(published())
            else:
                process.terminate()
        finally:
            process.join(20)
            process.kill()
    assert len(killed_after) == KILLS, f"it was done before it could be killed: {killed_after}"
    assert len(set(killed_after)) > 5, f"the kills fell into the same few steps: {killed_after}"

    state = State(database)
    samples = state.rows("SELECT * FROM step_samples")
    assert sorted(s["sample_id"] for s in samples) == sorted(f"{run}/0" for run in runs)
    assert {s["sampled_tokens"] for s in samples} == {3}
    assert {c["status"] for c in state.rows("SELECT status FROM calls")} == {"trained"}
    assert len(state.rows("SELECT * FROM calls")) == 2 * len(runs)
    assert {s["status"] for s in state.rows("SELECT status FROM steps")} == {"published"}
    versions = state.rows("SELECT * FROM versions ORDER BY CAST(substr(version, 2) AS INTEGER)")
    assert [v["version"] for v in versions] == [f"v{k}" for k in range(GROUPS // 2 + 1)]
    assert state.live_version() == f"v{GROUPS // 2}" == (directory / "engine").read_text()
    state.close()

    # What the trainer made: each sample once. (Its journal lacks a version whose maker was killed
    # between the version and the journal's line.)
    manifests = [
        msgspec.json.decode(path.read_bytes(), type=Manifest)
        for path in (directory / "weights").glob("*/manifest.json")
    ]
    assert len(manifests) == len(versions)
    trained = Counter(sample for manifest in manifests for sample in manifest.samples)
    assert trained == Counter(f"{run}/0" for run in runs)
    published_order = [int(e["version"][1:]) for e in read_journal(directory / "published.jsonl")]
    assert published_order == sorted(published_order), "an older version went back into the engine"
