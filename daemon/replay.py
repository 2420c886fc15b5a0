"""Rebuilds calls from the shards: the daemon's state says where each one lies."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from daemon import exchange
from sidecar.traces.reader import RecordReader
from sidecar.traces.record import Exchange, Record
from tokenization.calls import Call


def read_calls(
    traces: Path, rows: Sequence[Mapping[str, Any]]
) -> tuple[list[Call], dict[str, str]]:
    """Read the calls of call-table rows.

    Returns the calls and, for rows whose shard is gone, damaged or changed since, call id → reason.
    Rows without tokens give neither.
    """
    by_shard: dict[str, dict[tuple[int, int], set[str]]] = defaultdict(lambda: defaultdict(set))
    for row in rows:
        if row["token_source"] != "none":
            by_shard[row["shard"]][row["frame"], row["line"]].add(row["id"])
    calls: list[Call] = []
    missing: dict[str, str] = {}
    for shard, places in by_shard.items():
        reader = RecordReader(traces / shard)
        # In the order written: a record is often needed to make a later one whole.
        for place, ids in sorted(places.items()):
            try:
                entry = reader.at(*place)
                found = _calls(entry, ids)
                reason = f"shard {shard} was changed after it was read"
            except Exception as error:  # Whatever became of the file: its calls are missing.
                found = []
                reason = f"shard {shard} can't be read any more: {error}"
            calls += found
            missing |= {call: reason for call in ids - {call.id for call in found}}
    return calls, missing


def _calls(entry: Record, ids: set[str]) -> list[Call]:
    """The calls ``ids`` of a record; fewer when it is not the one that was ingested."""
    entries = exchange.read(entry) if isinstance(entry, Exchange) else []
    return [e.call for e in entries if e.call and e.id in ids]
