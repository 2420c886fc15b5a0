import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from sidecar.traces.reader import read_records
from sidecar.traces.record import RecordsLost, SidecarStarted
from sidecar.traces.shards import Shard, read_frames, read_tail
from sidecar.traces.writer import Writer
from tests.sidecar.running import records

STARTED = SidecarStarted(at=0.0, sidecar="s", upstream="u", ridealong="0")


def numbered(number: int, size: int = 0) -> SidecarStarted:
    return SidecarStarted(at=float(number), sidecar="x" * size, upstream="u", ridealong="0")


def make(directory: Path, **options: float) -> Writer:
    sizes = {"rotate_bytes": 1 << 20, "rotate_seconds": 3600, "queue_bytes": 1 << 20} | options
    writer = Writer(directory, "series", **sizes)  # type: ignore[arg-type]
    writer.start(lambda: STARTED)
    return writer


def put_and_wait(writer: Writer, record: SidecarStarted) -> None:
    done = threading.Event()
    assert writer.put(record, done.set)
    assert done.wait(5)


def eventually(condition, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class FakeBrokenDisk:
    """Makes every append fail while ``broken``: a real disk can't be made to fail at will."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken = False
        self.partial = False
        append = Shard.append

        def fail(shard: Shard, frame: bytes) -> None:
            if not self.broken:
                return append(shard, frame)
            if self.partial:
                append(shard, frame[:7])
                shard.size -= 7
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(Shard, "append", fail)


def test_a_record_is_in_the_file_within_milliseconds_and_in_order(tmp_path):
    writer = make(tmp_path / "new" / "folder")
    put_and_wait(writer, numbered(1))
    assert records(tmp_path / "new" / "folder") == [STARTED, numbered(1)]
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o700
    for number in range(2, 50):
        writer.put(numbered(number))
    writer.close(5)
    assert records(tmp_path / "new" / "folder")[1:] == [numbered(n) for n in range(1, 50)]
    assert (writer.written, writer.lost, writer.queued_bytes) == (50, 0, 0)


def test_what_queues_up_becomes_one_frame(tmp_path, monkeypatch):
    disk = FakeBrokenDisk(monkeypatch)
    disk.broken = True
    writer = make(tmp_path)
    eventually(lambda: writer.failure)
    for number in range(20):
        writer.put(numbered(number))
    disk.broken = False
    writer.close(5)
    (shard,) = tmp_path.iterdir()
    assert [len(frame.lines) for frame in read_frames(shard)] == [21, 0]


@pytest.mark.parametrize("partial", [False, True])
def test_records_outlive_a_broken_disk_and_losses_are_reported(tmp_path, monkeypatch, partial):
    disk = FakeBrokenDisk(monkeypatch)
    disk.partial = partial
    writer = make(tmp_path, queue_bytes=10_000)
    put_and_wait(writer, numbered(0))
    disk.broken = True
    kept = [n for n in range(1, 20) if writer.put(numbered(n, size=1000))]
    assert kept == list(range(1, len(kept) + 1)) and 7 <= len(kept) <= 9
    eventually(lambda: writer.failure and "Input/output" in writer.failure)
    assert (writer.lost, writer.errors > 0) == (19 - len(kept), True)
    told: list[int] = []
    assert not writer.put(numbered(20), lambda: told.append(20))
    assert told == [20], "nobody waits for a disk known to be broken"

    disk.broken = False
    eventually(lambda: writer.failure is None)
    assert writer.put(numbered(21))
    writer.close(5)
    found = records(tmp_path)
    assert [r.at for r in found if isinstance(r, SidecarStarted)] == [0, 0, *kept, 21]
    (report,) = [r for r in found if isinstance(r, RecordsLost)]
    assert (report.count, report.reason) == (20 - len(kept), "[Errno 5] Input/output error")


class FakeFailingSync:
    """Makes syncs fail while ``broken``: a real disk can't be made to fail at will."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broken = True
        self.fail_next = False
        """Fail once, then work."""
        self.good = 0
        """Syncs that did not fail."""
        fdatasync = os.fdatasync

        def fail(fd: int) -> None:
            once, self.fail_next = self.fail_next, False
            if self.broken or once:
                raise OSError(5, "Input/output error")
            fdatasync(fd)
            self.good += 1

        monkeypatch.setattr(os, "fdatasync", fail)


def test_after_a_failed_sync_the_records_since_the_last_good_one_are_written_again(
    tmp_path, monkeypatch, caplog
):
    disk = FakeFailingSync(monkeypatch)
    disk.broken = False
    writer = make(tmp_path)
    put_and_wait(writer, numbered(1))
    eventually(lambda: disk.good and writer._unsynced == [])
    disk.fail_next = True
    put_and_wait(writer, numbered(2))
    eventually(lambda: writer.errors == 1)
    put_and_wait(writer, numbered(3))
    eventually(lambda: writer.failure is None)
    writer.close(5)
    assert "can't be written" in caplog.text and "Input/output" in caplog.text
    first, second = sorted(tmp_path.iterdir())
    assert [located.record for located in read_records(first)] == [
        STARTED,
        numbered(1),
        numbered(2),
    ]
    assert [located.record for located in read_records(second)] == [numbered(2), numbered(3)]
    assert (writer.written, writer.lost, writer.queued_bytes) == (4, 0, 0)
    assert (read_tail(first).next, read_tail(second).first, read_tail(second).next) == (3, 2, 4)


def test_a_disk_that_never_syncs_does_not_fill_up_with_copies(tmp_path, monkeypatch):
    monkeypatch.setattr("sidecar.traces.writer._RETRY_SECONDS", 0.02)
    monkeypatch.setattr("sidecar.traces.writer._SYNC_SECONDS", 0.02)
    disk = FakeFailingSync(monkeypatch)
    writer = make(tmp_path)
    put_and_wait(writer, numbered(1))
    eventually(lambda: writer.errors >= 4)
    assert len(list(tmp_path.iterdir())) <= 3
    disk.broken = False
    eventually(lambda: writer.failure is None)
    writer.close(5)
    assert records(tmp_path) == [STARTED, numbered(1)], "the copies go when one is safe"


def test_who_waits_is_told_when_writing_fails(tmp_path, monkeypatch):
    disk = FakeBrokenDisk(monkeypatch)
    writer = make(tmp_path)
    put_and_wait(writer, numbered(1))
    disk.broken = True
    put_and_wait(writer, numbered(2))
    assert writer.failure
    disk.broken = False
    writer.close(5)
    assert len(records(tmp_path)) == 3


def test_rotation_by_size_and_by_age(tmp_path):
    writer = make(tmp_path / "size", rotate_bytes=100)
    for number in range(4):
        put_and_wait(writer, numbered(number))
    writer.close(5)
    assert len(list((tmp_path / "size").iterdir())) > 2
    assert len(records(tmp_path / "size")) == 5

    writer = make(tmp_path / "age", rotate_seconds=0.1)
    put_and_wait(writer, numbered(1))
    time.sleep(0.15)
    put_and_wait(writer, numbered(2))
    writer.close(5)
    assert len(list((tmp_path / "age").iterdir())) == 2


def test_a_deleted_shard_is_replaced(tmp_path):
    writer = make(tmp_path)
    put_and_wait(writer, numbered(1))
    for shard in tmp_path.iterdir():
        shard.unlink()
    put_and_wait(writer, numbered(2))
    writer.close(5)
    assert records(tmp_path) == [numbered(2)]


def test_closing_gives_up_on_a_broken_disk(tmp_path, monkeypatch):
    FakeBrokenDisk(monkeypatch).broken = True
    writer = make(tmp_path)
    writer.put(numbered(1))
    started = time.monotonic()
    writer.close(5)
    assert time.monotonic() - started < 3
    assert writer.lost == 2


def test_a_record_that_can_not_be_encoded_is_reported_as_lost(tmp_path):
    writer = make(tmp_path)
    put_and_wait(writer, SidecarStarted(at=1, sidecar="\udcff", upstream="", ridealong=""))
    writer.lose("a record could not be made")
    put_and_wait(writer, numbered(1))
    writer.close(5)
    assert (writer.lost, writer.written) == (2, 4)
    lost = [record for record in records(tmp_path) if isinstance(record, RecordsLost)]
    assert [record.count for record in lost] == [1, 1]
    assert lost[0].reason == "a record could not be encoded: UnicodeEncodeError"


class FakeSlowDisk:
    """Holds every append up for a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        append = Shard.append

        def slow(shard: Shard, frame: bytes) -> None:
            time.sleep(seconds)
            append(shard, frame)

        monkeypatch.setattr(Shard, "append", slow)


def test_a_slow_disk_holds_nobody_up_and_what_it_can_not_take_is_counted(tmp_path, monkeypatch):
    FakeSlowDisk(monkeypatch, 0.2)
    writer = make(tmp_path, queue_bytes=20_000)
    started = time.monotonic()
    kept = [n for n in range(1, 201) if writer.put(numbered(n))]
    assert time.monotonic() - started < 0.2, "no record waits for the disk"
    assert kept == list(range(1, len(kept) + 1)), "the newest are dropped"
    assert writer.queued_bytes < 20_000 + 300 and writer.lost == 200 - len(kept) > 0
    eventually(lambda: not writer.queued_bytes)
    writer.close(5)
    found = records(tmp_path)
    assert [r.at for r in found if isinstance(r, SidecarStarted)] == [0, *kept]
    assert sum(r.count for r in found if isinstance(r, RecordsLost)) == 200 - len(kept)


def test_a_frame_tells_how_many_records_are_still_to_follow(tmp_path, monkeypatch):
    monkeypatch.setattr("sidecar.traces.writer._FRAME_BYTES", 1)
    FakeSlowDisk(monkeypatch, 0.05)
    writer = make(tmp_path)
    for number in range(1, 5):
        writer.put(numbered(number))
    eventually(lambda: writer.written >= 2)
    (shard,) = tmp_path.iterdir()
    # The last frame's header knows of the records that were waiting when it was made.
    assert read_tail(shard).taken == 5
    writer.close(5)
    assert (read_tail(shard).next, read_tail(shard).closed) == (5, True)


def test_a_record_is_synced_within_about_a_second(tmp_path, monkeypatch):
    synced = threading.Event()
    monkeypatch.setattr(Shard, "sync", lambda _: synced.set())
    writer = make(tmp_path)
    put_and_wait(writer, numbered(1))
    assert synced.wait(1.5)
    writer.close(5)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def noise(number: int) -> SidecarStarted:
    """A record of 32 KB that compresses to half of it."""
    return SidecarStarted(at=number, sidecar=os.urandom(16_000).hex(), upstream="", ridealong="")


def test_a_full_disk(small_disk):
    traces = small_disk / "traces"
    writer = make(traces, queue_bytes=200_000)
    try:
        (small_disk / "ballast").write_bytes(bytes(200_000))
        for number in range(20):
            writer.put(noise(number))
        eventually(lambda: writer.failure and "No space left" in writer.failure)
        assert writer.lost > 0
        (small_disk / "ballast").unlink()
        eventually(lambda: writer.failure is None and not writer.queued_bytes)
    finally:
        writer.close(5)
    found = records(traces)
    assert len([r for r in found if isinstance(r, SidecarStarted)]) == 21 - writer.lost
    assert sum(r.count for r in found if isinstance(r, RecordsLost)) == writer.lost
