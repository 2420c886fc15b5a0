"""Reads the records of trace shards, whole, also while they are written.

A record in a shard may leave out what it shares with an earlier one (``sidecar.traces.history``).
Reading forward, that record has just been read and its texts are at hand; else it is looked up
where the reference says, and so on until one that is written out.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sidecar.traces import record
from sidecar.traces.history import Place, Texts, Unresolved, expand
from sidecar.traces.record import Exchange, Record
from sidecar.traces.shards import Frame, read_frames

_CACHE_BYTES = 128 << 20


@dataclass(frozen=True)
class Located:
    """A record and where it lies in its shard.

    ``error`` says why ``record`` is missing; ``count`` how many records that concerns: one, or all
    of a damaged frame (at least one; its ``line`` is 0 then).
    """

    frame: int
    """Offset of its frame in bytes."""
    line: int
    """Number of its line in the frame, counted from 0."""
    record: Record | None
    error: str | None = None
    count: int = 1


class RecordReader:
    """Reads one shard; keep it to go on where the shard goes on. Not safe for several threads."""

    def __init__(self, shard: Path, cache_bytes: int = _CACHE_BYTES) -> None:
        """``cache_bytes``: bound on the texts kept in memory for the records to come."""
        self._shard = shard
        self._cache_bytes = cache_bytes
        self._bytes = 0
        self._known: OrderedDict[Place, Texts | Unresolved] = OrderedDict()
        self._frame: Frame | None = None

    def frames(self, offset: int = 0) -> Iterator[tuple[Frame, list[Located]]]:
        """Yield the whole frames from ``offset`` on, the start of a frame, with their records.

        Raises:
            OSError: the file can't be read.
        """
        for frame in read_frames(self._shard, offset):
            yield frame, self._read(frame)

    def at(self, frame: int, line: int) -> Record:
        """Return one record.

        Raises:
            OSError: the file can't be read.
            ValueError: there is no such record, or it is damaged.
        """
        found = self._lines(frame)
        if not 0 <= line < len(found):
            raise ValueError(f"there is no line {line} in the frame at {frame}")
        try:
            return self._whole(record.decode(found[line]), (frame, line))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(str(error)) from None

    def _read(self, frame: Frame) -> list[Located]:
        if frame.error is not None:
            return [Located(frame.offset, 0, None, frame.error, max(frame.count, 1))]
        self._frame = frame
        found = []
        for number, line in enumerate(frame.lines):
            place = frame.offset, number
            try:
                found.append(Located(*place, self._whole(record.decode(line), place)))
            except Exception as error:  # Not only a wrong shape: nesting too deep, for one.
                found.append(Located(*place, None, str(error) or repr(error)))
        return found

    def _whole(self, entry: Record, place: Place) -> Record:
        if not isinstance(entry, Exchange):
            return entry
        chain = [(place, entry)]
        # From the record back to one whose texts are known or written out, and forward again.
        while (repeats := chain[-1][1].repeats) is not None:
            base = repeats.frame, repeats.line
            if base in self._known:
                break
            if not base < chain[-1][0]:
                raise Unresolved("it refers to a later record")
            chain.append((base, self._base(base)))
        whole = entry
        for at, link in reversed(chain):
            whole = self._expand(link, at)
        return whole

    def _base(self, place: Place) -> Exchange:
        try:
            lines = self._lines(place[0])
            entry = record.decode(lines[place[1]]) if 0 <= place[1] < len(lines) else None
            if isinstance(entry, Exchange):
                return entry
            reason = "there is none"
        except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
            reason = str(error)
        failure = _unresolved(place, reason)
        self._keep(place, failure)
        raise failure

    def _expand(self, link: Exchange, place: Place) -> Exchange:
        repeats = link.repeats
        before: Texts | Unresolved = Texts(b"", ())
        if repeats is not None:
            base = repeats.frame, repeats.line
            before = self._known[base]
            # Few records share a base: it may go before the ends of other chains do.
            self._known.move_to_end(base, last=False)
        try:
            if isinstance(before, Unresolved):
                raise Unresolved(str(before))
            whole, texts = expand(link, before)
        except Unresolved as error:
            self._keep(place, Unresolved(str(error)))
            raise
        self._keep(place, texts)
        return whole

    def _keep(self, place: Place, texts: Texts | Unresolved) -> None:
        self._bytes += _size(texts) - _size(self._known.pop(place, None))
        self._known[place] = texts
        while self._bytes > self._cache_bytes and len(self._known) > 1:
            self._bytes -= _size(self._known.popitem(last=False)[1])

    def _lines(self, offset: int) -> list[bytes]:
        """Return the lines of the frame at ``offset``; ValueError if there is no sound one."""
        if self._frame is None or self._frame.offset != offset:
            frame = next(read_frames(self._shard, offset), None)
            if frame is None:
                raise ValueError("the shard is too short")
            if frame.error is not None:
                raise ValueError(frame.error)
            self._frame = frame
        return self._frame.lines


def read_records(shard: Path, offset: int = 0) -> Iterator[Located]:
    """Yield every record of a shard from the frame at ``offset`` on; faults come as values.

    Stops where the shard ends for now. To go on later without re-reading, keep a ``RecordReader``.

    Raises:
        OSError: the file can't be read.
    """
    for _, records in RecordReader(shard).frames(offset):
        yield from records


def _unresolved(place: Place, reason: str) -> Unresolved:
    return Unresolved(f"the record at {place[0]}, line {place[1]}, is needed: {reason}")


def _size(texts: Texts | Unresolved | None) -> int:
    # What an entry takes besides its texts matters when they are short.
    if texts is None:
        return 0
    return 200 + (texts.size if isinstance(texts, Texts) else 0)
