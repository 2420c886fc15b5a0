"""Where every call and sample is, and why one was not trained: the answer of ``GET /v1/status``."""

import json
import time
from pathlib import Path
from typing import Any

from daemon.ingest import Ingester
from daemon.planner import Planner
from daemon.scheduler import Scheduler
from daemon.serving import Serving
from daemon.state import State
from tokenization.checks import AGENTS_CHOICE

MAX_LISTED = 50


class StatusReport:
    """Collects the status from the daemon's parts; ``scheduler`` is None when it does not train."""

    def __init__(
        self,
        state: State,
        traces: Path,
        ingester: Ingester,
        serving: Serving,
        planner: Planner,
        scheduler: Scheduler | None,
    ) -> None:
        self._state = state
        self._traces = traces
        self._ingester = ingester
        self._serving = serving
        self._planner = planner
        self._scheduler = scheduler
        self._started = time.time()

    def status(self) -> dict[str, Any]:
        """Return the whole status; all times in seconds, all keys always there."""
        state = self._state
        groups = self._counts("SELECT state AS k, count(*) AS n FROM groups GROUP BY state")
        problems = self.problems()
        return {
            "status": "degraded" if problems else "ok",
            "problems": problems,
            "uptime_s": time.time() - self._started,
            "traces": {
                "folder": str(self._traces),
                "shards": len(state.offsets()),
                "caught_up_s_ago": self._caught_up(),
                "faults": self._faults(),
            },
            "calls": self._counts("SELECT status AS k, count(*) AS n FROM calls GROUP BY status"),
            "left_out": self._counts(
                "SELECT reason AS k, count(*) AS n FROM calls WHERE status = 'left_out' "
                "GROUP BY reason ORDER BY n DESC"
            ),
            "harnesses": self._counts(
                "SELECT harness AS k, count(DISTINCT exchange) AS n FROM calls "
                "WHERE harness != '' GROUP BY harness ORDER BY n DESC"
            ),
            "side_calls": self._counts(
                "SELECT side AS k, count(DISTINCT exchange) AS n FROM calls "
                "WHERE side != '' GROUP BY side ORDER BY n DESC"
            ),
            "retries": self._counts(
                "SELECT retry AS k, count(DISTINCT exchange) AS n FROM calls "
                "WHERE retry != '' GROUP BY retry"
            ),
            "checks": self.checks(),
            "forks": self._counts(
                "SELECT CASE instr(fork, ' at ') WHEN 0 THEN fork "
                "ELSE substr(fork, 1, instr(fork, ' at ') - 1) END AS k, count(*) AS n "
                "FROM calls WHERE fork != '' GROUP BY k"
            ),
            "runs": self._counts("SELECT state AS k, count(*) AS n FROM runs GROUP BY state"),
            "groups": groups,
            "untrained_groups": groups.get("open", 0) + groups.get("planned", 0),
            "waiting": dict(list(self._planner.waiting.items())[:MAX_LISTED]),
            "skipped_groups": {
                r["id"]: r["reason"]
                for r in state.rows(
                    "SELECT id, reason FROM groups WHERE state = 'skipped' "
                    "ORDER BY rowid DESC LIMIT ?",
                    MAX_LISTED,
                )
            },
            "samples": self._counts(
                "SELECT CASE steps.status WHEN 'planned' THEN 'planned' WHEN 'rejected' THEN "
                "'rejected' ELSE 'trained' END AS k, count(*) AS n FROM step_samples "
                "JOIN steps ON steps.number = step_samples.step GROUP BY k"
            ),
            "rewards_without_run": self._count(
                "SELECT count(*) AS n FROM rewards WHERE run IS NULL "
                "OR run NOT IN (SELECT id FROM runs)"
            ),
            "step": self._current_step(),
            "live_version": state.live_version(),
            "versions": self.versions(),
            "engine": self._engine(),
            "trainer": self._trainer(),
        }

    def problems(self) -> list[str]:
        """What makes the daemon degraded, one line each."""
        found = [
            f"{count} {kind}" for kind, count in self._faults().items() if kind != "torn shard"
        ]
        if not self._traces.is_dir():
            found.append(f"trace folder {self._traces} does not exist")
        if self._serving.problem:
            found.append(f"engine: {self._serving.problem}")
        if self._scheduler is not None and self._scheduler.problem:
            found.append(f"training: {self._scheduler.problem}")
        failures = self.checks()["failures"]
        found += [
            f"token check {name!r} failed for {count} calls, which are not trained"
            for name, count in failures.items()
            if name not in AGENTS_CHOICE
        ]
        return found

    def checks(self) -> dict[str, Any]:
        """Calls whose tokens were checked, those that failed, and failures by name."""
        counts = self._counts(
            "SELECT check_result AS k, count(*) AS n FROM calls GROUP BY check_result"
        )
        failures = self._counts(
            "SELECT json_extract(failure.value, '$[0]') AS k, count(*) AS n "
            "FROM calls, json_each(calls.failures) AS failure "
            "WHERE check_result = 'failed' GROUP BY k"
        )
        failed = counts.get("failed", 0)
        return {
            "calls": counts.get("passed", 0) + failed,
            "failed": failed,
            "failures": failures,
        }

    def versions(self) -> list[dict[str, Any]]:
        """Every version with its step's metrics and its swap, oldest first."""
        rows = self._state.rows(
            "SELECT versions.*, steps.metrics AS metrics, steps.planned_at, steps.trained_at "
            "FROM versions LEFT JOIN steps ON steps.number = versions.step "
            "ORDER BY CAST(substr(versions.version, 2) AS INTEGER)"
        )
        return [_version(row) for row in rows]

    def _caught_up(self) -> float | None:
        caught_up = self._ingester.caught_up
        return time.time() - caught_up if caught_up else None

    def _faults(self) -> dict[str, int]:
        return self._counts("SELECT kind AS k, sum(count) AS n FROM faults GROUP BY kind")

    def _current_step(self) -> dict[str, Any] | None:
        step = self._state.unfinished_step()
        if step is None:
            return None
        step["metrics"] = json.loads(step["metrics"])
        return step

    def _engine(self) -> dict[str, Any]:
        engine = self._serving.engine
        return {
            "problem": self._serving.problem,
            "version": engine.version if engine else None,
            "model": engine.model if engine else None,
            "dtype": engine.dtype if engine else None,
            "logprobs_mode": engine.logprobs_mode if engine else None,
            "paused": engine.paused if engine else None,
        }

    def _trainer(self) -> dict[str, Any]:
        if self._scheduler is None:
            return {"stage": "off", "detail": "", "problem": None, "deaths": 0}
        return {
            "stage": self._scheduler.stage,
            "detail": self._scheduler.trainer_stage,
            "problem": self._scheduler.problem,
            "deaths": self._scheduler.trainer_deaths,
        }

    def _counts(self, sql: str) -> dict[str, int]:
        return {row["k"]: row["n"] for row in self._state.rows(sql)}

    def _count(self, sql: str) -> int:
        return self._state.rows(sql)[0]["n"]


def _version(row: dict[str, Any]) -> dict[str, Any]:
    swap = json.loads(row["swap"])
    metrics = json.loads(row["metrics"] or "{}")
    return {
        "version": row["version"],
        "parent": row["parent"],
        "step": row["step"],
        "status": row["status"],
        "live_from": row["live_from"],
        "live_until": row["live_until"],
        "planned_at": row["planned_at"],
        "trained_at": row["trained_at"],
        **metrics,
        "swap_pause_s": swap.get("pause_s"),
        "swap_update_s": swap.get("update_s"),
        "swap_total_s": swap.get("total_s"),
        "canary_abs_diff_mean": swap.get("canary_abs_diff_mean"),
        "canary_abs_diff_max": swap.get("canary_abs_diff_max"),
    }
