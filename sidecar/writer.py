"""The thread that writes records to shards, so that no disk ever holds up the proxy.

Durability, in one sentence: a record handed in is in the file (safe from the death of this process)
within milliseconds, and on the disk (safe from a power failure) within about a second.

Everything that has queued up when the thread gets to write becomes one frame (group commit). While
writing fails, records stay in memory up to the queue's bound and are written, in order, once it
works again; what comes on top is counted and reported by a ``RecordsLost`` record.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue

from sidecar.record import Record, RecordsLost, encode
from sidecar.shards import Shard, ShardEncoder

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_SYNC_SECONDS = 1.0
# A frame is decoded in one piece by readers: bounded, however much had piled up.
_FRAME_BYTES = 4 << 20

Done = Callable[[], None]
# A line, and what to call when it is in the file.
_Entry = tuple[bytes, Done | None]


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
    ) -> None:
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
        self._opened = 0.0
        self._sequence = 0
        self._unsynced_since: float | None = None

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

        An ``Exception`` of the encoder, on text that is not Unicode, is the caller's to ``lose``.
        ``done`` is called, in any thread, as soon as the record is in the file, or as it is known
        that this will take longer because writing fails. It must not raise.
        """
        line = encode(record)
        kept = not self._closed and self.queued_bytes < self._queue_bytes
        if kept:
            self._bytes_in += len(line)
            self._queue.put((line, done))
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
        while not (self._closing and not self._pending):
            self._collect()
            if self.failure is not None and time.monotonic() < self._retry_at and not self._closing:
                continue
            try:
                while self._pending:
                    self._write(self._next_batch())
                self._sync_if_due()
            except Exception as error:  # Whatever it is, this thread must go on.
                self._failed(error)
                if self._closing:
                    self._given_up = len(self._pending)
                    break
        if self._shard is not None:
            self._shard.close()

    def _add(self, record: Record) -> None:
        line = encode(record)
        self._bytes_out -= len(line)
        self._pending.append((line, None))

    def _collect(self) -> None:
        """Move what is queued to ``_pending``; wait until there is something to do."""
        timeout: float | None = None
        if self.failure is not None:
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
        line, done = entry
        if self.failure is not None and done is not None:
            done()
            done = None
        self._pending.append((line, done))

    def _next_batch(self) -> list[_Entry]:
        batch, size = [self._pending[0]], len(self._pending[0][0])
        for entry in list(self._pending)[1:]:
            size += len(entry[0])
            if size > _FRAME_BYTES:
                break
            batch.append(entry)
        return batch

    def _write(self, batch: list[_Entry]) -> None:
        if self._shard is not None and self._must_rotate(self._shard):
            self._leave_shard(self._shard)
        if self._shard is None:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._shard = Shard(self._directory, self._series, self._sequence)
            self._sequence += 1
            self._opened = time.monotonic()
        self._shard.append(self._encoder.frame([line for line, _ in batch]))
        if self._unsynced_since is None:
            self._unsynced_since = time.monotonic()
        self._succeeded(batch)

    def _must_rotate(self, shard: Shard) -> bool:
        return (
            shard.size >= self._rotate_bytes
            or time.monotonic() - self._opened >= self._rotate_seconds
            or shard.deleted()
        )

    def _leave_shard(self, shard: Shard) -> None:
        shard.sync()
        shard.close()
        self._shard = self._unsynced_since = None

    def _sync_if_due(self) -> None:
        since = self._unsynced_since
        if self._shard is None or since is None:
            return
        if self._closing or time.monotonic() - since >= _SYNC_SECONDS:
            self._shard.sync()
            self._unsynced_since = None

    def _succeeded(self, batch: list[_Entry]) -> None:
        for line, done in batch:
            self._pending.popleft()
            self._bytes_out += len(line)
            self.written += 1
            if done is not None:
                done()
        if self.failure is not None:
            _log.warning("trace shards can be written again: %s", self._directory)
            self.failure = None
        lost = self._refused - self._reported
        if lost:
            self._add(RecordsLost(time.time(), lost, self._loss_reason))
            self._reported += lost

    def _failed(self, error: Exception) -> None:
        self.errors += 1
        self._retry_at = time.monotonic() + _RETRY_SECONDS
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
            self._shard.abandon()
            self._shard = self._unsynced_since = None
        for _, done in self._pending:
            if done is not None:
                done()
        self._pending = deque((line, None) for line, _ in self._pending)
