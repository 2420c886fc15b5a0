"""Reading old shards anew after a fix: what changes, and what a step has taken does not."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from daemon.ingest import Ingester
from daemon.ownership import DATABASE, owned
from daemon.reassemble import Report, reassemble
from daemon.state import LATE, Plan, State
from deploy.errors import UserError
from sidecar.traces.retention import CONSUMED
from sidecar.traces.shards import SUFFIX
from tests.daemon.recorded import append, exchange

OLD_REASON = "the responses protocol is not read"


@pytest.fixture
def traces(tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    return folder


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "state"


@contextmanager
def opened(directory: Path) -> Iterator[State]:
    state = State(directory / DATABASE)
    try:
        yield state
    finally:
        state.close()


def ingest(traces: Path, directory: Path) -> None:
    with opened(directory) as state:
        asyncio.run(Ingester(traces, state).catch_up())


def as_read_before(state: State, *calls: str) -> None:
    """Put the rows of calls into the form that a Ridealong without their protocol had left."""
    for call in calls:
        state._db.execute(
            "UPDATE calls SET check_result = 'unchecked', token_source = 'none', output_tokens = 0,"
            " status = 'left_out', reason = ? WHERE id = ?",
            (OLD_REASON, call),
        )


def calls(directory: Path) -> dict[str, tuple[str, str]]:
    with opened(directory) as state:
        rows = state.rows("SELECT * FROM calls")
    return {row["id"]: (row["status"], row["reason"]) for row in rows}


def runs(directory: Path) -> dict[str, str]:
    with opened(directory) as state:
        return {row["id"]: row["state"] for row in state.rows("SELECT * FROM runs")}


def changed(report: Report) -> dict[tuple[str, str], int]:
    return dict(report.changed)


def test_calls_of_open_runs_wait_again(traces, directory):
    append(traces / "a", [[exchange("1"), exchange("2")], [exchange("3", started=1001)]])
    ingest(traces, directory)
    with opened(directory) as state:
        before = state.rows("SELECT * FROM calls ORDER BY id")
        as_read_before(state, "1", "3")
    report = reassemble(traces, directory)
    assert (report.read, changed(report)) == (3, {("unchecked", "passed"): 2})
    assert (report.taken, report.reopened, report.missing) == (0, 0, {})
    assert calls(directory) == dict.fromkeys("123", ("waiting", ""))
    with opened(directory) as state:
        assert state.rows("SELECT * FROM calls ORDER BY id") == before
    assert reassemble(traces, directory).changed.total() == 0
    assert "3 calls read anew, 2 of them changed" in str(report)
    assert "2 unchecked -> passed" in str(report)


def test_a_call_that_was_wrongly_sound_is_left_out(traces, directory):
    append(traces / "a", [[exchange("1", usage={"prompt_tokens": 3, "completion_tokens": 9})]])
    ingest(traces, directory)
    with opened(directory) as state:
        state._db.execute(
            "UPDATE calls SET check_result = 'passed', failures = '[]', status = 'waiting', "
            "reason = ''"
        )
    report = reassemble(traces, directory)
    assert changed(report) == {("passed", "failed (output count)"): 1}
    assert calls(directory) == {"1": ("left_out", "check failed: output count")}


def test_one_row_may_become_several(traces, directory):
    append(traces / "a", [[exchange("1", outputs=[[4], [5]])]])
    ingest(traces, directory)
    with opened(directory) as state:
        state._db.execute("DELETE FROM calls WHERE id = '1.0.1'")
        state._db.execute("UPDATE calls SET id = '1'")
        as_read_before(state, "1")
    report = reassemble(traces, directory)
    assert changed(report) == {("unknown", "passed"): 2}
    assert calls(directory) == dict.fromkeys(["1.0.0", "1.0.1"], ("waiting", ""))
    assert list(runs(directory)) == ["run-1"]


def plan(run: str, *trained: str) -> Plan:
    return Plan(
        number=1,
        parent="v0",
        version="v1",
        batch="b",
        digest="d",
        rollouts={run: 1.0},
        samples={f"{run}/0": (5, 2)},
        trained=trained,
        groups=(),
        metrics={},
    )


def test_what_a_step_has_taken_stays(traces, directory):
    append(
        traces / "a", [[exchange("1"), exchange("2", started=1001), exchange("3", started=1002)]]
    )
    ingest(traces, directory)
    with opened(directory) as state:
        as_read_before(state, "2")
        state.end_run("run-1", "completed")
        state.plan_step(plan("run-1", "1"), {}, {"3": "stale (more than 4 versions old)"})
        state.note_forks({"3": "drift at token 7"})
        state._db.execute("UPDATE calls SET failures = '[[\"old\", \"\"]]' WHERE id = '1'")
    report = reassemble(traces, directory)
    assert (report.read, report.taken, report.reopened) == (2, 1, 0)
    assert calls(directory) == {
        "1": ("planned", "step 1"),
        "2": ("left_out", LATE),
        "3": ("left_out", "stale (more than 4 versions old)"),
    }
    with opened(directory) as state:
        assert json.loads(state.row("SELECT * FROM calls WHERE id = '1'")["failures"])
        assert state.row("SELECT * FROM calls WHERE id = '3'")["fork"] == "drift at token 7"


def leave_out(state: State, *names: str, group: str | None = None) -> None:
    for name in names:
        state.end_run(name, "completed")
    state.leave_out(
        runs=dict.fromkeys(names, "no trainable call"),
        calls={},
        group=(group, "0 of 2 rollouts usable") if group else None,
    )


def test_runs_that_were_left_out_for_it_are_decided_on_again(traces, directory):
    shard = append(
        traces / "a",
        [
            [
                exchange("1", run="gained"),
                exchange("2", run="gained", status=429, tap=[]),
                exchange("3", run="other"),
            ]
        ],
    )
    mark = shard.with_name(shard.name + CONSUMED)
    mark.touch()
    ingest(traces, directory)
    with opened(directory) as state:
        as_read_before(state, "1")
        leave_out(state, "gained", "other")
    report = reassemble(traces, directory)
    assert report.reopened == 1
    assert runs(directory) == {"gained": "ended", "other": "left_out"}
    assert calls(directory) == {
        "1": ("waiting", ""),
        "2": ("left_out", "HTTP 429"),
        "3": ("left_out", "no trainable call"),
    }
    assert not mark.exists()


def test_a_group_comes_back_whole(traces, directory):
    append(traces / "a", [[exchange("1", run="a"), exchange("2", run="b")]])
    with opened(directory) as state:
        for run in ("a", "b"):
            state.register_run(run, group="g", group_size=2, task="", rewards=[])
    ingest(traces, directory)
    with opened(directory) as state:
        as_read_before(state, "1")
        leave_out(state, "a", "b", group="g")
    assert reassemble(traces, directory).reopened == 2
    assert runs(directory) == {"a": "ended", "b": "ended"}
    assert calls(directory) == dict.fromkeys("12", ("waiting", ""))
    with opened(directory) as state:
        assert state.row("SELECT state FROM groups WHERE id = 'g'") == {"state": "open"}


def test_a_group_that_was_trained_stays_closed(traces, directory):
    append(traces / "a", [[exchange("1", run="a"), exchange("2", run="b")]])
    with opened(directory) as state:
        for run in ("a", "b"):
            state.register_run(run, group="g", group_size=2, task="", rewards=[])
    ingest(traces, directory)
    with opened(directory) as state:
        as_read_before(state, "1")
        leave_out(state, "a")
        state.end_run("b", "completed")
        state.plan_step(plan("b", "2"), {}, {})
    assert reassemble(traces, directory).reopened == 0
    assert runs(directory) == {"a": "left_out", "b": "planned"}
    assert calls(directory) == {"1": ("left_out", LATE), "2": ("planned", "step 1")}


def test_frames_that_the_daemon_has_not_read_are_left_to_it(traces, directory):
    append(traces / "a", [[exchange("1")]])
    ingest(traces, directory)
    append(traces / "a", [[exchange("2")]])
    append(traces / "b", [[exchange("3")]])
    assert reassemble(traces, directory).read == 1
    ingest(traces, directory)
    assert calls(directory) == dict.fromkeys("123", ("waiting", ""))


def test_shards_that_are_gone_keep_their_rows(traces, directory):
    shard = append(traces / "a", [[exchange("1")]])
    ingest(traces, directory)
    shard.unlink()
    report = reassemble(traces, directory)
    assert report.missing == {f"a{SUFFIX}": "it is gone"}
    assert f"a{SUFFIX} can't be read: it is gone" in str(report)
    assert calls(directory) == {"1": ("waiting", "")}


def test_a_record_in_two_shards_is_redone_once(traces, directory):
    append(traces / "a", [[exchange("1")]])
    append(traces / "b", [[exchange("1")]])
    ingest(traces, directory)
    with opened(directory) as state:
        as_read_before(state, "1")
    report = reassemble(traces, directory)
    assert (report.read, changed(report)) == (1, {("unchecked", "passed"): 1})
    with opened(directory) as state:
        assert state.row("SELECT shard FROM calls") == {"shard": f"b{SUFFIX}"}


def test_not_while_a_daemon_runs(traces, directory):
    ingest(traces, directory)
    with owned(directory), pytest.raises(UserError, match="another daemon runs"):
        reassemble(traces, directory)


def test_no_state(traces, tmp_path):
    with pytest.raises(UserError, match="holds no daemon's state"):
        reassemble(traces, tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
