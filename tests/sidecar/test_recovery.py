"""What killed sidecars left is counted once and closed, whoever starts next."""

import multiprocessing
from pathlib import Path

from sidecar.traces.record import SidecarStarted, encode
from sidecar.traces.recovery import Leftovers, close_leftovers
from sidecar.traces.shards import Shard, ShardEncoder, end_mark, is_closed, read_frames

LINE = encode(SidecarStarted(at=0.0, sidecar="s", upstream="u", ridealong="0"))
ENCODER = ShardEncoder()
OLD = "20260101T000000.000Z-1"


def shard(folder: Path, data: bytes, series: str = OLD, sequence: int = 0) -> Path:
    path = folder / f"{series}-{sequence:05d}.jsonl.zst"
    path.write_bytes(data)
    return path


def test_a_torn_tail_cut_at_any_byte_is_counted_once_and_hides_nothing(tmp_path):
    whole = ENCODER.frame([LINE] * 3, 0)
    last = ENCODER.frame([LINE] * 2, 3)
    for end in range(len(last) + 1):
        path = shard(tmp_path, whole + last[:end])
        left = close_leftovers(tmp_path, "mine")
        torn = 0 < end < len(last)
        assert left.unclosed == (path.name,)
        assert left.torn == ((path.name,) if torn else ())
        # The header tells how many records the frame had. A part of it tells nothing.
        assert left.lost == (2 if 40 <= end < len(last) else 0)
        assert is_closed(path)
        frames = list(read_frames(path))
        assert sum(len(frame.lines) for frame in frames) == (5 if end == len(last) else 3)
        assert frames[-1].end and not any(frame.error for frame in frames)
        assert close_leftovers(tmp_path, "mine") == Leftovers()


def test_records_that_were_waiting_are_lost(tmp_path):
    shard(tmp_path, ENCODER.frame([LINE], 0, 9) + ENCODER.frame([LINE] * 4, 1, 5))
    assert close_leftovers(tmp_path, "mine").lost == 5


def test_what_went_to_the_next_shard_is_not_lost(tmp_path):
    """A shard given up after a failed sync or write: its records went on in another."""
    shard(tmp_path, ENCODER.frame([LINE] * 4, 0, 6) + b"torn")
    shard(tmp_path, ENCODER.frame([LINE] * 8, 2, 0), sequence=1)
    left = close_leftovers(tmp_path, "mine")
    assert (len(left.unclosed), len(left.torn), left.lost) == (2, 1, 0)


def test_one_with_a_writer_and_ones_own_are_left_alone(tmp_path):
    mine = shard(tmp_path, ENCODER.frame([LINE]), "mine")
    writing = Shard(tmp_path, OLD, 0)
    writing.append(ENCODER.frame([LINE]))
    assert close_leftovers(tmp_path, "mine") == Leftovers()
    assert not is_closed(mine) and not is_closed(writing.path)
    writing.close(1)
    assert close_leftovers(tmp_path, "mine") == Leftovers()


def test_damage_in_the_middle_is_not_taken_for_the_end(tmp_path):
    whole = bytearray(ENCODER.frame([LINE]) + ENCODER.frame([LINE] * 2, 1))
    whole[3:60] = bytes(57)
    path = shard(tmp_path, bytes(whole))
    assert close_leftovers(tmp_path, "mine").torn == ()
    assert [len(frame.lines) for frame in read_frames(path)] == [0, 2, 0]
    assert is_closed(path)


def test_killed_between_the_end_mark_and_the_cut(tmp_path):
    frame = ENCODER.frame([LINE])
    path = shard(tmp_path, frame + end_mark(1) + b"rest of a torn frame, longer than a mark")
    assert close_leftovers(tmp_path, "mine") == Leftovers()
    assert path.read_bytes() == frame + end_mark(1)


def test_odd_files_do_not_keep_the_sidecar_from_starting(tmp_path: Path) -> None:
    (tmp_path / "a-1.jsonl.zst").symlink_to(tmp_path / "b-1.jsonl.zst")
    (tmp_path / "b-1.jsonl.zst").symlink_to(tmp_path / "a-1.jsonl.zst")
    (tmp_path / "c-1.jsonl.zst").mkdir()
    shard(tmp_path, b"nonsense", "d")
    shard(tmp_path, b"", "e")
    assert len(close_leftovers(tmp_path, "mine").unclosed) == 2


def _write(folder: Path, number: int, barrier: "multiprocessing.Barrier") -> None:
    from sidecar.traces.writer import Writer

    writer = Writer(
        folder, f"same-{number}", rotate_bytes=1 << 20, rotate_seconds=60, queue_bytes=1 << 20
    )

    def first() -> SidecarStarted:
        barrier.wait(20)
        left = close_leftovers(folder, f"same-{number}")
        return SidecarStarted(
            at=0.0, sidecar=str(number), upstream="u", ridealong="0", lost=left.lost
        )

    writer.start(first)
    for _ in range(50):
        writer.put(SidecarStarted(at=1.0, sidecar=str(number), upstream="u", ridealong="0"))
    barrier.wait(20)
    writer.close(20)


def test_two_sidecars_never_share_a_shard_and_count_a_third_ones_losses_once(tmp_path):
    from tests.sidecar.running import records

    shard(tmp_path, ENCODER.frame([LINE], 0, 7))
    processes = multiprocessing.get_context("fork")
    barrier = processes.Barrier(2)
    both = [processes.Process(target=_write, args=(tmp_path, n, barrier)) for n in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(30)
        assert process.exitcode == 0
    found = records(tmp_path)
    assert sum(record.lost for record in found) == 7
    for path in tmp_path.glob("same*"):
        writers = {
            record.sidecar for record in records_of(path) if isinstance(record, SidecarStarted)
        }
        assert len(writers) == 1
    assert len(found) == 1 + 2 * 51


def records_of(path: Path) -> list[object]:
    from sidecar.traces.reader import read_records

    return [located.record for located in read_records(path)]
