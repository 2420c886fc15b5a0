"""Records are whole again when they are read, in order or alone, also while a shard is written."""

from pathlib import Path

import pytest

from sidecar.traces.history import History
from sidecar.traces.reader import RecordReader, read_records
from sidecar.traces.record import SidecarStarted, decode, encode
from sidecar.traces.shards import ShardEncoder, end_mark, read_frames
from tests.sidecar.test_history import turn

TURNS = [turn(number, agent=agent) for number in range(6) for agent in "ab"]


def write(path: Path, per_frame: int = 1, *, closed: bool = True) -> list[tuple[int, int]]:
    """Write the turns as a sidecar does; return where each one lies."""
    history, encoder, shard, places = History(), ShardEncoder(), bytearray(), []
    for start in range(0, len(TURNS), per_frame):
        frame = [(len(shard), number) for number in range(len(TURNS[start : start + per_frame]))]
        lines = [
            history.encode(each, place)
            for each, place in zip(TURNS[start : start + per_frame], frame, strict=True)
        ]
        shard += encoder.frame(lines, start)
        places += frame
    path.write_bytes(shard + (end_mark(len(TURNS)) if closed else b""))
    return places


@pytest.mark.parametrize("per_frame", [1, 3, 12])
@pytest.mark.parametrize("cache", [0, 20_000, 1 << 20])
def test_records_are_read_whole_from_any_place_on(tmp_path, per_frame, cache):
    places = write(tmp_path / "s", per_frame)
    whole = [decode(line).repeats is None for f in read_frames(tmp_path / "s") for line in f.lines]
    assert whole.count(True) == 1, "the second agent has the same tools"
    assert [located.record for located in read_records(tmp_path / "s")] == TURNS
    for start in range(len(TURNS) // per_frame):
        offset = places[start * per_frame][0]
        reader = RecordReader(tmp_path / "s", cache)
        found = [located for _, records in reader.frames(offset) for located in records]
        assert [located.record for located in found] == TURNS[start * per_frame :]
        assert [(located.frame, located.line) for located in found] == places[start * per_frame :]


@pytest.mark.parametrize("order", [1, -1])
def test_one_record_is_read_wherever_it_lies(tmp_path, order):
    places = write(tmp_path / "s", 3)
    reader = RecordReader(tmp_path / "s")
    for place, expected in list(zip(places, TURNS, strict=True))[::order]:
        assert reader.at(*place) == expected
        assert RecordReader(tmp_path / "s").at(*place) == expected
    for frame, line in ((places[0][0], 3), (places[0][0], -1), (places[-1][0] + 10_000, 0)):
        with pytest.raises(ValueError):
            reader.at(frame, line)


def test_a_shard_is_followed_while_it_is_written(tmp_path):
    places = write(tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    reader, found, offset = RecordReader(tmp_path / "s"), [], 0
    for end in [*(place[0] + 7 for place in places), len(whole)]:
        (tmp_path / "s").write_bytes(whole[:end])
        for frame, records in reader.frames(offset):
            found += [located.record for located in records]
            offset = frame.next_offset
    assert found == TURNS and offset == len(whole)


def test_a_damaged_base_costs_its_dependents_and_nothing_else(tmp_path):
    path = tmp_path / "s"
    places = write(path)
    whole = bytearray(path.read_bytes())
    victim = 4  # a's third turn
    whole[places[victim][0] + 100] ^= 0xFF
    path.write_bytes(whole)
    found = list(read_records(path))
    lost = [n for n, located in enumerate(found) if located.record is None]
    assert lost == [4, 6, 8, 10]
    assert [located.record for located in found if located.record] == [
        each for n, each in enumerate(TURNS) if n not in lost
    ]
    assert {located.count for located in found} == {1}
    assert "is needed" in (found[6].error or "")
    for reader in (RecordReader(path), RecordReader(path, 0)):
        for number in (10, 8, 10):
            with pytest.raises(ValueError, match="is needed"):
                reader.at(*places[number])


def test_a_shard_is_complete_in_itself(tmp_path):
    """So that any other may be deleted."""
    from sidecar.traces.writer import Writer

    writer = Writer(tmp_path, "s", rotate_bytes=2_000, rotate_seconds=3600, queue_bytes=1 << 30)
    started = SidecarStarted(at=0.0, sidecar="s", upstream="u", ridealong="0")
    writer.start(lambda: started)
    for each in TURNS:
        writer.put(each)
        while writer.queued_bytes:
            pass
    writer.close(5)
    shards = sorted(tmp_path.iterdir())
    assert len(shards) > 3
    found = [located.record for shard in shards for located in read_records(shard)]
    assert found == [started, *TURNS]


def test_records_written_out_in_full_are_read_as_they_are(tmp_path):
    (tmp_path / "s").write_bytes(ShardEncoder().frame([encode(each) for each in TURNS]))
    assert [located.record for located in read_records(tmp_path / "s")] == TURNS


@pytest.mark.parametrize("base", [(0, 1), (0, 7), (0, -1), (9999, 0), (-5, 0), (0, 0)], ids=str)
def test_a_reference_to_nothing_is_a_fault(tmp_path, base):
    history = History()
    history.encode(TURNS[0], (0, 0))
    second = history.encode(TURNS[2], (0, 1)).replace(
        b'"repeats":{"frame":0,"line":0', b'"repeats":{"frame":%d,"line":%d' % base
    )
    other = encode(SidecarStarted(at=0.0, sidecar="s", upstream="u", ridealong="0"))
    (tmp_path / "s").write_bytes(ShardEncoder().frame([other, second, encode(TURNS[4])]))
    found = list(read_records(tmp_path / "s"))
    assert [located.record is None for located in found] == [False, True, False]
