"""The daemon's memory: one SQLite database, every change in one transaction.

It holds where each shard was read to, what became of every call, run and group, the rewards, the
training steps and the weight versions. Bodies and tokens stay in the shards; a call's row says
where. What must happen together happens in one method here, so a process killed between two
methods leaves a state that the next one can go on from.

A sample belongs to one step and a run to one step: both are primary keys, so the database itself
refuses to train anything twice.
"""

import json
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from daemon import retries
from daemon.origin import Origin
from daemon.retries import Attempt
from daemon.runs import RunKey
from deploy.errors import UserError

SCHEMA = """
CREATE TABLE shards (
    name TEXT PRIMARY KEY,
    offset INTEGER NOT NULL,
    gone INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE faults (
    id INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    shard TEXT NOT NULL,
    offset INTEGER NOT NULL,
    kind TEXT NOT NULL,
    count INTEGER NOT NULL DEFAULT 1,
    detail TEXT NOT NULL
);
CREATE TABLE calls (
    id TEXT PRIMARY KEY,
    exchange TEXT NOT NULL,
    run TEXT NOT NULL,
    agent TEXT NOT NULL,
    route TEXT NOT NULL,
    outcome TEXT NOT NULL,
    started REAL NOT NULL,
    ended REAL NOT NULL,
    check_result TEXT NOT NULL,          -- passed | failed | unchecked
    failures TEXT NOT NULL,              -- JSON [[name, detail], ...]
    status TEXT NOT NULL,                -- waiting | planned | trained | left_out
    reason TEXT NOT NULL DEFAULT '',
    fork TEXT NOT NULL DEFAULT '',
    token_source TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    versions TEXT NOT NULL,              -- JSON [[first token, version number], ...]
    shard TEXT NOT NULL,
    frame INTEGER NOT NULL,
    line INTEGER NOT NULL
);
CREATE INDEX calls_of_run ON calls (run);
CREATE INDEX calls_by_status ON calls (status, reason);
CREATE TABLE runs (
    id TEXT PRIMARY KEY,
    key TEXT NOT NULL,
    group_id TEXT,
    group_size INTEGER,
    task TEXT NOT NULL DEFAULT '',
    rewards_expected TEXT NOT NULL DEFAULT '[]',
    registered INTEGER NOT NULL,
    first_seen REAL NOT NULL,
    last_seen REAL NOT NULL,
    ended_at REAL,
    status TEXT,                         -- one of RUN_STATUSES, or idle
    state TEXT NOT NULL DEFAULT 'open',  -- open | ended | planned | trained | left_out
    reason TEXT NOT NULL DEFAULT ''
);
CREATE INDEX runs_by_state ON runs (state);
CREATE INDEX runs_by_key ON runs (key);
CREATE INDEX runs_by_group ON runs (group_id);
CREATE TABLE rewards (
    key TEXT PRIMARY KEY,
    run TEXT,
    call TEXT,
    name TEXT NOT NULL,
    value REAL NOT NULL,
    at REAL NOT NULL
);
CREATE INDEX rewards_of_run ON rewards (run);
CREATE INDEX rewards_of_call ON rewards (call);
CREATE TABLE groups (
    id TEXT PRIMARY KEY,
    state TEXT NOT NULL DEFAULT 'open',  -- open | planned | trained | skipped
    reason TEXT NOT NULL DEFAULT ''
);
CREATE TABLE steps (
    number INTEGER PRIMARY KEY,
    parent TEXT NOT NULL,
    version TEXT NOT NULL,
    batch TEXT NOT NULL,
    digest TEXT NOT NULL,
    status TEXT NOT NULL,                -- planned | trained | published | rejected
    reason TEXT NOT NULL DEFAULT '',
    planned_at REAL NOT NULL,
    trained_at REAL,
    metrics TEXT NOT NULL DEFAULT '{}'
);
CREATE TABLE step_runs (
    run TEXT PRIMARY KEY,
    step INTEGER NOT NULL REFERENCES steps (number),
    reward REAL NOT NULL
);
CREATE TABLE step_samples (
    sample_id TEXT PRIMARY KEY,
    step INTEGER NOT NULL REFERENCES steps (number),
    tokens INTEGER NOT NULL,
    sampled_tokens INTEGER NOT NULL
);
CREATE TABLE versions (
    version TEXT PRIMARY KEY,
    step INTEGER,
    parent TEXT,
    status TEXT NOT NULL,                -- trained | live | retired | rejected
    live_from REAL,
    live_until REAL,
    swap TEXT NOT NULL DEFAULT '{}'
);
"""

