"""Reads new frames of the shards into the daemon's state, each frame exactly once."""

import asyncio
import logging
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from daemon import exchange, origin, redaction, runs, sidecalls
from daemon.consumed import Marker
from daemon.origin import Origin
from daemon.redaction import Redactor
from daemon.state import CallRow, Fault, State
from daemon.tail import list_shards
from sidecar.traces.reader import Located, RecordReader
from sidecar.traces.record import Exchange, RecordsLost, SidecarStarted
from sidecar.traces.shards import Frame
from tokenization.calls import version_spans

logger = logging.getLogger(__name__)

MAX_LOST = 2**31
MAX_READERS = 4
"""Shards that are followed at a time without reading earlier records again."""
_NO_REDACTION = Redactor()
MARK_SECONDS = 10.0
"""How often consumed shards are looked for."""
UNSTORABLE = (sqlite3.IntegrityError, sqlite3.DataError, OverflowError, UnicodeError)


class Ingester:
    """Brings the state up to date with a folder of shards.

    ``caught_up`` is the time (Unix seconds) at which the last complete pass over the folder began:
    everything written before it has been read.
    """

    def __init__(
        self,
        traces: Path,
        state: State,
        train_side_calls: Collection[str] = (),
        redactor: Redactor = _NO_REDACTION,
    ) -> None:
        self._traces = traces
        self._state = state
        self._train_side_calls = frozenset(train_side_calls)
        self._redactor = redactor
        self._readers: OrderedDict[str, RecordReader] = OrderedDict()
        self._marker = Marker(traces, state)
        self._mark_at = 0.0
        self.caught_up = 0.0

    async def catch_up(self) -> int:
        """Read all that is there now; returns the number of frames read."""
        began = time.time()
        listing = await asyncio.to_thread(list_shards, self._traces)
        for name, why in listing.unreadable.items():
            self._note_unreadable(name, 0, why)
        sizes = listing.sizes
        offsets = self._state.offsets()
        count = 0
        for name, size in sizes.items():
            if size > offsets.get(name, 0):
                count += await self._read_shard(name, offsets.get(name, 0))
            elif size < offsets.get(name, 0):
                self._note_truncated(name, size, offsets[name])
        gone = [name for name in offsets if name not in sizes and name not in listing.unreadable]
        if gone:
            self._state.mark_gone(gone)
        self.caught_up = began
        if began >= self._mark_at:
            self._marker.mark(sizes)
            self._mark_at = began + MARK_SECONDS
        return count

    async def _read_shard(self, name: str, offset: int) -> int:
        frames = self._reader(name).frames(offset)
        count = 0
        while True:
            try:
                read = await asyncio.to_thread(
                    _read_next, frames, self._train_side_calls, self._redactor
                )
            except Exception as error:  # One odd file must not stop all others from being read.
                self._note_unreadable(name, offset, str(error) or repr(error))
                return count
            if read is None:
                return count
            frame, calls, faults = read
            for fault in faults:
                logger.error("shard %s at %d: %s: %s", name, frame.offset, fault.kind, fault.detail)
            try:
                self._state.commit_frame(name, frame.offset, frame.next_offset, calls, faults)
            except UNSTORABLE as error:
                # A value that no table takes would be met again at every restart.
                logger.exception("shard %s at %d can't be stored", name, frame.offset)
                lost = [Fault("unusable frame", repr(error), max(len(frame.lines), 1))]
                self._state.commit_frame(name, frame.offset, frame.next_offset, [], lost)
            offset = frame.next_offset
            count += 1

    def _reader(self, name: str) -> RecordReader:
        reader = self._readers.pop(name, None) or RecordReader(self._traces / name)
        self._readers[name] = reader
        if len(self._readers) > MAX_READERS:
            self._readers.popitem(last=False)
        return reader

    def _note_unreadable(self, name: str, offset: int, why: str) -> None:
        if self._state.note_fault(name, offset, Fault("unreadable shard", why)):
            logger.error("shard %s can't be read at %d: %s", name, offset, why)

    def _note_truncated(self, name: str, size: int, offset: int) -> None:
        """A shard only grows; a shorter one was tampered with. What was read of it stays."""
        detail = f"{size} bytes long, {offset} had been read"
        logger.error("shard %s was truncated: %s", name, detail)
        self._state.commit_frame(name, size, size, [], [Fault("truncated shard", detail)])


