"""Old shards go, by age and by size, unless somebody still needs them."""

import logging
import os
from pathlib import Path

import pytest

from sidecar.traces.record import SidecarStarted
from sidecar.traces.retention import CONSUMED, Limits, ShardFile, choose, clean
from sidecar.traces.writer import Writer
from tests.sidecar.test_writer import numbered, put_and_wait

DAY = 86_400.0


def file(name: str, days_old: float, size: int = 10, consumed: bool = True) -> ShardFile:
    return ShardFile(name, size, 1e9 - days_old * DAY, consumed)


@pytest.mark.parametrize(
    ("limits", "delete", "stay"),
    [
        (Limits(), [], []),
        (Limits(days=7), ["a"], ["b"]),
        (Limits(days=2), ["a", "c"], ["b"]),
        (Limits(bytes=40), [], []),
        (Limits(bytes=39), ["a"], []),
        (Limits(bytes=30), ["a"], []),
        (Limits(bytes=25), ["a", "c"], ["b"]),
        (Limits(bytes=1), ["a", "c"], ["b", "d"]),
        (Limits(days=7, bytes=20), ["a", "c"], ["b"]),
    ],
)
def test_what_goes_and_what_stays(limits, delete, stay):
    files = [file("a", 9), file("b", 8, consumed=False), file("c", 3), file("d", 0, consumed=False)]
    assert choose(files, limits, 1e9) == (delete, stay)


def shard(folder: Path, name: str, days_old: float, *, consumed: bool) -> Path:
    path = folder / f"{name}.jsonl.zst"
    path.write_bytes(b"x" * 100)
    os.utime(path, (path.stat().st_mtime - days_old * DAY,) * 2)
    if consumed:
        path.with_name(path.name + CONSUMED).touch()
    return path


def test_a_folder_is_cleaned_and_the_user_is_told_what_stays(tmp_path, caplog):
    gone = shard(tmp_path, "a", 9, consumed=True)
    needed = shard(tmp_path, "b", 9, consumed=False)
    new = shard(tmp_path, "c", 0, consumed=True)
    orphan = tmp_path / f"x.jsonl.zst{CONSUMED}"
    orphan.touch()
    assert clean(tmp_path, Limits()) == [] and gone.exists()
    with caplog.at_level(logging.INFO):
        assert clean(tmp_path, Limits(days=7)) == [gone.name]
    assert sorted(tmp_path.iterdir()) == [needed, new, new.with_name(new.name + CONSUMED)]
    assert "1 shards" in caplog.text and "no daemon has consumed them yet" in caplog.text


def test_the_writer_cleans_at_its_start_and_at_rotation(tmp_path):
    first = shard(tmp_path, "20000101", 9, consumed=True)
    writer = Writer(
        tmp_path,
        "series",
        rotate_bytes=1,
        rotate_seconds=3600,
        queue_bytes=1 << 20,
        limits=Limits(days=7),
    )
    writer.start(lambda: SidecarStarted(at=0.0, sidecar="s", upstream="u", ridealong="0"))
    put_and_wait(writer, numbered(1))
    assert not first.exists()
    second = shard(tmp_path, "20000102", 9, consumed=True)
    put_and_wait(writer, numbered(2))
    writer.close(5)
    assert not second.exists()
    assert len(list(tmp_path.glob("series*"))) >= 2
