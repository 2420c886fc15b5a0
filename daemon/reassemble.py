"""Reads recorded calls anew after the readers were corrected: traces are the truth, rows a view.

What a step has taken stays as it is: its batch was made from what was read then.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from daemon.ingest import read_frame
from daemon.ownership import DATABASE, owned
from daemon.redaction import Redactor
from daemon.state import CallRow, State
from daemon.tail import list_shards
from deploy.errors import UserError
from sidecar.traces.reader import RecordReader
from sidecar.traces.retention import CONSUMED

_TAKEN = ("planned", "trained")

_GROUP = """
SELECT id, id IN (SELECT run FROM step_runs) AS taken, state FROM runs
WHERE id = ? OR group_id = ?
"""


@dataclass
class Report:
    """``read``: calls read anew; ``changed``: those of them that are now read as something else,
    as (before, after) → count; ``taken``: calls that a step has, left alone; ``reopened``: runs
    that will be decided on again; ``missing``: shards that can't be read any more → why."""

    read: int = 0
    changed: Counter[tuple[str, str]] = field(default_factory=Counter)
    taken: int = 0
    reopened: int = 0
    missing: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        head = (
            f"{self.read} calls read anew, {self.changed.total()} of them changed, {self.taken} "
            f"left alone because a step has them, {self.reopened} runs to be decided on again"
        )
        changed = [f"  {n} {old} -> {new}" for (old, new), n in self.changed.most_common()]
        missing = [f"  {shard} can't be read: {why}" for shard, why in self.missing.items()]
        return "\n".join([head, *changed, *missing])


def reassemble(
    traces: Path,
    directory: Path,
    train_side_calls: Collection[str] = (),
    redactor: Redactor | None = None,
) -> Report:
    """Read all calls of the daemon's state in ``directory`` anew that no step has taken.

    Runs that were left out and now have a call that can be trained are decided on again, with
    their group. ``train_side_calls`` is the daemon's configuration key of that name, ``redactor``
    made of its key ``redact``.

    Raises:
        UserError: a daemon runs on the directory, or there is no state in it.
    """
    if not (directory / DATABASE).is_file():
        raise UserError(f"{directory} holds no daemon's state: name the daemon's directory")
    with owned(directory), closing(State(directory / DATABASE)) as state:
        redo = _Redo(traces, state, train_side_calls, redactor or Redactor())
        redo.shards()
        redo.reopen()
    return redo.report


class _Redo:
    def __init__(
        self, traces: Path, state: State, train_side_calls: Collection[str], redactor: Redactor
    ) -> None:
        self._traces = traces
        self._state = state
        self._train_side_calls = train_side_calls
        self._redactor = redactor
        self._trainable: dict[str, list[str]] = defaultdict(list)
        """Run that is left out → its calls that can be trained."""
        self._gained: dict[str, str | None] = {}
        """Run that is left out and has a call that could not be trained before → its group."""
        self.report = Report()

    def shards(self) -> None:
        found = list_shards(self._traces)
        known = self._state.rows("SELECT DISTINCT shard FROM calls ORDER BY shard")
        for shard in (row["shard"] for row in known):
            if shard not in found.sizes:
                self.report.missing[shard] = found.unreadable.get(shard, "it is gone")
        for shard, end in self._state.offsets().items():
            if shard in found.sizes:
                try:
                    self._shard(shard, end)
                except OSError as error:
                    self.report.missing[shard] = str(error)

    def _shard(self, shard: str, end: int) -> None:
        """Redo the frames before ``end``; the daemon has not read those after it yet."""
        for frame, records in RecordReader(self._traces / shard).frames():
            if frame.offset >= end:
                return
            rows, _ = read_frame(frame, records, self._train_side_calls, self._redactor)
            exchanges: dict[str, list[CallRow]] = defaultdict(list)
            for row in rows:
                exchanges[row.exchange].append(row)
            fresh: list[CallRow] = []
            for exchange, new in exchanges.items():
                fresh += self._exchange(exchange, new, (shard, frame.offset))
            if fresh:
                self._state.replace_calls(shard, frame.offset, fresh)

    def _exchange(
        self, exchange: str, new: Sequence[CallRow], place: tuple[str, int]
    ) -> Sequence[CallRow]:
        """Return the rows to put in the place of an exchange's old ones; none to leave it alone."""
        known = self._state.rows(
            "SELECT calls.*, runs.state, runs.group_id FROM calls JOIN runs ON runs.id = calls.run "
            "WHERE exchange = ?",
            exchange,
        )
        if any(row["status"] in _TAKEN for row in known):
            self.report.taken += len(known)
            return ()
        # A record that lies in two shards is redone where the state says that it lies.
        if any((row["shard"], row["frame"]) != place for row in known):
            return ()
        old = {row["id"]: row for row in known}
        return [self._compare(row, old.get(row.id), known) for row in new]

    def _compare(
        self, new: CallRow, old: Mapping[str, Any] | None, known: Sequence[Mapping[str, Any]]
    ) -> CallRow:
        self.report.read += 1
        before, after = _of_row(old), _of_call(new)
        if before != after:
            self.report.changed[_words(before), _words(after)] += 1
        if new.left_out is not None:
            return new
        if known and known[0]["state"] == "left_out":
            run = known[0]["run"]
            self._trainable[run].append(new.id)
            if before != after:
                self._gained[run] = known[0]["group_id"]
        if old is not None and before == after and old["status"] == "left_out":
            return replace(new, left_out=old["reason"])  # The decision on its run still stands.
        return new

    def reopen(self) -> None:
        done: set[str] = set()
        for run, group in self._gained.items():
            members = self._state.rows(_GROUP, run, group)
            if run in done or any(row["taken"] for row in members):
                continue
            runs = {
                row["id"]: self._trainable[row["id"]]
                for row in members
                if row["state"] == "left_out"
            }
            self._state.reopen(runs, group)
            self._keep_shards(runs)
            self.report.reopened += len(runs)
            done |= runs.keys()

    def _keep_shards(self, runs: Collection[str]) -> None:
        """The daemon needs the shards of reopened runs again."""
        for run in runs:
            for row in self._state.rows("SELECT DISTINCT shard FROM calls WHERE run = ?", run):
                (self._traces / (row["shard"] + CONSUMED)).unlink(missing_ok=True)


_Reading = tuple[str, tuple[tuple[str, str], ...], str] | None
"""How a call was read: check, failures, kind of side call. None: it was not known."""


def _of_row(row: Mapping[str, Any] | None) -> _Reading:
    if row is None:
        return None
    failures = tuple((name, detail) for name, detail in json.loads(row["failures"]))
    return row["check_result"], failures, row["side"]


def _of_call(call: CallRow) -> _Reading:
    side = call.origin.side if call.origin else None
    return call.check, tuple(call.failures), side or ""


def _words(reading: _Reading) -> str:
    if reading is None:
        return "unknown"
    check, failures, side = reading
    why = [name for name, _ in failures] or ([f"side call: {side}"] if side else [])
    return f"{check} ({why[0]})" if why else check