def _read_next(
    frames: Iterator[tuple[Frame, list[Located]]],
    train_side_calls: Collection[str],
    redactor: Redactor,
) -> tuple[Frame, list[CallRow], list[Fault]] | None:
    found = next(frames, None)
    return None if found is None else (found[0], *read_frame(*found, train_side_calls, redactor))


def read_frame(
    frame: Frame,
    records: Sequence[Located],
    train_side_calls: Collection[str] = (),
    redactor: Redactor = _NO_REDACTION,
) -> tuple[list[CallRow], list[Fault]]:
    """Turn a frame's records into call rows; what can't be read is a fault, never an error.

    Side calls are left out but for the kinds in ``train_side_calls``, and so are calls in whose
    texts ``redactor`` finds something.
    """
    if frame.error is not None:
        return [], [Fault("corrupt frame", frame.error, max(frame.count, 1))]
    rows: list[CallRow] = []
    faults: list[Fault] = []
    for located in records:
        number = located.line
        if located.error is not None:
            faults.append(Fault("unreadable record", f"line {number}: {located.error}"))
            continue
        match located.record:
            case Exchange() as entry:
                rows += _rows(entry, number, faults, train_side_calls, redactor)
            case RecordsLost() as entry if not 0 <= entry.count < MAX_LOST:
                faults.append(Fault("unreadable record", f"line {number}: count {entry.count}"))
            case RecordsLost() as entry:
                faults.append(Fault("records lost", entry.reason, entry.count))
            case SidecarStarted() as entry:
                faults += [Fault("torn shard", name) for name in entry.torn]
                if 0 < entry.lost < MAX_LOST:
                    faults.append(Fault("records lost", "a sidecar was killed", entry.lost))
    return rows, faults


def _rows(
    call: Exchange,
    line: int,
    faults: list[Fault],
    train_side_calls: Collection[str],
    redactor: Redactor,
) -> Sequence[CallRow]:
    """The call rows of one exchange; none for traffic that is not about a model call."""
    if call.route == "other" and sidecalls.kind(call.request.path, ()) is None:
        return ()
    found: Origin | None = None
    secret = False
    try:
        said = origin.said(call)
        found = origin.read(call, said)
        entries = exchange.read(call, said)
        secret = redactor.finds(said or [call.request.body, call.response and call.response.body])
    except Exception as error:  # One strange exchange must not stop all others from being read.
        logger.exception("exchange %s can't be read", call.id)
        faults.append(Fault("unreadable exchange", f"{call.id}: {error!r}"))
        entries = [exchange.unreadable(call, error)]
    rows = []
    side = found.side if found and found.side not in train_side_calls else None
    for entry in entries:
        tokens = entry.call
        rows.append(
            CallRow(
                id=entry.id,
                exchange=call.id,
                run_key=runs.run_key(call, found.caller if found else None),
                agent=runs.agent_id(call),
                route=call.route,
                outcome=call.outcome,
                started=call.started,
                ended=call.ended,
                check=entry.check,
                failures=[(f.name, f.detail) for f in entry.failures],
                left_out=(f"side call: {side}" if side else None)
                or entry.left_out
                or (redaction.LEFT_OUT if secret else None),
                token_source=tokens.token_source if tokens else "none",
                prompt_tokens=len(tokens.prompt_ids) if tokens else 0,
                output_tokens=len(tokens.output_ids) if tokens else 0,
                versions=version_spans(tokens.versions) if tokens else [],
                line=line,
                origin=found,
            )
        )
    return rows
