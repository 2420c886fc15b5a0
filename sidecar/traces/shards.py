"""The trace shard: a file of JSON lines that survives crashes and that ``zstdcat`` reads.

A shard is a sequence of *frames*. Each is written by one call and made of two parts:

1. a header: a zstd skippable frame (RFC 8878, section 3.1.2) of 40 bytes, little-endian::

       u32  magic       0x184D2A50
       u32  size        32, the number of payload bytes that follow
       u64  first       number of the first line, counted from 0 through a series of shards
       u32  length      bytes of the data frame that follows
       u32  lines       lines in it
       u32  waiting     records that the writer had taken and that were still to follow
       u32  format      2
       u32  data crc    CRC-32 of the data frame
       u32  header crc  CRC-32 of the 36 bytes before

2. the data frame: one zstd frame, with content size and content checksum, of whole lines.

zstd decoders skip the first part. A reader knows from it where the frame ends, so it can step over
a damaged frame, tell a frame that is still being written, and never takes a magic number inside
compressed data for a frame. A shard that was closed ends in a header alone, of length 0: the end
mark. ``first`` and ``waiting`` tell how many records a crash has cost, for
``sidecar.traces.recovery``.

Writing is append-only. A crash can only leave an incomplete frame at the end of its own shard,
because every sidecar starts a new one: ``<UTC start>-<pid>-<sequence>.jsonl.zst``, created with
O_EXCL and mode 0600, locked (``flock``) while it has a writer. Names sort by time. A line may refer
to earlier lines of its own shard (``sidecar.traces.history``) and to no other shard's.
"""

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import zstandard

SUFFIX = ".jsonl.zst"

_MAGIC = 0x184D2A50
_FORMAT = 2
_HEADER = struct.Struct("<2IQ6I")
_MAGIC_BYTES = struct.pack("<I", _MAGIC)
_PAYLOAD_BYTES = _HEADER.size - 8
# Level 3 compresses a model call about as well as level 9 and takes under a millisecond for one of
# 100 KB; from level 10 on the writer thread would compete with the proxy for the interpreter.
_LEVEL = 3
_MAX_TEXT_BYTES = 2**30
"""Decompressed size beyond which a frame counts as damaged: it would take the reader's memory."""


@dataclass(frozen=True)
class Frame:
    """One frame of a shard, at bytes ``offset`` to ``next_offset``.

    ``error`` says why the lines of a damaged frame are missing; ``lines`` is then empty.
    """

    offset: int
    next_offset: int
    lines: list[bytes] = field(default_factory=list)
    """Without their newlines."""
    error: str | None = None
    count: int = 0
    """Lines according to the header; 0 if it is damaged."""
    end: bool = False
    """The end mark: the shard was closed and nothing follows."""


class ShardEncoder:
    """Turns lines into frames. Not safe for use by several threads."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(
            level=_LEVEL, write_checksum=True, write_content_size=True
        )

    def frame(self, lines: Sequence[bytes], first: int = 0, waiting: int = 0) -> bytes:
        """Encode ``lines``, each ending in its only newline, as one frame.

        ``first`` is the number of the first line in the series, ``waiting`` how many records are
        still to follow.
        """
        data = self._compressor.compress(b"".join(lines))
        return _header(first, len(lines), waiting, data) + data


def end_mark(first: int) -> bytes:
    """Return what ends a shard that is closed; ``first`` is the number the next line would have."""
    return _header(first, 0, 0, b"")


@dataclass(frozen=True)
class Tail:
    """How a shard ends, from its headers alone."""

    whole: int
    """Bytes of its whole frames."""
    torn: bool
    """An incomplete frame follows."""
    closed: bool
    """The last frame is the end mark."""
    first: int
    """Number of the shard's first line."""
    next: int
    """Number that the line after the last whole frame has."""
    taken: int
    """The same for the records that the writer had taken by then."""


