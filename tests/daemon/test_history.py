"""Shards as a sidecar writes them, history stored once: read, replayed, and given back."""

from pathlib import Path

from daemon import ingest, replay
from daemon.ingest import Ingester
from daemon.state import State
from sidecar.traces.history import History
from sidecar.traces.record import Record, SidecarStarted, decode
from sidecar.traces.retention import CONSUMED
from sidecar.traces.shards import ShardEncoder, end_mark
from tests.daemon.recorded import exchange
from tests.daemon.test_ingest import calls, faults

PROMPT = [1000 + number for number in range(400)]


def turn(number: int) -> Record:
    """A call of a conversation that grows, each prompt holding the one before and its reply."""
    prompt = PROMPT + [token for k in range(number) for token in (5 * k, 5 * k + 1, 7)]
    messages = [{"role": "user", "content": f"message {k} " * 30} for k in range(number + 1)]
    return exchange(
        f"{number}",
        prompt=prompt,
        outputs=[[5 * number, 5 * number + 1]],
        messages=messages,
        started=1000.0 + number,
    )


def write(
    path: Path, records: list[Record], *, closed: bool = True, first: int = 0
) -> list[tuple[int, int]]:
    """Write each record to a frame of its own, as a sidecar does; return where they lie."""
    history, encoder, shard, places = History(), ShardEncoder(), bytearray(), []
    for number, record in enumerate(records):
        places.append((len(shard), 0))
        shard += encoder.frame([history.encode(record, places[-1])], first + number)
    path.write_bytes(shard + (end_mark(first + len(records)) if closed else b""))
    return places


async def test_calls_are_ingested_and_replayed_whole(traces, state):
    write(traces / "a.jsonl.zst", [turn(number) for number in range(8)])
    await Ingester(traces, state).catch_up()
    rows = state.rows("SELECT * FROM calls ORDER BY started")
    assert [row["check_result"] for row in rows] == ["passed"] * 8
    assert [row["prompt_tokens"] for row in rows] == [400 + 3 * number for number in range(8)]
    for some in (rows, rows[::-1], rows[7:], rows[3:4]):
        found, missing = replay.read_calls(traces, some)
        assert missing == {}
        for call in found:
            assert call.prompt_ids.tolist() == decode_prompt(int(call.id))
            assert call.dialogue is not None and len(call.dialogue.items) == int(call.id) + 1


def decode_prompt(number: int) -> list[int]:
    return PROMPT + [token for k in range(number) for token in (5 * k, 5 * k + 1, 7)]


async def test_a_daemon_that_restarts_in_the_middle_of_a_shard_goes_on(tmp_path, traces):
    places = write(traces / "a.jsonl.zst", [turn(number) for number in range(8)])
    whole = (traces / "a.jsonl.zst").read_bytes()
    assert decode_is_short(whole), "or the test shows nothing"
    for end in [place for place, _ in places[1:]] + [len(whole)]:
        (traces / "a.jsonl.zst").write_bytes(whole[:end])
        state = State(tmp_path / "daemon.db")
        await Ingester(traces, state).catch_up()
        state.close()
    state = State(tmp_path / "daemon.db")
    rows = state.rows("SELECT * FROM calls ORDER BY started")
    assert [row["prompt_tokens"] for row in rows] == [400 + 3 * number for number in range(8)]
    assert faults(state) == []
    state.close()


def decode_is_short(shard: bytes) -> bool:
    import zstandard

    reader = zstandard.ZstdDecompressor().stream_reader(shard, read_across_frames=True)
    lines = reader.read().splitlines()
    return all(getattr(decode(line), "repeats", None) for line in lines[1:])


async def test_a_corrupt_base_costs_its_dependents_each_a_counted_fault(traces, state):
    path = traces / "a.jsonl.zst"
    places = write(path, [turn(number) for number in range(5)])
    broken = bytearray(path.read_bytes())
    broken[places[2][0] + 100] ^= 0xFF
    path.write_bytes(broken)
    await Ingester(traces, state).catch_up()
    assert sorted(calls(state)) == ["0", "1"]
    assert faults(state) == [
        ("corrupt frame", 1),
        ("unreadable record", 1),
        ("unreadable record", 1),
    ]


async def test_a_base_that_breaks_after_ingest_makes_calls_missing_never_wrong(traces, state):
    path = traces / "a.jsonl.zst"
    places = write(path, [turn(number) for number in range(5)])
    await Ingester(traces, state).catch_up()
    broken = bytearray(path.read_bytes())
    broken[places[2][0] + 100] ^= 0xFF
    path.write_bytes(broken)
    found, missing = replay.read_calls(traces, state.rows("SELECT * FROM calls"))
    assert [call.id for call in found] == ["0", "1"] and sorted(missing) == ["2", "3", "4"]
    assert "can't be read any more" in missing["4"]


async def test_records_written_again_after_a_failed_sync_are_one_call(traces, state):
    write(traces / "s-0.jsonl.zst", [turn(0), turn(1)], closed=False)
    ingester = Ingester(traces, state)
    await ingester.catch_up()
    write(traces / "s-1.jsonl.zst", [turn(1), turn(2)], first=1)
    await ingester.catch_up()
    found = {row["id"]: row["shard"] for row in state.rows("SELECT * FROM calls")}
    assert found == {"0": "s-0.jsonl.zst", "1": "s-1.jsonl.zst", "2": "s-1.jsonl.zst"}
    (traces / "s-0.jsonl.zst").unlink()
    _, missing = replay.read_calls(traces, state.rows("SELECT * FROM calls"))
    assert sorted(missing) == ["0"]


async def test_what_a_killed_sidecar_lost_is_counted(traces, state):
    started = SidecarStarted(at=1.0, sidecar="h", upstream="u", ridealong="0", torn=["x"], lost=3)
    write(traces / "a.jsonl.zst", [started])
    await Ingester(traces, state).catch_up()
    assert faults(state) == [("torn shard", 1), ("records lost", 3)]


async def test_a_shard_is_marked_when_nothing_in_it_is_needed(traces, state, monkeypatch):
    monkeypatch.setattr(ingest, "MARK_SECONDS", 0.0)
    ingester = Ingester(traces, state)
    marked = lambda: sorted(path.name for path in traces.glob(f"*{CONSUMED}"))  # noqa: E731
    write(traces / "a.jsonl.zst", [turn(0), exchange("other", route="other")])
    write(traces / "b.jsonl.zst", [exchange("c", outcome="cancelled")])
    write(traces / "c.jsonl.zst", [exchange("d", route="other")])
    write(traces / "d.jsonl.zst", [exchange("e", route="other")], closed=False)
    await ingester.catch_up()
    assert marked() == [f"c.jsonl.zst{CONSUMED}"], "b belongs to a run that goes on, d is open"
    state.end_run("run-1", "completed")
    await ingester.catch_up()
    assert len(marked()) == 1
    state.leave_out(runs={"run-1": "no reward"}, calls={})
    await ingester.catch_up()
    assert marked() == [f"{name}.jsonl.zst{CONSUMED}" for name in "abc"]
    with (traces / "d.jsonl.zst").open("ab") as file:
        file.write(end_mark(1))
    await ingester.catch_up()
    assert len(marked()) == 4
