"""Reads new frames of the shards into the daemon's state, each frame exactly once."""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from daemon import exchange, runs
from daemon.state import CallRow, Fault, State
from daemon.tail import list_shards
from sidecar import record
from sidecar.record import Exchange, RecordsLost, SidecarStarted
from sidecar.shards import Frame, read_frames
from tokenization.calls import version_spans

logger = logging.getLogger(__name__)

MAX_LOST = 2**31
UNSTORABLE = (sqlite3.IntegrityError, sqlite3.DataError, OverflowError, UnicodeError)


class Ingester:
    """Brings the state up to date with a folder of shards.

    ``caught_up`` is the time (Unix seconds) at which the last complete pass over the folder began:
    everything written before it has been read.
    """

    def __init__(self, traces: Path, state: State) -> None:
        self._traces = traces
        self._state = state
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
        return count

    async def _read_shard(self, name: str, offset: int) -> int:
        frames = read_frames(self._traces / name, offset)
        count = 0
        while True:
            try:
                read = await asyncio.to_thread(_read_next, frames)
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

    def _note_unreadable(self, name: str, offset: int, why: str) -> None:
        if self._state.note_fault(name, offset, Fault("unreadable shard", why)):
            logger.error("shard %s can't be read at %d: %s", name, offset, why)

    def _note_truncated(self, name: str, size: int, offset: int) -> None:
        """A shard only grows; a shorter one was tampered with. What was read of it stays."""
        detail = f"{size} bytes long, {offset} had been read"
        logger.error("shard %s was truncated: %s", name, detail)
        self._state.commit_frame(name, size, size, [], [Fault("truncated shard", detail)])


def _read_next(frames: Iterator[Frame]) -> tuple[Frame, list[CallRow], list[Fault]] | None:
    frame = next(frames, None)
    return None if frame is None else (frame, *read_frame(frame))


def read_frame(frame: Frame) -> tuple[list[CallRow], list[Fault]]:
    """Turn a frame's lines into call rows; what can't be read becomes a fault, never an error."""
    if frame.error is not None:
        return [], [Fault("corrupt frame", frame.error)]
    rows: list[CallRow] = []
    faults: list[Fault] = []
    for number, line in enumerate(frame.lines):
        try:
            entry = record.decode(line)
        except Exception as error:  # Not only a wrong shape: nesting too deep, for one.
            faults.append(Fault("unreadable record", f"line {number}: {error}"))
            continue
        match entry:
            case Exchange():
                rows += _rows(entry, number, faults)
            case RecordsLost() if not 0 <= entry.count < MAX_LOST:
                faults.append(Fault("unreadable record", f"line {number}: count {entry.count}"))
            case RecordsLost():
                faults.append(Fault("records lost", entry.reason, entry.count))
            case SidecarStarted():
                faults += [Fault("torn shard", name) for name in entry.torn]
    return rows, faults


def _rows(call: Exchange, line: int, faults: list[Fault]) -> Sequence[CallRow]:
    """The call rows of one exchange; none for traffic that is not a model call."""
    if call.route == "other":
        return ()
    try:
        entries = exchange.read(call)
    except Exception as error:  # One strange exchange must not stop all others from being read.
        logger.exception("exchange %s can't be read", call.id)
        faults.append(Fault("unreadable exchange", f"{call.id}: {error!r}"))
        entries = [exchange.unreadable(call, error)]
    rows = []
    for entry in entries:
        tokens = entry.call
        rows.append(
            CallRow(
                id=entry.id,
                exchange=call.id,
                run_key=runs.run_key(call),
                agent=runs.agent_id(call),
                route=call.route,
                outcome=call.outcome,
                started=call.started,
                ended=call.ended,
                check=entry.check,
                failures=[(f.name, f.detail) for f in entry.failures],
                left_out=entry.left_out,
                token_source=tokens.token_source if tokens else "none",
                prompt_tokens=len(tokens.prompt_ids) if tokens else 0,
                output_tokens=len(tokens.output_ids) if tokens else 0,
                versions=version_spans(tokens.versions) if tokens else [],
                line=line,
            )
        )
    return rows