def read_frames(path: Path, offset: int = 0) -> Iterator[Frame]:
    """Yield the whole frames of a shard from ``offset`` on, which must be the start of a frame.

    Stops before an incomplete frame at the end of the file: it is being written, or a crash tore
    it. Call again with the last ``next_offset`` to go on. A damaged frame is yielded with ``error``
    set, so that nothing is skipped in silence.

    Raises:
        OSError: the file can't be read.
    """
    with path.open("rb") as file:
        while (frame := _read_frame(file, offset)) is not None:
            yield frame
            if frame.end:
                return
            offset = frame.next_offset


def read_tail(path: Path) -> Tail:
    """Follow a shard to its end. Reads only headers, and data where a header is damaged.

    Raises:
        OSError: the file can't be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        offset = following = taken = 0
        start: int | None = None
        closed = False
        while offset < size and not closed:
            raw = _read_at(file, offset, _HEADER.size)
            header = _parse(raw)
            if header is None and len(raw) == _HEADER.size:
                offset = _read_without_header(file, offset).next_offset
                continue
            if header is not None:
                start = header.first if start is None else start
                taken = max(taken, header.first + header.lines + header.waiting)
            if header is None or offset + _HEADER.size + header.length > size:
                break
            offset += _HEADER.size + header.length
            following = header.first + header.lines
            closed = header.length == 0
    torn = offset < size and not closed
    return Tail(offset, torn, closed, start or 0, following, max(taken, following))


def is_closed(path: Path) -> bool:
    """Say whether a shard ends in its end mark. Reads only that.

    Raises:
        OSError: the file can't be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = _parse(_read_at(file, max(size - _HEADER.size, 0), _HEADER.size))
    return header is not None and header.length == 0


class Shard:
    """The shard this process writes. Raises ``OSError`` where the disk does."""

    def __init__(self, directory: Path, series: str, sequence: int) -> None:
        """Create ``<series>-<sequence>.jsonl.zst``; ``directory`` must exist."""
        self.path = directory / f"{series}-{sequence:05d}{SUFFIX}"
        self.size = 0
        self.synced = 0
        """Bytes that would survive a power failure."""
        self._sync_failed = False
        self._fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _sync_directory(directory)
        except OSError:
            self.abandon()
            raise

    def append(self, frame: bytes) -> None:
        """Write one frame at the end; after an error the shard takes no more frames."""
        view, written = memoryview(frame), 0
        while written < len(frame):
            written += os.pwrite(self._fd, view[written:], self.size + written)
        self.size += written

    def sync(self) -> None:
        """Wait until the frames written so far would survive a power failure."""
        try:
            os.fdatasync(self._fd)
        except OSError:
            self._sync_failed = True
            raise
        self.synced = self.size

    def deleted(self) -> bool:
        """Say whether somebody removed the file: what is written now would be lost with it."""
        return os.fstat(self._fd).st_nlink == 0

    def abandon(self) -> bool:
        """After a failed write or sync: cut off what was written of a frame, sync, and close.

        Returns whether the whole frames would survive a power failure. After a failed sync they
        need not, whatever a later one says: the kernel reports an error once and drops the pages.
        """
        try:
            os.ftruncate(self._fd, self.size)
            if self.size == 0:
                self.path.unlink()
            elif self.synced < self.size and not self._sync_failed:
                self.sync()
        except OSError:
            pass  # The torn tail stays; readers stop before it.
        finally:
            os.close(self._fd)
        return self.synced == self.size

    def close(self, next_number: int = 0) -> None:
        """Write the end mark and release the lock and the file, which has been synced.

        ``next_number`` is the number in the series that the next line has, in another shard.
        """
        try:
            self.append(end_mark(next_number))
            self.sync()
        except OSError:
            pass  # Without its mark a shard is as good; the next sidecar will close it.
        finally:
            os.close(self._fd)


def new_series(now: datetime | None = None) -> str:
    """Return the name prefix of the shards of one sidecar: UTC start time and process id."""
    start = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%S.%f")[:-3]
    return f"{start}Z-{os.getpid()}"


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True)
class _Header:
    first: int
    length: int
    lines: int
    waiting: int
    crc: int


