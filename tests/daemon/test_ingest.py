"""From shards into the state, each frame once."""

import os
import sqlite3
import struct
import zlib

import pytest

from daemon import exchange as exchanges
from daemon import replay
from daemon.ingest import Ingester
from daemon.state import SCHEMA_VERSION, State
from deploy.errors import UserError
from sidecar.traces import record
from sidecar.traces.record import Body, RecordsLost, SidecarStarted
from sidecar.traces.shards import SUFFIX, ShardEncoder, read_frames
from tests.daemon.recorded import append, exchange


def calls(state: State) -> dict[str, tuple[str, str]]:
    return {r["id"]: (r["status"], r["reason"]) for r in state.rows("SELECT * FROM calls")}


def faults(state: State) -> list[tuple[str, int]]:
    return [(r["kind"], r["count"]) for r in state.rows("SELECT * FROM faults ORDER BY id")]


async def test_reads_each_frame_once(traces, state, ingester):
    append(traces / "a", [[exchange("1")], [exchange("2"), exchange("3")]])
    assert await ingester.catch_up() == 2
    assert await ingester.catch_up() == 0
    append(traces / "a", [[exchange("4")]])
    append(traces / "b", [[exchange("5")]])
    assert await ingester.catch_up() == 2
    assert sorted(calls(state)) == ["1", "2", "3", "4", "5"]


async def test_goes_on_after_a_restart(tmp_path, traces, state, ingester):
    append(traces / "a", [[exchange("1")]])
    await ingester.catch_up()
    state.close()
    again = State(tmp_path / "daemon.db")
    append(traces / "a", [[exchange("2")]])
    assert await Ingester(traces, again).catch_up() == 1
    assert sorted(calls(again)) == ["1", "2"]
    again.close()


async def test_torn_tail_is_read_when_it_is_whole(traces, state, ingester):
    shard = append(traces / "a", [[exchange("1")], [exchange("2")]])
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-5])
    assert await ingester.catch_up() == 1
    assert await ingester.catch_up() == 0
    shard.write_bytes(whole)
    assert await ingester.catch_up() == 1
    assert sorted(calls(state)) == ["1", "2"]


async def test_corrupt_frame_is_counted_and_stepped_over(traces, state, ingester):
    shard = append(traces / "a", [[exchange("1")]])
    first = shard.stat().st_size
    append(traces / "a", [[exchange("2")], [exchange("3")]])
    broken = bytearray(shard.read_bytes())
    broken[first + 60] ^= 0xFF
    shard.write_bytes(bytes(broken))
    await ingester.catch_up()
    assert sorted(calls(state)) == ["1", "3"]
    assert faults(state) == [("corrupt frame", 1)]


async def test_unreadable_and_lost_records_are_counted(traces, state, ingester, monkeypatch):
    strange = exchange("2", tap=[])
    append(
        traces / "a",
        [
            [
                SidecarStarted(at=1.0, sidecar="h-1", upstream="u", ridealong="0", torn=["x"]),
                exchange("1"),
                RecordsLost(at=2.0, count=7, reason="no space left"),
                strange,
            ]
        ],
    )
    shard = append(traces / "b", [])
    assert shard.stat().st_size == 0
    await ingester.catch_up()
    assert calls(state)["2"] == ("left_out", "check failed: no engine tokens")
    assert faults(state) == [("torn shard", 1), ("records lost", 7)]


async def test_record_of_a_later_version_is_a_fault_not_an_error(traces, state, ingester):
    (traces / "a.jsonl.zst").write_bytes(ShardEncoder().frame([b'{"type":"new"}\n', b"nonsense\n"]))
    append(traces / "a", [[exchange("1")]])
    await ingester.catch_up()
    assert sorted(calls(state)) == ["1"]
    assert faults(state) == [("unreadable record", 1)] * 2


async def test_deleted_and_truncated_shards(traces, state, ingester):
    kept = append(traces / "a", [[exchange("1")]])
    gone = append(traces / "b", [[exchange("2")]])
    await ingester.catch_up()
    gone.unlink()
    kept.write_bytes(b"")
    await ingester.catch_up()
    await ingester.catch_up()
    assert {r["name"]: r["gone"] for r in state.rows("SELECT * FROM shards")} == {
        "a.jsonl.zst": 0,
        "b.jsonl.zst": 1,
    }
    assert faults(state) == [("truncated shard", 1)]
    found, missing = replay.read_calls(traces, state.rows("SELECT * FROM calls"))
    assert found == [] and sorted(missing) == ["1", "2"]


async def test_copied_shard_adds_nothing(traces, state, ingester):
    shard = append(traces / "a", [[exchange("1")]])
    (traces / "b.jsonl.zst").write_bytes(shard.read_bytes())
    await ingester.catch_up()
    assert len(calls(state)) == 1


