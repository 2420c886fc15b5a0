"""The thread that writes records to shards, so that no disk ever holds up the proxy.

Durability, in one sentence: a record handed in is in the file (safe from the death of this process)
within milliseconds, and on the disk (safe from a power failure) within about a second.

Everything that has queued up when the thread gets to write becomes one frame (group commit). While
writing fails, or can't keep up, records stay in memory up to the queue's bound and are written, in
order, once it works again; the newest are dropped then, counted, and reported by a ``RecordsLost``
record.

When a sync fails, the kernel may have dropped what it was asked to keep. The records since the last
good sync, which are still in memory, are then written again, to a new shard; readers tell a record
that comes twice by its id.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue

from sidecar.traces.history import History
from sidecar.traces.record import Record, RecordsLost, weight
from sidecar.traces.retention import Limits, clean
from sidecar.traces.shards import Shard, ShardEncoder

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
# After failed syncs everything since the last good one is written again, so ever more rarely.
_MAX_RETRY_SECONDS = 32.0
_SYNC_SECONDS = 1.0
# A frame is decoded in one piece by readers: bounded, however much had piled up.
_FRAME_BYTES = 4 << 20
# What has been written stays in memory until it is synced.
_UNSYNCED_BYTES = 32 << 20

Done = Callable[[], None]


@dataclass
class _Entry:
    record: Record
    size: int
    """Weight of the record, in bytes."""
    done: Done | None = None
    """To be called when it is in the file."""

    def settle(self) -> None:
        """Nobody has to wait for it any longer."""
        if self.done is not None:
            self.done()
            self.done = None


class Writer:
    """Appends records to a series of shards. ``put`` is for one thread, counts are for any."""

    def __init__(
        self,
        directory: Path,
        series: str,
        *,
        rotate_bytes: int,
        rotate_seconds: float,
        queue_bytes: int,
        limits: Limits = Limits(),  # noqa: B008  (immutable)
    ) -> None:
        """``limits``: what older shards may stay in the folder."""
        self.written = 0
        """Records in the shards."""
        self.errors = 0
        """Failed attempts to write."""
        self.failure: str | None = None
        """Why the last attempt to write failed; None while writing works."""

        self._directory = directory
        self._series = series
        self._rotate_bytes = rotate_bytes
        self._rotate_seconds = rotate_seconds
        self._queue_bytes = queue_bytes
        self._limits = limits
        self._encoder = ShardEncoder()

        # Between the threads: a queue (None: close), and counts that one side only writes.
        self._queue: SimpleQueue[_Entry | None] = SimpleQueue()
        self._bytes_in = 0
        self._bytes_out = 0
        self._refused = 0
        self._loss_reason = ""
        self._closed = False
        self._thread: threading.Thread | None = None

        # The writer thread's own.
        self._pending: deque[_Entry] = deque()
        self._closing = False
        self._reported = 0
        self._given_up = 0
        self._retry_at = 0.0
        self._shard: Shard | None = None
        self._history = History()
        self._opened = 0.0
        self._sequence = 0
        self._number = 0
        """Of the next line, counted through all shards."""
        self._unsynced: list[_Entry] = []
        self._unsynced_bytes = 0
        self._unsynced_since: float | None = None
        self._superseded: list[Path] = []
        """Shards whose records, never synced, are being written again."""
        self._failed_syncs = 0
        """In a row."""

    @property
    def lost(self) -> int:
        """Records that could not be made, or be written while the queue was full."""
        return self._refused + self._given_up

    @property
    def queued_bytes(self) -> int:
        """Bytes of records that wait to be written."""
        return self._bytes_in - self._bytes_out

    def start(self, first: Callable[[], Record]) -> None:
        """Start the thread. It calls ``first`` for the series' first record, then takes records."""
        # A daemon thread: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._run, args=(first,), name="shard writer", daemon=True
        )
        self._thread.start()

    def put(self, record: Record, done: Done | None = None) -> bool:
        """Queue a record; False if it is lost because the queue is full.

        ``done`` is called, in any thread, as soon as the record is in the file, or as it is known
        that this will take longer because writing fails, or can't be because its text is not
        Unicode. It must not raise.
        """
        size = weight(record)
        kept = not self._closed and self.queued_bytes < self._queue_bytes
        if kept:
            self._bytes_in += size
            self._queue.put(_Entry(record, size, done))
        else:
            self.lose(self.failure or "the queue was full")
            if done is not None:
                done()
        return kept

    def lose(self, reason: str) -> None:
        """Count a record that is lost before it could be queued; for the thread that puts."""
        self._loss_reason = reason
        self._refused += 1

    def close(self, timeout: float) -> None:
        """Write and sync what is queued, then end the thread; give up after ``timeout`` seconds."""
        self._closed = True
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout)
        if self.queued_bytes:
            _log.error(
                "records of %d bytes could not be written: %s", self.queued_bytes, self.failure
            )

    def _run(self, first: Callable[[], Record]) -> None:
        self._add(first())
        self._clean()
        while not (self._closing and not self._pending):
            self._collect()
            if self._waits_for_retry() and time.monotonic() < self._retry_at and not self._closing:
                continue
            try:
                while self._pending:
                    self._write(self._next_batch())
                self._sync_if_due()
            except Exception as error:  # Whatever it is, this thread must go on.
                self._failed(error)
                if self._closing:
                    self._given_up += len(self._pending)
                    break
        if self._shard is not None:
            self._shard.close(self._number)

    def _waits_for_retry(self) -> bool:
        return self.failure is not None and self._shard is None

    def _add(self, record: Record) -> None:
        size = weight(record)
        self._bytes_out -= size
        self._pending.append(_Entry(record, size))

    def _collect(self) -> None:
        """Move what is queued to ``_pending``; wait until there is something to do."""
        timeout: float | None = None
        if self._waits_for_retry():
            timeout = self._retry_at - time.monotonic()
        elif self._pending:
            timeout = 0
        elif self._unsynced_since is not None:
            timeout = self._unsynced_since + _SYNC_SECONDS - time.monotonic()
        try:
            if self._closing or (timeout is not None and timeout <= 0):
                entry = self._queue.get_nowait()
            else:
                entry = self._queue.get(timeout=timeout)
            while True:
                self._take(entry)
                entry = self._queue.get_nowait()
        except Empty:
            pass

    def _take(self, entry: _Entry | None) -> None:
        if entry is None:
            self._closing = True
            return
        if self.failure is not None:
            entry.settle()
        self._pending.append(entry)

    def _next_batch(self) -> list[_Entry]:
        batch, size = [self._pending[0]], self._pending[0].size
        for entry in islice(self._pending, 1, None):
            size += entry.size
            if size > _FRAME_BYTES:
                break
            batch.append(entry)
        return batch

    def _write(self, batch: list[_Entry]) -> None:
        if self._shard is not None and self._must_rotate(self._shard):
            self._leave_shard(self._shard)
        if self._shard is None:
            self._open_shard()
        assert self._shard is not None
        lines, written = self._encode(batch, self._shard.size)
        if lines:
            waiting = len(self._pending) - len(batch) + self._queue.qsize()
            self._shard.append(self._encoder.frame(lines, self._number, waiting))
            self._number += len(lines)
            if self._unsynced_since is None:
                self._unsynced_since = time.monotonic()
        self._succeeded(batch, written)
        if self._unsynced_bytes >= _UNSYNCED_BYTES:
            self._sync(self._shard)

    def _encode(self, batch: list[_Entry], frame: int) -> tuple[list[bytes], list[_Entry]]:
        """Return the lines of a frame, and the entries that they are."""
        lines: list[bytes] = []
        written = []
        for entry in batch:
            try:
                lines.append(self._history.encode(entry.record, (frame, len(lines))))
            except Exception as error:
                # The message of an encoding error quotes what it could not encode.
                _log.error("a record can't be encoded and is lost: %s", type(error).__name__)
                self._given_up += 1
                self._loss_reason = f"a record could not be encoded: {type(error).__name__}"
            else:
                written.append(entry)
        return lines, written

    def _open_shard(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._shard = Shard(self._directory, self._series, self._sequence)
        self._history = History()
        self._sequence += 1
        self._opened = time.monotonic()

    def _must_rotate(self, shard: Shard) -> bool:
        return (
            shard.size >= self._rotate_bytes
            or time.monotonic() - self._opened >= self._rotate_seconds
            or shard.deleted()
        )

    def _leave_shard(self, shard: Shard) -> None:
        self._sync(shard)
        self._shard = None
        shard.close(self._number)
        self._clean()

    def _sync_if_due(self) -> None:
        since = self._unsynced_since
        if self._shard is None or since is None:
            return
        if self._closing or time.monotonic() - since >= _SYNC_SECONDS:
            self._sync(self._shard)

    def _sync(self, shard: Shard) -> None:
        shard.sync()
        self._unsynced, self._unsynced_bytes, self._unsynced_since = [], 0, None
        self._failed_syncs = 0
        self._drop_superseded()

    def _clean(self) -> None:
        try:
            clean(self._directory, self._limits)
        except OSError as error:
            _log.warning("old shards can't be deleted: %s", error)

    def _succeeded(self, batch: list[_Entry], written: list[_Entry]) -> None:
        for entry in batch:
            self._pending.popleft()
            self._bytes_out += entry.size
            entry.settle()
        self.written += len(written)
        self._unsynced += written
        self._unsynced_bytes += sum(entry.size for entry in written)
        if self.failure is not None and not self._superseded:
            self._recovered()
        lost = self.lost - self._reported
        if lost:
            self._add(RecordsLost(time.time(), lost, self._loss_reason))
            self._reported += lost

    def _recovered(self) -> None:
        _log.warning("trace shards can be written again: %s", self._directory)
        self.failure = None

    def _drop_superseded(self) -> None:
        """Delete the shards whose records have all been written, and synced, once more."""
        for path in self._superseded:
            _delete(path)
        self._superseded = []
        if self.failure is not None:
            self._recovered()

    def _failed(self, error: Exception) -> None:
        self.errors += 1
        if self.failure is None:
            _log.error(
                "trace shards can't be written to %s: %s. Traffic goes on; until this is put right "
                "records are kept in memory, and lost when the queue is full",
                self._directory,
                error,
                exc_info=not isinstance(error, OSError),
            )
        self.failure = str(error)
        if self._shard is not None:
            self._abandon(self._shard)
        pause = min(_RETRY_SECONDS * 2**self._failed_syncs, _MAX_RETRY_SECONDS)
        self._retry_at = time.monotonic() + pause
        for entry in self._pending:
            entry.settle()

    def _abandon(self, shard: Shard) -> None:
        if not shard.abandon():
            self._failed_syncs += 1
            self._write_again(self._unsynced)
            if shard.synced == 0:
                self._supersede(shard.path)
        self._shard = None
        self._unsynced, self._unsynced_bytes, self._unsynced_since = [], 0, None

    def _write_again(self, entries: list[_Entry]) -> None:
        self._pending.extendleft(reversed(entries))
        self._bytes_out -= sum(entry.size for entry in entries)
        self.written -= len(entries)
        self._number -= len(entries)

    def _supersede(self, path: Path) -> None:
        self._superseded.append(path)
        # All but the first are retries. One of them is enough: none was synced.
        for retry in self._superseded[1:-1]:
            _delete(retry)
        self._superseded[1:-1] = []


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("shard %s can't be deleted, its records come twice: %s", path, error)