def _header(first: int, lines: int, waiting: int, data: bytes) -> bytes:
    crc = zlib.crc32(data)
    # A backlog beyond 32 bits does not fit into any queue.
    fields = (_MAGIC, _PAYLOAD_BYTES, first, len(data), lines, waiting, _FORMAT, crc)
    head = struct.pack("<2IQ5I", *fields)
    return head + struct.pack("<I", zlib.crc32(head))


def _parse(raw: bytes) -> _Header | None:
    """Return a header, None if it is damaged or incomplete."""
    if len(raw) < _HEADER.size:
        return None
    magic, size, first, length, lines, waiting, version, data_crc, crc = _HEADER.unpack(raw)
    intact = zlib.crc32(raw[:-4]) == crc
    known = (magic, size, version) == (_MAGIC, _PAYLOAD_BYTES, _FORMAT)
    return _Header(first, length, lines, waiting, data_crc) if intact and known else None


def _read_frame(file: BinaryIO, offset: int) -> Frame | None:
    raw = _read_at(file, offset, _HEADER.size)
    if len(raw) < _HEADER.size:
        return None
    header = _parse(raw)
    if header is None:
        return _read_without_header(file, offset)
    start = offset + _HEADER.size
    data = _read_at(file, start, header.length)
    end = start + header.length
    if len(data) < header.length:
        return None
    if not data:
        return Frame(offset, end, end=True)
    try:
        return Frame(offset, end, _decode(data, header.crc, header.lines), count=header.lines)
    except ValueError as error:
        return Frame(offset, end, error=str(error), count=header.lines)


def _decode(data: bytes, crc: int, count: int) -> list[bytes]:
    """Return the lines of a data frame; ValueError if it is damaged."""
    if zlib.crc32(data) != crc:
        raise ValueError("the data does not match its checksum")
    try:
        size = zstandard.frame_content_size(data)
        if size > _MAX_TEXT_BYTES:
            raise ValueError(f"the data claims a size of {size} bytes")
        lines = _split(zstandard.ZstdDecompressor().decompress(data))
    except zstandard.ZstdError as error:
        raise ValueError(f"the data can't be decompressed: {error}") from None
    if len(lines) != count:
        raise ValueError(f"{len(lines)} lines instead of {count}")
    return lines


def _read_without_header(file: BinaryIO, offset: int) -> Frame:
    """Read the data frame behind a damaged header: decoding it shows where it ends."""
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    end = offset + _HEADER.size
    file.seek(end)
    text = bytearray()
    try:
        while not decompressor.eof:
            # Small: a byte of input can become 32 KiB of output.
            chunk = file.read(1 << 12)
            if not chunk:
                raise zstandard.ZstdError("the file ends before it")
            text += decompressor.decompress(chunk)
            if len(text) > _MAX_TEXT_BYTES:
                raise zstandard.ZstdError(f"the data has more than {_MAX_TEXT_BYTES} bytes")
            end += len(chunk)
    except zstandard.ZstdError as error:
        reason = f"header and data are damaged: {error}"
        return Frame(offset, _next_header(file, offset + 1), error=reason)
    lines = _split(bytes(text))
    return Frame(offset, end - len(decompressor.unused_data), lines, count=len(lines))


def _next_header(file: BinaryIO, offset: int) -> int:
    """Return where the next intact header begins, or the file ends.

    Compressed data may hold the magic number, but not by chance the header's checksum as well.
    """
    size = os.fstat(file.fileno()).st_size
    while offset < size:
        window = _read_at(file, offset, 1 << 20)
        at = window.find(_MAGIC_BYTES)
        while at >= 0:
            if _parse(_read_at(file, offset + at, _HEADER.size)) is not None:
                return offset + at
            at = window.find(_MAGIC_BYTES, at + 1)
        offset += max(len(window) - len(_MAGIC_BYTES) + 1, 1)
    return size


def _read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)


def _split(text: bytes) -> list[bytes]:
    return text.removesuffix(b"\n").split(b"\n")