MIGRATIONS = (
    SCHEMA,
    # parent: the agent a subagent works for; window: changes with a compaction; side:
    # daemon.sidecalls.Kind; tools: number offered; retry_of: the exchange that is tried again;
    # retry: daemon.retries.Kind; sound and the digests: what finds a retry of it.
    """
ALTER TABLE calls ADD COLUMN harness TEXT NOT NULL DEFAULT '';
ALTER TABLE calls ADD COLUMN session TEXT NOT NULL DEFAULT '';
ALTER TABLE calls ADD COLUMN parent TEXT NOT NULL DEFAULT '';
ALTER TABLE calls ADD COLUMN window TEXT NOT NULL DEFAULT '';
ALTER TABLE calls ADD COLUMN side TEXT NOT NULL DEFAULT '';
ALTER TABLE calls ADD COLUMN tools INTEGER NOT NULL DEFAULT 0;
ALTER TABLE calls ADD COLUMN retry_of TEXT NOT NULL DEFAULT '';
ALTER TABLE calls ADD COLUMN retry TEXT NOT NULL DEFAULT '';
ALTER TABLE calls ADD COLUMN sound INTEGER NOT NULL DEFAULT 1;
ALTER TABLE calls ADD COLUMN context_digest TEXT NOT NULL DEFAULT '';
ALTER TABLE calls ADD COLUMN history_digest TEXT NOT NULL DEFAULT '';
ALTER TABLE calls ADD COLUMN opening_digest TEXT NOT NULL DEFAULT '';
CREATE INDEX calls_by_time ON calls (run, started);
""",
)
"""Element N leads from schema N to N + 1; only ever added to."""
SCHEMA_VERSION = len(MIGRATIONS)

LATE = "arrived after its run was decided"
RUN_STATUSES = ("completed", "agent_failure", "infrastructure_failure")


class Conflict(Exception):
    """A request contradicts what has already been decided. The message is one line."""


@dataclass(frozen=True)
class CallRow:
    """A new row of the call table; see the schema."""

    id: str
    exchange: str
    run_key: RunKey
    agent: str
    route: str
    outcome: str
    started: float
    ended: float
    check: str
    failures: Sequence[tuple[str, str]]
    left_out: str | None
    token_source: str
    prompt_tokens: int
    output_tokens: int
    versions: Sequence[tuple[int, int]]
    line: int
    origin: Origin | None = None


@dataclass(frozen=True)
class Fault:
    """Something unreadable or lost, ``count`` times."""

    kind: str
    detail: str
    count: int = 1


@dataclass(frozen=True)
class Plan:
    """A step about to be trained, with everything that goes into it and everything decided by it.

    ``batch`` is the name of the batch file.
    ``rollouts`` maps run → reward, ``samples`` sample id → (tokens, sampled tokens), ``trained``
    holds the ids of the calls it trains, ``groups`` those of its groups.
    """

    number: int
    parent: str
    version: str
    batch: str
    digest: str
    rollouts: Mapping[str, float]
    samples: Mapping[str, tuple[int, int]]
    trained: Sequence[str]
    groups: Sequence[str]
    metrics: Mapping[str, float]