async def test_what_becomes_of_calls(traces, state, ingester):
    append(
        traces / "a",
        [
            [
                exchange("sound"),
                exchange("cancelled", outcome="cancelled"),
                exchange("refused", status=429, tap=[]),
                exchange("broken", outcome="upstream_error"),
                exchange("miscounted", usage={"prompt_tokens": 3, "completion_tokens": 9}),
                exchange("models", route="other"),
                exchange("two", outputs=[[4], [5]]),
            ]
        ],
    )
    await ingester.catch_up()
    assert calls(state) == {
        "sound": ("waiting", ""),
        "cancelled": ("left_out", "cancelled"),
        "refused": ("left_out", "HTTP 429"),
        "broken": ("left_out", "upstream_error"),
        "miscounted": ("left_out", "check failed: output count"),
        "two.0.0": ("waiting", ""),
        "two.0.1": ("waiting", ""),
    }


async def test_body_cut_by_a_cancel_is_no_failed_check(traces, state, ingester):
    import msgspec

    cut = exchange("1", outcome="cancelled")
    response = msgspec.structs.replace(cut.response, body=Body.of(b'{"choi'))
    append(traces / "a", [[msgspec.structs.replace(cut, response=response)]])
    await ingester.catch_up()
    assert calls(state)["1"] == ("left_out", "cancelled")


async def test_versions_of_a_call_are_kept_with_their_positions(traces, state, ingester):
    append(traces / "a", [[exchange("1", outputs=[[4, 5, 6]], versions=["v3", "v4"])]])
    await ingester.catch_up()
    assert state.row("SELECT versions FROM calls")["versions"] == "[[0, 3], [1, 4]]"


async def test_runs_by_prefix_session_header_and_peer(traces, state, ingester):
    append(
        traces / "a",
        [
            [
                exchange("1", run="r1", session="s"),
                exchange("2", run=None, session="s1"),
                exchange("3", run=None, headers=[("X-Claude-Code-Session-Id", "cc")]),
                exchange(
                    "4", run=None, headers=[("x-parent-session-id", "p"), ("x-session-id", "c")]
                ),
                exchange("5", run=None),
            ]
        ],
    )
    await ingester.catch_up()
    found = {r["id"]: (r["run"], r["agent"]) for r in state.rows("SELECT * FROM calls")}
    assert found == {
        "1": ("r1", ""),
        "2": ("s1", ""),
        "3": ("session:cc", ""),
        "4": ("session:p", "c"),
        "5": ("peer:127.0.0.1", ""),
    }


async def test_traffic_without_a_name_opens_a_new_run_after_idleness(traces, state, ingester):
    append(traces / "a", [[exchange("1", run=None), exchange("2", run="told")]])
    await ingester.catch_up()
    assert state.end_idle_runs(before=2e9) == 2
    append(traces / "a", [[exchange("3", run=None), exchange("4", run="told")]])
    await ingester.catch_up()
    runs = {r["id"]: r["state"] for r in state.rows("SELECT id, state FROM runs")}
    assert runs == {"peer:127.0.0.1": "ended", "peer:127.0.0.1#2": "open", "told": "open"}


async def test_replay_gives_the_ingested_calls(traces, state, ingester):
    append(
        traces / "a", [[exchange("0", tap=[]), exchange("1")], [exchange("2", outputs=[[4], [5]])]]
    )
    await ingester.catch_up()
    found, missing = replay.read_calls(traces, state.rows("SELECT * FROM calls"))
    assert [c.id for c in found] == ["1", "2.0.0", "2.0.1"] and missing == {}
    assert found[0].prompt_ids.tolist() == [1, 2, 3]


def test_state_of_another_version_is_refused(tmp_path):
    State(tmp_path / "daemon.db").close()
    with sqlite3.connect(tmp_path / "daemon.db") as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(UserError, match=f"has schema {SCHEMA_VERSION + 1}"):
        State(tmp_path / "daemon.db")


def test_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "daemon.db").write_bytes(b"no database" * 100)
    with pytest.raises(UserError, match="can't be opened"):
        State(tmp_path / "daemon.db")


async def test_numbered_id_that_somebody_registered_is_not_taken_again(traces, state, ingester):
    state.register_run("peer:127.0.0.1#2", None, None, "", [])
    append(traces / "a", [[exchange("1", run=None)]])
    await ingester.catch_up()
    state.end_idle_runs(before=2e9)
    append(traces / "a", [[exchange("2", run=None)], [exchange("3", run="peer:127.0.0.1#3")]])
    await ingester.catch_up()
    found = {r["id"]: r["run"] for r in state.rows("SELECT id, run FROM calls")}
    assert len(set(found.values())) == 3
    assert found["2"] == "peer:127.0.0.1#3"


