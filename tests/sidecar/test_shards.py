import os
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sidecar.shards import Shard, ShardEncoder, is_torn, new_series, read_frames, torn_shards

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
        assert is_torn(tmp_path / "s") == (end > start)
    assert read(tmp_path / "s", whole) == LINES
    assert not is_torn(tmp_path / "s")


@given(st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_byte_is_detected_and_costs_no_frame_before_or_wrong_data(tmp_path, data):
    whole = bytearray(b"".join(ENCODED))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    found = read(tmp_path / "s", bytes(whole))
    hit = 0 if place < len(ENCODED[0]) else 1 if place < len(ENCODED[0]) + len(ENCODED[1]) else 2
    # Damage to the header alone loses nothing, damage to the data loses that frame and no other.
    in_header = place - sum(len(frame) for frame in ENCODED[:hit]) < 28
    expected = list(LINES) if in_header else [None if i == hit else x for i, x in enumerate(LINES)]
    assert found == expected


def test_damage_to_header_and_data_is_reported_and_ends_the_shard(tmp_path):
    whole = bytearray(b"".join(ENCODED))
    for place in (2, 30):
        whole[place] ^= 0xFF
    path = tmp_path / "s"
    path.write_bytes(whole)
    (frame,) = read_frames(path)
    assert frame.error is not None and "damaged" in frame.error
    assert frame.next_offset == len(whole)


def test_a_wrong_line_count_is_reported(tmp_path):
    data = zstandard.ZstdCompressor(write_checksum=True).compress(b"{}\n{}\n")
    header = b"".join(
        n.to_bytes(4, "little") for n in (0x184D2A50, 20, len(data), 3, 1, zlib.crc32(data))
    )
    assert read(tmp_path / "s", header + zlib.crc32(header).to_bytes(4, "little") + data) == [None]


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
    shard.close()


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


def test_torn_shards_are_the_last_of_their_series_without_a_writer(tmp_path):
    for name, data in {
        "20260101T000000.000Z-1-00000": ENCODED[0],
        "20260101T000000.000Z-1-00001": ENCODED[0] + ENCODED[1][:-1],
        "20260102T000000.000Z-2-00000": ENCODED[0],
    }.items():
        (tmp_path / f"{name}.jsonl.zst").write_bytes(data)
    mine = new_series()
    writing = Shard(tmp_path, "20260103T000000.000Z-3", 0)
    writing.append(ENCODED[0][:-1])
    assert torn_shards(tmp_path, mine) == ["20260101T000000.000Z-1-00001.jsonl.zst"]
    writing.close()
    assert len(torn_shards(tmp_path, mine)) == 2


def test_an_odd_file_does_not_keep_the_sidecar_from_starting(tmp_path: Path) -> None:
    (tmp_path / "a-1.jsonl.zst").symlink_to(tmp_path / "b-1.jsonl.zst")
    (tmp_path / "b-1.jsonl.zst").symlink_to(tmp_path / "a-1.jsonl.zst")
    assert torn_shards(tmp_path, "mine") == []
