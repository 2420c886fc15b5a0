"""Rebuilds calls from the shards: the daemon's state says where each one lies."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from daemon import exchange
from sidecar import record
from sidecar.record import Exchange
from sidecar.shards import Frame, read_frames
from tokenization.calls import Call


def read_calls(
    traces: Path, rows: Sequence[Mapping[str, Any]]
) -> tuple[list[Call], dict[str, str]]:
    """Read the calls of call-table rows, each frame once.

    Returns the calls and, for rows whose shard is gone, damaged or changed since, call id → reason.
    Rows without tokens give neither.
    """
    by_frame: dict[tuple[str, int], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for row in rows:
        if row["token_source"] != "none":
            by_frame[row["shard"], row["frame"]][row["line"]].add(row["id"])
    calls: list[Call] = []
    missing: dict[str, str] = {}
    for (shard, offset), lines in by_frame.items():
        try:
            frame = next(read_frames(traces / shard, offset))
            if frame.error is not None:
                raise OSError(frame.error)
        except Exception as error:  # Whatever became of the file: its calls are missing.
            reason = f"shard {shard} can't be read any more: {error or 'it is too short'}"
            missing |= {call: reason for ids in lines.values() for call in ids}
            continue
        for number, ids in lines.items():
            found = _read_line(frame, number, ids)
            calls += found
            reason = f"shard {shard} was changed after it was read"
            missing |= {call: reason for call in ids - {call.id for call in found}}
    return calls, missing


def _read_line(frame: Frame, number: int, ids: set[str]) -> list[Call]:
    """The calls ``ids`` of a frame's line; fewer when it is not the line that was ingested."""
    try:
        entry = record.decode(frame.lines[number])
        entries = exchange.read(entry) if isinstance(entry, Exchange) else []
    except Exception:
        return []
    return [e.call for e in entries if e.call and e.id in ids]
