"""The thread that writes records to shards, so that no disk ever holds up the proxy.

Durability, in one sentence: a record handed in is in the file (safe from the death of this process)
within milliseconds, and on the disk (safe from a power failure) within about a second.

Everything queued when the thread gets to write becomes one frame (group commit). While writing
fails, records stay in memory up to the queue's bound and are written, in order, once it works
again; what comes on top is counted and reported by a ``RecordsLost`` record.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from sidecar.record import Record, RecordsLost, encode
from sidecar.shards import Shard, ShardEncoder

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_SYNC_SECONDS = 1.0
# A line, and what to call when it is in the file.
_Entry = tuple[bytes, Callable[[], None] | None]

# A frame is decoded in one piece by readers: bounded, however much had piled up.
_FRAME_BYTES = 4 << 20


class Writer:
    """Appends records to a series of shards. ``put`` and the attributes are safe for any thread."""

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
        self.lost = 0
        """Records dropped because they could not be written and the queue was full."""
        self.errors = 0
        """Failed attempts to write."""
        self.queued_bytes = 0
        self.failure: str | None = None
        """Why the last attempt to write failed; None while writing works."""

        self._directory = directory
        self._series = series
        self._rotate_bytes = rotate_bytes
        self._rotate_seconds = rotate_seconds
        self._queue_bytes = queue_bytes
        self._queue: deque[_Entry] = deque()
        self._unreported = 0
        self._loss_reason = ""
        self._closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

        # The writer thread's own.
        self._encoder = ShardEncoder()
        self._shard: Shard | None = None
        self._opened = 0.0
        self._sequence = 0
        self._unsynced_since: float | None = None

    def start(self, first: Callable[[], Record]) -> None:
        """Start the thread. It calls ``first`` for the series' first record, then takes records."""
        # A daemon thread: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._run, args=(first,), name="shard writer", daemon=True
        )
        self._thread.start()

    def put(self, record: Record, done: Callable[[], None] | None = None) -> bool:
        """Queue a record; False if it is lost because the queue is full.

        ``done`` is called, in any thread, as soon as the record is in the file, or as it is known
        that this will take longer because writing fails. It must not raise.
        """
        line = encode(record)
        with self._changed:
            kept = not self._closing and self.queued_bytes < self._queue_bytes
            if kept:
                self._append(line, None if self.failure else done)
                self._changed.notify_all()
            else:
                self.lost += 1
                self._unreported += 1
                self._loss_reason = self.failure or "the queue was full"
            waits = kept and self.failure is None
        if done is not None and not waits:
            done()
        return kept

    def close(self, timeout: float) -> None:
        """Write and sync what is queued, then end the thread; give up after ``timeout`` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
        with self._changed:
            if self._queue:
                self.lost += len(self._queue)
                _log.error("%d records could not be written: %s", len(self._queue), self.failure)

    def _append(self, line: bytes, done: Callable[[], None] | None = None) -> None:
        """Queue a line. ``_changed`` must be held."""
        self._queue.append((line, done))
        self.queued_bytes += len(line)

    def _run(self, first: Callable[[], Record]) -> None:
        line = encode(first())
        with self._changed:
            self._queue.appendleft((line, None))
            self.queued_bytes += len(line)
        while True:
            batch, last = self._next_batch()
            try:
                if batch:
                    self._write(batch)
                    self._succeeded(len(batch))
                self._sync_if_due(last)
            except Exception as error:  # Whatever it is, this thread must go on.
                self._failed(error)
                if last:
                    break
            else:
                if last and not batch:
                    break
        if self._shard is not None:
            self._shard.close()

    def _next_batch(self) -> tuple[list[bytes], bool]:
        """Wait for something to do; return the lines to write and whether we are closing."""
        with self._changed:
            if self.failure is not None:
                self._changed.wait_for(lambda: self._closing, _RETRY_SECONDS)
            else:
                timeout = None
                if self._unsynced_since is not None:
                    timeout = max(0.0, self._unsynced_since + _SYNC_SECONDS - time.monotonic())
                self._changed.wait_for(lambda: self._queue or self._closing, timeout)
            batch: list[bytes] = []
            size = 0
            for line, _ in self._queue:
                size += len(line)
                if batch and size > _FRAME_BYTES:
                    break
                batch.append(line)
            return batch, self._closing

    def _write(self, batch: list[bytes]) -> None:
        if self._shard is not None and self._must_rotate(self._shard):
            self._leave_shard(self._shard)
        if self._shard is None:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._shard = Shard(self._directory, self._series, self._sequence)
            self._sequence += 1
            self._opened = time.monotonic()
        self._shard.append(self._encoder.frame(batch))
        if self._unsynced_since is None:
            self._unsynced_since = time.monotonic()

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

    def _sync_if_due(self, closing: bool) -> None:
        since = self._unsynced_since
        if self._shard is None or since is None:
            return
        if closing or time.monotonic() - since >= _SYNC_SECONDS:
            self._shard.sync()
            self._unsynced_since = None

    def _succeeded(self, count: int) -> None:
        with self._changed:
            written = [self._queue.popleft() for _ in range(count)]
            self.queued_bytes -= sum(len(line) for line, _ in written)
            self.written += count
            if self.failure is not None:
                _log.warning("trace shards can be written again: %s", self._directory)
                self.failure = None
            if self._unreported:
                report = RecordsLost(time.time(), self._unreported, self._loss_reason)
                self._append(encode(report))
                self._unreported = 0
        for _, done in written:
            if done is not None:
                done()

    def _failed(self, error: Exception) -> None:
        if self._shard is not None:
            self._shard.abandon()
            self._shard = self._unsynced_since = None
        with self._changed:
            self.errors += 1
            if self.failure is None:
                _log.error(
                    "trace shards can't be written to %s: %s. Traffic goes on; until this is put "
                    "right records are kept in memory, and lost when the queue is full",
                    self._directory,
                    error,
                    exc_info=not isinstance(error, OSError),
                )
            self.failure = str(error)
            waiting = [done for _, done in self._queue if done is not None]
            self._queue = deque((line, None) for line, _ in self._queue)
        for done in waiting:
            done()
