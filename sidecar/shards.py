"""The trace shard: a file of JSON lines that survives crashes and that ``zstdcat`` reads.

A shard is a sequence of *frames*. Each is written by one call and made of two parts:

1. a header: a zstd skippable frame (RFC 8878, section 3.1.2) of 28 bytes, little-endian::

       u32  magic       0x184D2A50
       u32  size        20, the number of payload bytes that follow
       u32  length      bytes of the data frame that follows
       u32  lines       lines in it
       u32  format      1
       u32  data crc    CRC-32 of the data frame
       u32  header crc  CRC-32 of the 24 bytes before

2. the data frame: one zstd frame, with content size and content checksum, of whole lines.

zstd decoders skip the first part. A reader knows from it where the frame ends, so it can step over
a damaged frame, tell a frame that is still being written, and never searches for a magic number
(which may occur inside compressed data).

Writing is append-only. A crash can only leave an incomplete frame at the end of its own shard,
because every sidecar starts a new one: ``<UTC start>-<pid>-<sequence>.jsonl.zst``, created with
O_EXCL and mode 0600, locked (``flock``) while it has a writer. Names sort by time.
"""

import contextlib
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
_FORMAT = 1
_HEADER = struct.Struct("<7I")
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


class ShardEncoder:
    """Turns lines into frames. Not safe for use by several threads."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(
            level=_LEVEL, write_checksum=True, write_content_size=True
        )

    def frame(self, lines: Sequence[bytes]) -> bytes:
        """Encode ``lines``, each ending in its only newline, as one frame."""
        data = self._compressor.compress(b"".join(lines))
        head = struct.pack(
            "<6I", _MAGIC, _PAYLOAD_BYTES, len(data), len(lines), _FORMAT, zlib.crc32(data)
        )
        return head + struct.pack("<I", zlib.crc32(head)) + data


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
            offset = frame.next_offset


def is_torn(path: Path) -> bool:
    """Say whether a shard ends in an incomplete frame or can't be followed. Reads only headers.

    Raises:
        OSError: the file can't be read.
    """
    with path.open("rb") as file:
        size, offset = os.fstat(file.fileno()).st_size, 0
        while offset < size:
            length = _data_length(_read_at(file, offset, _HEADER.size))
            if length is None:
                return True
            offset += _HEADER.size + length
    return offset > size


class Shard:
    """The shard this process writes. Raises ``OSError`` where the disk does."""

    def __init__(self, directory: Path, series: str, sequence: int) -> None:
        """Create ``<series>-<sequence>.jsonl.zst``; ``directory`` must exist."""
        self.path = directory / f"{series}-{sequence:05d}{SUFFIX}"
        self.size = 0
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
        os.fdatasync(self._fd)

    def deleted(self) -> bool:
        """Say whether somebody removed the file: what is written now would be lost with it."""
        return os.fstat(self._fd).st_nlink == 0

    def abandon(self) -> None:
        """After a failed write: cut off what was written of the frame, and close."""
        try:
            os.ftruncate(self._fd, self.size)
            if self.size == 0:
                self.path.unlink()
        except OSError:
            pass  # The torn tail stays; readers stop before it.
        finally:
            os.close(self._fd)

    def close(self) -> None:
        """Release the lock and the file."""
        os.close(self._fd)


def new_series(now: datetime | None = None) -> str:
    """Return the name prefix of the shards of one sidecar: UTC start time and process id."""
    start = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%S.%f")[:-3]
    return f"{start}Z-{os.getpid()}"


def torn_shards(directory: Path, series: str) -> list[str]:
    """Name the shards in ``directory`` that earlier sidecars left with an incomplete frame.

    Only the last shard of a series can be torn, and only if nobody is writing it any more.
    ``series`` is the caller's own and left out.
    """
    last: dict[str, Path] = {}
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        last[path.name.rpartition("-")[0]] = path
    last.pop(series, None)
    torn = []
    for path in last.values():
        # A file that can't be opened is the daemon's to report; the sidecar has to start.
        with contextlib.suppress(OSError):
            if not _has_writer(path) and is_torn(path):
                torn.append(path.name)
    return torn


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _has_writer(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _read_frame(file: BinaryIO, offset: int) -> Frame | None:
    header = _read_at(file, offset, _HEADER.size)
    if len(header) < _HEADER.size:
        return None
    start = offset + _HEADER.size
    length = _data_length(header)
    if length is None:
        return _read_without_header(file, offset, start)
    data = _read_at(file, start, length)
    if len(data) < length:
        return None
    _, _, _, count, _, crc, _ = _HEADER.unpack(header)
    try:
        return Frame(offset, start + length, _decode(data, crc, count))
    except ValueError as error:
        return Frame(offset, start + length, error=str(error))


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


def _read_without_header(file: BinaryIO, offset: int, start: int) -> Frame:
    """Read the data frame behind a damaged header: decoding it shows where it ends."""
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    file.seek(start)
    text, end = bytearray(), start
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
        size = os.fstat(file.fileno()).st_size
        reason = f"header and data are damaged, nothing can be read from here on: {error}"
        return Frame(offset, size, error=reason)
    return Frame(offset, end - len(decompressor.unused_data), _split(bytes(text)))


def _data_length(header: bytes) -> int | None:
    """Return the length of the data frame, None if the header is damaged or incomplete."""
    if len(header) < _HEADER.size:
        return None
    magic, size, length, _, version, _, crc = _HEADER.unpack(header)
    intact = zlib.crc32(header[:-4]) == crc
    known = (magic, size, version) == (_MAGIC, _PAYLOAD_BYTES, _FORMAT)
    return length if intact and known else None


def _read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    return file.read(size)


def _split(text: bytes) -> list[bytes]:
    return text.removesuffix(b"\n").split(b"\n")