class State:
    """The database. Not thread-safe: one event loop owns it."""

    def __init__(self, path: Path) -> None:
        """Open or create the database.

        Raises:
            UserError: it was written by another version of Ridealong, or can't be opened.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA journal_mode = WAL")
            # A lost commit would train the same samples again, so it must survive a power cut.
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA foreign_keys = ON")
            self._migrate(path)
        except (sqlite3.Error, OSError) as error:
            raise UserError(f"daemon state {path} can't be opened: {error}") from None

    def _migrate(self, path: Path) -> None:
        (found,) = self._db.execute("PRAGMA user_version").fetchone()
        if 0 <= found < SCHEMA_VERSION:
            with self._transaction():
                for step in MIGRATIONS[found:]:
                    for statement in step.split(";\n"):
                        self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif found != SCHEMA_VERSION:
            raise UserError(
                f"daemon state {path} has schema {found}, this Ridealong uses {SCHEMA_VERSION}: "
                "use the version that wrote it, or another daemon.directory"
            )

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def rows(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        """Run a query and return its rows as dictionaries."""
        return [dict(row) for row in self._db.execute(sql, values)]

    def row(self, sql: str, *values: Any) -> dict[str, Any] | None:
        found = self._db.execute(sql, values).fetchone()
        return dict(found) if found else None

    # Shards

    def offsets(self) -> dict[str, int]:
        """Return how far each shard has been read, in bytes."""
        return {r["name"]: r["offset"] for r in self.rows("SELECT name, offset FROM shards")}

    def needed_shards(self) -> set[str]:
        """Return the shards with calls that are not settled, or whose run is not."""
        found = self.rows(
            "SELECT shard FROM calls WHERE status IN ('waiting', 'planned') UNION "
            "SELECT shard FROM runs JOIN calls ON calls.run = runs.id "
            "WHERE runs.state IN ('open', 'ended', 'planned')"
        )
        return {row["shard"] for row in found}

    def mark_gone(self, names: Sequence[str]) -> None:
        """Remember that shards were deleted."""
        with self._transaction() as db:
            db.executemany("UPDATE shards SET gone = 1 WHERE name = ?", [(n,) for n in names])

    def commit_frame(
        self,
        shard: str,
        offset: int,
        next_offset: int,
        calls: Sequence[CallRow],
        faults: Sequence[Fault],
    ) -> None:
        """Take in one frame: its calls, its faults and the new offset, all or nothing."""
        with self._transaction() as db:
            self._insert_calls(db, calls, shard, offset, {})
            self._insert_faults(db, shard, offset, faults)
            db.execute(
                "INSERT INTO shards (name, offset) VALUES (?, ?) "
                "ON CONFLICT (name) DO UPDATE SET offset = excluded.offset, gone = 0",
                (shard, next_offset),
            )

    def replace_calls(self, shard: str, offset: int, calls: Sequence[CallRow]) -> None:
        """Take in calls of a frame anew: what is known of their exchanges gives way, the run they
        belong to stays."""
        with self._transaction() as db:
            runs: dict[str, str] = {}
            forks: list[tuple[str, str]] = []
            for exchange in {call.exchange for call in calls}:
                old = "FROM calls WHERE exchange = ?"
                for row in db.execute(f"SELECT id, run, fork {old}", (exchange,)):
                    runs[exchange] = row["run"]
                    forks.append((row["fork"], row["id"]))
                db.execute(f"DELETE {old}", (exchange,))
            self._insert_calls(db, calls, shard, offset, runs)
            db.executemany("UPDATE calls SET fork = ? WHERE id = ?", forks)

    def reopen(self, runs: Mapping[str, Sequence[str]], group: str | None) -> None:
        """Let runs that were left out be decided on anew, with their group if they have one.

        ``runs`` maps each to its calls that may be trained.
        """
        with self._transaction() as db:
            for run, calls in runs.items():
                db.execute("UPDATE runs SET state = 'ended', reason = '' WHERE id = ?", (run,))
                db.executemany(
                    "UPDATE calls SET status = 'waiting', reason = '' WHERE id = ?",
                    [(call,) for call in calls],
                )
            db.execute("UPDATE groups SET state = 'open', reason = '' WHERE id = ?", (group,))

    def note_fault(self, shard: str, offset: int, fault: Fault) -> bool:
        """Record a fault that is met again at every look; returns whether it is new."""
        known = self.row(
            "SELECT 1 FROM faults WHERE shard = ? AND offset = ? AND kind = ? AND detail = ?",
            shard,
            offset,
            fault.kind,
            fault.detail,
        )
        if known is None:
            with self._transaction() as db:
                self._insert_faults(db, shard, offset, [fault])
        return known is None

    def _insert_faults(
        self, db: sqlite3.Connection, shard: str, offset: int, faults: Sequence[Fault]
    ) -> None:
        now = time.time()
        db.executemany(
            "INSERT INTO faults (at, shard, offset, kind, count, detail) VALUES (?,?,?,?,?,?)",
            [(now, shard, offset, f.kind, f.count, f.detail) for f in faults],
        )

    def _insert_calls(
        self,
        db: sqlite3.Connection,
        calls: Sequence[CallRow],
        shard: str,
        offset: int,
        runs: Mapping[str, str],
    ) -> None:
        """Insert calls and link their retries; ``runs`` maps exchanges to their runs, if known."""
        attempts: dict[str, list[Attempt]] = defaultdict(list)
        for call in calls:
            run = self._insert_call(db, call, shard, offset, runs.get(call.exchange))
            if run is not None and call.origin is not None:
                attempts[run].append(call.origin.attempt)
        for run, new in attempts.items():
            self._link_retries(db, run, new)

    def _insert_call(
        self,
        db: sqlite3.Connection,
        call: CallRow,
        shard: str,
        offset: int,
        known_run: str | None = None,
    ) -> str | None:
        """Insert a call and return its run, looked up unless known; None when it is there."""
        # The same record in two shards is one call. After a failed sync the sidecar writes records
        # again, and only the later shard is sure to stay.
        if db.execute("SELECT 1 FROM calls WHERE id = ?", (call.id,)).fetchone():
            db.execute(
                "UPDATE calls SET shard = ?, frame = ?, line = ? WHERE id = ?",
                (shard, offset, call.line, call.id),
            )
            return None
        run, state = self._run_of(db, call) if known_run is None else self._run(db, known_run)
        status, reason = ("left_out", call.left_out) if call.left_out else ("waiting", "")
        if status == "waiting" and state not in ("open", "ended"):
            status, reason = "left_out", LATE
        db.execute(
            "INSERT INTO calls (id, exchange, run, agent, route, outcome, started, ended, "
            "check_result, failures, status, reason, fork, token_source, prompt_tokens, "
            "output_tokens, versions, shard, frame, line, harness, session, parent, window, side, "
            "tools, sound, context_digest, history_digest, opening_digest) "
            f"VALUES ({', '.join('?' * 30)})",
            (
                call.id,
                call.exchange,
                run,
                call.agent,
                call.route,
                call.outcome,
                call.started,
                call.ended,
                call.check,
                json.dumps(call.failures),
                status,
                reason,
                "",
                call.token_source,
                call.prompt_tokens,
                call.output_tokens,
                json.dumps(call.versions),
                shard,
                offset,
                call.line,
                *_origin_values(call.origin),
            ),
        )
        db.execute("UPDATE rewards SET run = ? WHERE call = ? AND run IS NULL", (run, call.id))
        return run

    def _link_retries(self, db: sqlite3.Connection, run: str, new: Sequence[Attempt]) -> None:
        """Note which of a run's ``new`` exchanges try an earlier one again, and, as a cancelled
        call may be recorded after its retry, which earlier ones try a new one again."""
        began = min(attempt.started for attempt in new) - retries.WINDOW_S
        # What succeeded matters only when a late failure may have its retry there already.
        failed = any(not attempt.sound for attempt in new)
        rows = db.execute(
            "SELECT DISTINCT exchange, session, agent, started, ended, sound, context_digest, "
            "history_digest, opening_digest, retry_of FROM calls WHERE run = ? AND started >= ? "
            + ("" if failed else "AND (NOT sound OR retry_of != '')"),
            (run, began),
        ).fetchall()
        attempts = {row["exchange"]: _attempt(row) for row in rows}
        attempts |= {attempt.exchange: attempt for attempt in new}
        known = {row["exchange"]: row["retry_of"] for row in rows if row["retry_of"]}
        db.executemany(
            "UPDATE calls SET retry_of = ?, retry = ? WHERE exchange = ? AND run = ?",
            [
                (retry.of, retry.kind, exchange, run)
                for exchange, retry in retries.find(attempts.values(), known).items()
            ],
        )

    def _run(self, db: sqlite3.Connection, run: str) -> tuple[str, str]:
        (state,) = db.execute("SELECT state FROM runs WHERE id = ?", (run,)).fetchone()
        return run, state

    def _run_of(self, db: sqlite3.Connection, call: CallRow) -> tuple[str, str]:
        """Find or open the run of a call; returns its id and state.

        A named run that ended by idleness goes on when a call comes, unless it has been decided.
        A key that nobody gave (one host's traffic, a harness's session) opens a new run then, with
        a numbered id.
        """
        key = call.run_key
        found = db.execute(
            "SELECT id, state, status FROM runs WHERE key = ? ORDER BY rowid DESC LIMIT 1",
            (key.name,),
        ).fetchone()
        if found is not None and (key.told or found["state"] == "open"):
            idle = found["state"] == "ended" and found["status"] == "idle"
            db.execute(
                "UPDATE runs SET first_seen = min(first_seen, ?), last_seen = max(last_seen, ?) "
                "WHERE id = ?",
                (call.started, call.ended, found["id"]),
            )
            if idle:
                db.execute(
                    "UPDATE runs SET state = 'open', status = NULL, ended_at = NULL WHERE id = ?",
                    (found["id"],),
                )
            return found["id"], "open" if idle else found["state"]
        (earlier,) = db.execute("SELECT count(*) FROM runs WHERE key = ?", (key.name,)).fetchone()
        run, number = f"{key.name}#{earlier + 1}" if earlier else key.name, earlier + 1
        # Somebody may have registered a run under just this name.
        while db.execute("SELECT 1 FROM runs WHERE id = ?", (run,)).fetchone():
            number += 1
            run = f"{key.name}#{number}"
        db.execute(
            "INSERT INTO runs (id, key, registered, first_seen, last_seen) VALUES (?, ?, 0, ?, ?)",
            (run, key.name, call.started, call.ended),
        )
        return run, "open"

    # Runs and rewards

    def register_run(
        self, run: str, group: str | None, group_size: int | None, task: str, rewards: list[str]
    ) -> None:
        """Announce a run. Repeating it with the same fields is allowed.

        Raises:
            Conflict: the run was registered otherwise, its group with another size, or one of the
                two has been decided.
        """
        now = time.time()
        with self._transaction() as db:
            known = db.execute("SELECT * FROM runs WHERE id = ?", (run,)).fetchone()
            if known is not None and known["registered"]:
                if known["group_id"] != group:
                    raise Conflict(f"run {run} is already registered in group {known['group_id']}")
                for what, before, now_said in (
                    ("group_size", known["group_size"], group_size),
                    ("task", known["task"], task),
                    ("rewards", sorted(json.loads(known["rewards_expected"])), sorted(rewards)),
                ):
                    if before != now_said:
                        raise Conflict(f"run {run} is already registered with {what} {before!r}")
                return
            if known is not None and known["state"] not in ("open", "ended"):
                raise Conflict(f"run {run} has already been decided: {known['state']}")
            if group is not None:
                db.execute("INSERT OR IGNORE INTO groups (id) VALUES (?)", (group,))
                decided = db.execute("SELECT state FROM groups WHERE id = ?", (group,)).fetchone()
                if decided["state"] != "open":
                    raise Conflict(f"group {group} has already been {decided['state']}")
                other = db.execute(
                    "SELECT id, group_size FROM runs WHERE group_id = ? AND group_size != ?",
                    (group, group_size),
                ).fetchone()
                if other is not None:
                    raise Conflict(
                        f"group {group} was announced with group_size {other['group_size']} "
                        f"(run {other['id']}), not {group_size}"
                    )
            db.execute(
                "INSERT INTO runs (id, key, group_id, group_size, task, rewards_expected, "
                "registered, first_seen, last_seen) VALUES (?, ?, ?, ?, ?, ?, 1, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET group_id = excluded.group_id, registered = 1, "
                "group_size = excluded.group_size, task = excluded.task, "
                "rewards_expected = excluded.rewards_expected",
                (run, run, group, group_size, task, json.dumps(rewards), now, now),
            )

    def end_run(self, run: str, status: str) -> None:
        """Note that a run has ended. Repeating it with the same status is allowed.

        Raises:
            KeyError: no such run.
            Conflict: it ended with another status.
        """
        with self._transaction() as db:
            known = db.execute("SELECT state, status FROM runs WHERE id = ?", (run,)).fetchone()
            if known is None:
                raise KeyError(run)
            idle = known["status"] == "idle"
            if known["state"] not in ("open", "ended") and idle:
                return
            if known["state"] != "open" and not idle:
                if known["status"] != status:
                    raise Conflict(f"run {run} has already ended: {known['status']}")
                return
            db.execute(
                "UPDATE runs SET state = 'ended', status = ?, ended_at = ? WHERE id = ?",
                (status, time.time(), run),
            )

    def end_idle_runs(self, before: float) -> int:
        """End open runs without a call since ``before`` (Unix seconds); returns how many."""
        with self._transaction() as db:
            return db.execute(
                "UPDATE runs SET state = 'ended', status = 'idle', ended_at = ? "
                "WHERE state = 'open' AND last_seen < ?",
                (time.time(), before),
            ).rowcount

    def add_reward(
        self,
        *,
        run: str | None,
        call: str | None,
        name: str,
        value: float,
        key: str | None,
        window: float,
    ) -> str:
        """Store a reward under its key (default: run or call, and name) and return the key.

        The same key again replaces the value while the run is undecided, and is a no-op with the
        same value at any time. A run or call that has not been seen yet is accepted: its records
        may still be on their way.

        Raises:
            Conflict: the key belongs to another run, call or name, or the run has been decided or
                ended more than ``window`` seconds ago.
        """
        now = time.time()
        # Quoted, so that no two names give the same key.
        owner_kind, owner_id = ("call", call) if run is None else ("run", run)
        key = key or f"{owner_kind}:{quote(str(owner_id), safe='')}/{quote(name, safe='')}"
        with self._transaction() as db:
            known = db.execute("SELECT * FROM rewards WHERE key = ?", (key,)).fetchone()
            if known is not None and (known["call"] != call or (run and known["run"] != run)):
                raise Conflict(f"reward key {key} belongs to another run or call")
            if known is not None and known["name"] != name:
                raise Conflict(f"reward key {key} belongs to the reward {known['name']!r}")
            if known is not None and known["value"] == value:
                return key
            if run is None:
                row = db.execute("SELECT run FROM calls WHERE id = ?", (call,)).fetchone()
                run = row["run"] if row else None
            owner = db.execute("SELECT * FROM runs WHERE id = ?", (run,)).fetchone()
            if owner is not None and owner["state"] not in ("open", "ended"):
                raise Conflict(f"run {run} has already been decided: {owner['state']}")
            if owner is not None and owner["ended_at"] and now > owner["ended_at"] + window:
                raise Conflict(f"run {run} ended more than {window:g} s ago: its window is closed")
            db.execute(
                "INSERT INTO rewards VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (key) DO UPDATE SET value = excluded.value, at = excluded.at",
                (key, run, call, name, value, now),
            )
        return key

    def undecided_runs(self) -> list[dict[str, Any]]:
        """Return the runs that no decision has been made on, with what a decision needs.

        ``reward`` is the sum of the run's rewards, None when there is none, not finite when they
        have no sum; ``reward_names`` the names that have come.
        """
        return self.rows(
            "SELECT runs.*, "
            # SQLite turns a sum that is not a number into NULL, which would read as no reward.
            "(SELECT coalesce(sum(value), CASE WHEN count(*) > 0 THEN 9e999 END) "
            "FROM rewards WHERE rewards.run = runs.id) AS reward, "
            "(SELECT json_group_array(DISTINCT name) FROM rewards WHERE rewards.run = runs.id) "
            "AS reward_names, "
            "(SELECT count(*) FROM calls WHERE calls.run = runs.id AND calls.status = 'waiting') "
            "AS trainable_calls "
            "FROM runs WHERE state IN ('open', 'ended') ORDER BY rowid"
        )

    def calls_of(self, run: str) -> list[dict[str, Any]]:
        return self.rows("SELECT * FROM calls WHERE run = ? ORDER BY started, id", run)

    def note_forks(self, forks: Mapping[str, str]) -> None:
        """Remember why calls branched (call id → reason)."""
        with self._transaction() as db:
            db.executemany(
                "UPDATE calls SET fork = ? WHERE id = ?", [(f, c) for c, f in forks.items()]
            )

    # Decisions

    def leave_out(
        self,
        *,
        runs: Mapping[str, str],
        calls: Mapping[str, str],
        group: tuple[str, str] | None = None,
    ) -> None:
        """Decide against runs and calls (id → reason), and against a group (id, reason)."""
        with self._transaction() as db:
            self._leave_out(db, runs, calls)
            if group is not None:
                db.execute(
                    "UPDATE groups SET state = 'skipped', reason = ? WHERE id = ?",
                    (group[1], group[0]),
                )

    def _leave_out(
        self, db: sqlite3.Connection, runs: Mapping[str, str], calls: Mapping[str, str]
    ) -> None:
        db.executemany(
            "UPDATE calls SET status = 'left_out', reason = ? WHERE id = ? AND status = 'waiting'",
            [(reason, call) for call, reason in calls.items()],
        )
        for run, reason in runs.items():
            db.execute("UPDATE runs SET state = 'left_out', reason = ? WHERE id = ?", (reason, run))
            db.execute(
                "UPDATE calls SET status = 'left_out', reason = ? "
                "WHERE run = ? AND status = 'waiting'",
                (reason, run),
            )

    def plan_step(
        self, plan: Plan, left_out_runs: Mapping[str, str], left_out_calls: Mapping[str, str]
    ) -> None:
        """Commit a step: from here on its samples belong to it and to no other.

        Raises:
            sqlite3.IntegrityError: a run or sample already belongs to a step.
        """
        with self._transaction() as db:
            self._leave_out(db, left_out_runs, left_out_calls)
            db.execute(
                "INSERT INTO steps (number, parent, version, batch, digest, status, planned_at, "
                "metrics) VALUES (?, ?, ?, ?, ?, 'planned', ?, ?)",
                (
                    plan.number,
                    plan.parent,
                    plan.version,
                    plan.batch,
                    plan.digest,
                    time.time(),
                    json.dumps(plan.metrics),
                ),
            )
            db.executemany(
                "INSERT INTO step_samples VALUES (?, ?, ?, ?)",
                [(sample, plan.number, *tokens) for sample, tokens in plan.samples.items()],
            )
            for run, reward in plan.rollouts.items():
                db.execute("INSERT INTO step_runs VALUES (?, ?, ?)", (run, plan.number, reward))
                db.execute("UPDATE runs SET state = 'planned' WHERE id = ?", (run,))
            db.executemany(
                "UPDATE calls SET status = 'planned', reason = ? WHERE id = ?",
                [(f"step {plan.number}", call) for call in plan.trained],
            )
            # Calls that came in while the batch was written are not in it.
            db.executemany(
                "UPDATE calls SET status = 'left_out', reason = ? "
                "WHERE status = 'waiting' AND run = ?",
                [(LATE, run) for run in plan.rollouts],
            )
            db.executemany(
                "UPDATE groups SET state = 'planned', reason = ? WHERE id = ?",
                [(f"step {plan.number}", group) for group in plan.groups],
            )

    def unfinished_step(self) -> dict[str, Any] | None:
        """Return the step that is planned or trained but not published, if any."""
        return self.row(
            "SELECT * FROM steps WHERE status IN ('planned', 'trained') ORDER BY number LIMIT 1"
        )

    def next_step(self) -> int:
        (number,) = self._db.execute("SELECT coalesce(max(number), 0) + 1 FROM steps").fetchone()
        return number

    def next_version(self) -> str:
        """Return a version name that no step has had, not even a rejected one."""
        (number,) = self._db.execute(
            "SELECT coalesce(max(CAST(substr(version, 2) AS INTEGER)), 0) + 1 FROM steps"
        ).fetchone()
        return f"v{number}"

    def finish_training(
        self, number: int, metrics: Mapping[str, float], samples: Sequence[str]
    ) -> None:
        """Note that the step's version exists, trained on ``samples``."""
        (planned,) = self._db.execute(
            "SELECT count(*) FROM step_samples WHERE step = ?", (number,)
        ).fetchone()
        self._resolve_step(
            number, "trained", "", {**metrics, "samples_left_out": planned - len(samples)}
        )

    def reject_step(self, number: int, reason: str) -> None:
        """Note that the step's batch could not be trained on; its samples are not used again."""
        self._resolve_step(number, "rejected", reason, {})

    def _resolve_step(
        self, number: int, status: str, reason: str, metrics: Mapping[str, float]
    ) -> None:
        trained = status == "trained"
        outcome = "trained" if trained else "left_out"
        why = f"step {number}" if trained else f"step {number} rejected: {reason}"
        with self._transaction() as db:
            step = db.execute("SELECT * FROM steps WHERE number = ?", (number,)).fetchone()
            db.execute(
                "UPDATE steps SET status = ?, reason = ?, trained_at = ?, metrics = ? "
                "WHERE number = ?",
                (
                    status,
                    reason,
                    time.time(),
                    json.dumps(json.loads(step["metrics"]) | dict(metrics)),
                    number,
                ),
            )
            runs = "(SELECT run FROM step_runs WHERE step = ?)"
            db.execute(
                f"UPDATE runs SET state = ?, reason = ? WHERE id IN {runs}",
                (outcome, why, number),
            )
            db.execute(
                "UPDATE calls SET status = ?, reason = ? "
                f"WHERE status = 'planned' AND run IN {runs}",
                (outcome, why, number),
            )
            db.execute(
                "UPDATE groups SET state = ?, reason = ? WHERE id IN "
                f"(SELECT group_id FROM runs WHERE id IN {runs})",
                ("trained" if trained else "skipped", why, number),
            )
            if trained:
                db.execute(
                    "INSERT INTO versions (version, step, parent, status) "
                    "VALUES (?, ?, ?, 'trained')",
                    (step["version"], number, step["parent"]),
                )

    # Versions

    def add_first_version(self, version: str) -> None:
        """Record the version that training starts from; no-op when it is known."""
        with self._transaction() as db:
            db.execute(
                "INSERT OR IGNORE INTO versions (version, status) VALUES (?, 'trained')",
                (version,),
            )

    def make_live(self, version: str, swap: Mapping[str, Any], step: int | None) -> None:
        """Note that the engine serves ``version`` since now; ``step`` is then published.

        A version that comes back into a restarted engine keeps the figures of its first swap.
        """
        now = time.time()
        with self._transaction() as db:
            db.execute(
                "UPDATE versions SET status = 'retired', live_until = ? "
                "WHERE status = 'live' AND version != ?",
                (now, version),
            )
            db.execute(
                "UPDATE versions SET status = 'live', live_until = NULL, "
                "swap = CASE WHEN live_from IS NULL THEN ? ELSE swap END, "
                "live_from = coalesce(live_from, ?) WHERE version = ?",
                (json.dumps(swap), now, version),
            )
            if step is not None:
                db.execute("UPDATE steps SET status = 'published' WHERE number = ?", (step,))

    def reject_version(self, version: str, step: int, reason: str) -> None:
        """Note that ``version`` must not be served; training goes on from the live one."""
        with self._transaction() as db:
            db.execute("UPDATE versions SET status = 'rejected' WHERE version = ?", (version,))
            db.execute(
                "UPDATE steps SET status = 'rejected', reason = ? WHERE number = ?",
                (reason, step),
            )
            why = f"step {step} rejected: {reason}"
            runs = "(SELECT run FROM step_runs WHERE step = ?)"
            db.execute(
                f"UPDATE runs SET state = 'left_out', reason = ? WHERE id IN {runs}", (why, step)
            )
            db.execute(
                "UPDATE calls SET status = 'left_out', reason = ? "
                f"WHERE status = 'trained' AND run IN {runs}",
                (why, step),
            )

    def live_version(self) -> str | None:
        found = self.row("SELECT version FROM versions WHERE status = 'live'")
        return found["version"] if found else None

    def previous_version(self, version: str) -> str | None:
        """Return the version that was live before ``version``."""
        found = self.row(
            "SELECT version FROM versions WHERE live_from IS NOT NULL AND version != ? "
            "ORDER BY live_from DESC LIMIT 1",
            version,
        )
        return found["version"] if found else None


def _origin_values(origin: Origin | None) -> tuple[str | int, ...]:
    if origin is None:
        return ("", "", "", "", "", 0, True, "", "", "")
    caller, attempt = origin.caller, origin.attempt
    return (
        caller.harness,
        caller.session,
        caller.parent,
        caller.window,
        origin.side or "",
        origin.tools,
        attempt.sound,
        attempt.context,
        attempt.digest,
        attempt.opening,
    )


def _attempt(row: sqlite3.Row) -> Attempt:
    return Attempt(
        exchange=row["exchange"],
        agent=retries.who(row["session"], row["agent"]),
        started=row["started"],
        ended=row["ended"],
        sound=bool(row["sound"]),
        context=row["context_digest"],
        digest=row["history_digest"],
        opening=row["opening_digest"],
    )
