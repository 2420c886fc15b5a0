import os
import shutil
import subprocess
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sidecar.traces.shards import (
    Shard,
    ShardEncoder,
    _header,
    end_mark,
    is_closed,
    read_frames,
    read_tail,
)

FRAMES = [
    [b'{"n":1}\n', b'{"n":2}\n'],
    [b'{"text":"' + bytes(range(97, 123)) * 9 + b'"}\n'],
    [b"{}\n"],
]
ENCODED = [ShardEncoder().frame(lines) for lines in FRAMES]
LINES = [[line[:-1] for line in frame] for frame in FRAMES]


def read(path: Path, data: bytes) -> list[list[bytes] | None]:
    """Return the lines of every whole frame, None for a damaged one."""
    path.write_bytes(data)
    return [None if frame.error else frame.lines for frame in read_frames(path)]


@given(
    st.lists(st.lists(st.text().map(lambda t: t.replace("\n", " ").encode() + b"\n"), min_size=1))
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read(tmp_path, frames):
    encoder = ShardEncoder()
    found = read(tmp_path / "s", b"".join(encoder.frame(lines) for lines in frames))
    assert found == [[line[:-1] for line in lines] for lines in frames]


def test_reading_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "s"
    path.write_bytes(ENCODED[0])
    (first,) = read_frames(path)
    assert list(read_frames(path, first.next_offset)) == []
    path.write_bytes(ENCODED[0] + ENCODED[1])
    (second,) = read_frames(path, first.next_offset)
    assert (second.offset, second.lines) == (first.next_offset, LINES[1])


def test_a_tail_cut_at_any_byte_hides_no_earlier_record(tmp_path):
    whole = b"".join(ENCODED)
    start = len(whole) - len(ENCODED[-1])
    for end in range(start, len(whole)):
        assert read(tmp_path / "s", whole[:end]) == LINES[:2]
        tail = read_tail(tmp_path / "s")
        assert (tail.whole, tail.torn, tail.closed) == (start, end > start, False)
    assert read(tmp_path / "s", whole) == LINES
    assert not read_tail(tmp_path / "s").torn


def test_an_end_mark_cut_at_any_byte_leaves_the_shard_open(tmp_path):
    whole = b"".join(ENCODED)
    mark = end_mark(4)
    path = tmp_path / "s"
    for size in range(len(mark)):
        assert read(path, whole + mark[:size]) == LINES
        assert not is_closed(path) and not read_tail(path).closed
    assert read(path, whole + mark) == [*LINES, []]
    assert is_closed(path) and read_tail(path).closed
    assert [frame.end for frame in read_frames(path)] == [False, False, False, True]


@given(st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_byte_is_detected_and_costs_no_frame_before_or_wrong_data(tmp_path, data):
    whole = bytearray(b"".join(ENCODED))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    found = read(tmp_path / "s", bytes(whole))
    hit = 0 if place < len(ENCODED[0]) else 1 if place < len(ENCODED[0]) + len(ENCODED[1]) else 2
    # Damage to the header alone loses nothing, damage to the data loses that frame and no other.
    in_header = place - sum(len(frame) for frame in ENCODED[:hit]) < 40
    expected = list(LINES) if in_header else [None if i == hit else x for i, x in enumerate(LINES)]
    assert found == expected


def test_damage_to_header_and_data_costs_only_that_frame(tmp_path):
    whole = bytearray(b"".join(ENCODED))
    for place in (2, 42):
        whole[place] ^= 0xFF
    path = tmp_path / "s"
    path.write_bytes(whole)
    first, *rest = read_frames(path)
    assert first.error is not None and "damaged" in first.error
    assert [frame.lines for frame in rest] == LINES[1:]
    path.write_bytes(whole[: len(ENCODED[0])])
    (only,) = read_frames(path)
    assert only.error is not None and only.next_offset == len(ENCODED[0])


def test_a_hole_of_zeros_costs_only_what_it_covers(tmp_path):
    """As a power failure can leave it: the file has its size, a part of it never came to disk."""
    whole = bytearray(b"".join(ENCODED))
    start, end = len(ENCODED[0]) - 10, len(ENCODED[0]) + len(ENCODED[1])
    whole[start:end] = bytes(end - start)
    assert read(tmp_path / "s", bytes(whole)) == [None, None, LINES[2]]


def test_a_wrong_line_count_is_reported(tmp_path):
    data = zstandard.ZstdCompressor(write_checksum=True).compress(b"{}\n{}\n")
    assert read(tmp_path / "s", _header(0, 3, 0, data) + data) == [None]


@pytest.mark.skipif(shutil.which("zstdcat") is None, reason="needs the zstd command")
def test_zstdcat_reads_a_shard(tmp_path):
    (tmp_path / "s.zst").write_bytes(b"".join(ENCODED))
    text = subprocess.run(["zstdcat", tmp_path / "s.zst"], check=True, capture_output=True).stdout
    assert text == b"".join(b"".join(frame) for frame in FRAMES)


def test_python_zstandard_streams_a_shard_as_text():
    reader = zstandard.ZstdDecompressor().stream_reader(b"".join(ENCODED), read_across_frames=True)
    assert reader.read() == b"".join(b"".join(frame) for frame in FRAMES)


def test_a_shard_is_private_and_has_one_owner(tmp_path):
    shard = Shard(tmp_path, "s", 0)
    assert os.stat(shard.path).st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        Shard(tmp_path, "s", 0)
    shard.append(ENCODED[0])
    assert [frame.lines for frame in read_frames(shard.path)] == LINES[:1]
    assert not is_closed(shard.path)
    shard.close()
    assert is_closed(shard.path)


def test_an_abandoned_shard_keeps_its_whole_frames(tmp_path):
    shard = Shard(tmp_path, "s", 0)
    shard.append(ENCODED[0])
    with shard.path.open("ab") as file:
        file.write(ENCODED[1][:10])
    shard.abandon()
    assert shard.path.read_bytes() == ENCODED[0]
    empty = Shard(tmp_path, "s", 1)
    empty.abandon()
    assert not empty.path.exists()