async def test_odd_records_are_faults_and_the_rest_is_read(traces, state, ingester):
    deep = b'{"type":"exchange","tap":' + b"[" * 100_000 + b"\n"
    lost = [
        b'{"type":"records_lost","at":1,"reason":"r","count":%d}\n' % count for count in (2**70, -1)
    ]
    (traces / f"a{SUFFIX}").write_bytes(ShardEncoder().frame([deep, *lost]))
    append(traces / "a", [[exchange("1")]])
    await ingester.catch_up()
    assert sorted(calls(state)) == ["1"]
    assert faults(state) == [("unreadable record", 1)] * 3


async def test_frame_that_claims_a_huge_size_is_damaged(traces, state, ingester):
    # A zstd frame header with an 8-byte content size (RFC 8878, section 3.1.1.1), an empty block.
    data = struct.pack("<IBQ", 0xFD2FB528, 0b11100000, 2**50) + b"\x01\x00\x00"
    head = struct.pack("<2IQ5I", 0x184D2A50, 32, 0, len(data), 1, 0, 2, zlib.crc32(data))
    (traces / f"a{SUFFIX}").write_bytes(head + struct.pack("<I", zlib.crc32(head)) + data)
    append(traces / "a", [[exchange("1")]])
    (frame, _) = read_frames(traces / f"a{SUFFIX}")
    assert frame.error == f"the data claims a size of {2**50} bytes"
    await ingester.catch_up()
    assert sorted(calls(state)) == ["1"]
    assert faults(state) == [("corrupt frame", 1)]


async def test_files_that_are_no_shards_are_counted_once(tmp_path, traces, state, ingester):
    (traces / f"loop{SUFFIX}").symlink_to(f"loop{SUFFIX}")
    (traces / f"folder{SUFFIX}").mkdir()
    os.mkfifo(traces / f"pipe{SUFFIX}")
    (traces / os.fsdecode(b"\xff" + SUFFIX.encode())).touch()
    append(traces / "z", [[exchange("1")]])
    await ingester.catch_up()
    await ingester.catch_up()
    await Ingester(traces, state).catch_up()
    assert sorted(calls(state)) == ["1"]
    assert faults(state) == [("unreadable shard", 1)] * 4


async def test_value_that_no_table_takes_costs_only_its_frame(traces, state, ingester, monkeypatch):
    """Provoked from outside: no record that decodes is known to hold such a value."""
    append(traces / "a", [[exchange("1")], [exchange("2")]])
    insert = state._insert_call

    def fake_overflow(db, call, *rest):
        if call.id == "1":
            raise OverflowError("Python int too large to convert to SQLite INTEGER")
        return insert(db, call, *rest)

    monkeypatch.setattr(state, "_insert_call", fake_overflow)
    assert await ingester.catch_up() == 2
    assert sorted(calls(state)) == ["2"]
    assert faults(state) == [("unusable frame", 1)]


@pytest.mark.parametrize("outcome", ["complete", "cancelled"])
async def test_call_with_a_nonsense_tap_is_kept_and_marked(traces, state, ingester, outcome):
    tap = ['{"e":"prompt","r":0,"id":"x","ids":[-5],"params":{}}']
    append(traces / "a", [[exchange("1", tap=tap, outcome=outcome)]])
    await ingester.catch_up()
    assert calls(state) == {"1": ("left_out", "check failed: unreadable tap")}
    assert state.row("SELECT check_result FROM calls") == {"check_result": "failed"}


async def test_exchange_that_can_not_be_read_is_a_failed_call(traces, state, ingester, monkeypatch):
    def fake_bug(call):
        raise RuntimeError("a bug")

    monkeypatch.setattr(exchanges, "read", fake_bug)
    append(traces / "a", [[exchange("1")]])
    await ingester.catch_up()
    assert calls(state) == {"1": ("left_out", "check failed: unreadable exchange")}
    assert faults(state) == [("unreadable exchange", 1)]


@pytest.mark.parametrize(
    "lines",
    [
        [b"nonsense\n"],
        [b'{"type":"new"}\n', b"nonsense\n"],
        [record.encode(exchange("1"))],
        [record.encode(exchange("1")), record.encode(exchange("other"))],
    ],
)
async def test_calls_of_a_changed_shard_are_missing(traces, state, ingester, lines):
    shard = append(traces / "a", [[exchange("1"), exchange("2")]])
    await ingester.catch_up()
    shard.write_bytes(ShardEncoder().frame(lines))
    found, missing = replay.read_calls(traces, state.rows("SELECT * FROM calls"))
    assert "2" in missing
    assert sorted([c.id for c in found] + list(missing)) == ["1", "2"]


def test_reward_without_a_finite_sum(state):
    for run, values in {"inf": [1.7e308] * 2, "sound": [0.5, 0.25], "none": []}.items():
        state.register_run(run, None, None, "", [])
        for k, value in enumerate(values):
            state.add_reward(run=run, call=None, name=f"n{k}", value=value, key=None, window=9.0)
    rewards = {row["id"]: row["reward"] for row in state.undecided_runs()}
    assert rewards == {"inf": float("inf"), "sound": 0.75, "none": None}
