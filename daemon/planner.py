"""Decides on runs and groups, and makes the next step's batch when enough of them are ready."""

import asyncio
import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from daemon import groups, replay, rollouts
from daemon.config import DaemonConfig
from daemon.groups import Decision, Policy, RunView
from daemon.ingest import Ingester
from daemon.rollouts import Limits, Selection
from daemon.state import Plan, State
from tokenization.checks import version_number
from trainer.batch import Batch, Rollout

logger = logging.getLogger(__name__)


@dataclass
class _Draft:
    """What a step under construction holds so far."""

    rollouts: list[Rollout] = field(default_factory=list)
    selections: list[Selection] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def batch(self) -> Batch:
        samples = tuple(sample for s in self.selections for sample in s.samples)
        return Batch(tuple(self.rollouts), samples)


class Planner:
    """Turns settled runs into planned steps. ``waiting`` says what each open group waits for."""

    def __init__(
        self, config: DaemonConfig, state: State, ingester: Ingester, max_sequence_tokens: int
    ) -> None:
        self._config = config
        self._state = state
        self._ingester = ingester
        self._max_tokens = max_sequence_tokens
        self._traces = Path(config.traces)
        self._batches = Path(config.directory) / "batches"
        self._policy = Policy(
            config.reward_window_seconds, config.group_wait_seconds, config.skip_zero_variance
        )
        self.waiting: dict[str, str] = {}

    async def plan(self, parent: str) -> bool:
        """Commit the next step if enough is ready; returns whether one was planned.

        Groups and runs that can never be trained are decided against on the way.
        """
        self._end_idle_runs()
        grouped, single = self._undecided()
        now = time.time()
        limits = Limits(version_number(parent) or 0, self._config.max_staleness, self._max_tokens)
        draft = await self._draft_groups(grouped, now, limits)
        if draft is None:
            draft = await self._draft_single(single, now, limits)
        if draft is None:
            return False
        await self._commit(draft, parent, limits)
        return True

    def batch_path(self, name: str) -> Path:
        return self._batches / name

    def drop_batches(self, before: int) -> None:
        """Delete the batch files of steps with numbers below ``before``."""
        for path in self._batches.glob("step-*.npz"):
            if int(path.stem.partition("-")[2]) < before:
                path.unlink()

    def _end_idle_runs(self) -> None:
        # Only with the whole backlog read is a silent run really silent.
        before = min(self._ingester.caught_up, time.time()) - self._config.idle_seconds
        self._state.end_idle_runs(before)

    def _undecided(self) -> tuple[dict[str, list[RunView]], list[RunView]]:
        grouped: dict[str, list[RunView]] = defaultdict(list)
        single: list[RunView] = []
        for row in self._state.undecided_runs():
            if row["group_id"] is None:
                single.append(self._view(row))
            else:
                grouped[row["group_id"]].append(self._view(row))
        return grouped, single

    def _view(self, row: dict[str, Any]) -> RunView:
        settled_at = (row["ended_at"] or 0.0) + self._config.settle_seconds
        missing = set(json.loads(row["rewards_expected"])) - set(json.loads(row["reward_names"]))
        return RunView(
            id=row["id"],
            ended=row["ended_at"],
            settled=row["state"] == "ended" and self._ingester.caught_up >= settled_at,
            status=row["status"],
            reward=None if missing else row["reward"],
            trainable_calls=row["trainable_calls"],
            group_size=row["group_size"],
        )

    async def _draft_groups(
        self, grouped: dict[str, list[RunView]], now: float, limits: Limits
    ) -> _Draft | None:
        self.waiting = {}
        ready: list[tuple[str, Decision]] = []
        for group, runs in grouped.items():
            decision = groups.decide(runs, now, self._policy)
            if decision.action == "wait":
                self.waiting[group] = decision.reason
            elif decision.action == "skip":
                self._skip(group, decision, {})
            else:
                self.waiting[group] = "ready"
                ready.append((group, decision))
        ready.sort(key=lambda item: item[1].ready_since)
        wanted = self._config.groups_per_step
        if not self._due(ready, wanted, now):
            return None
        draft = _Draft()
        for group, decision in list(ready):
            if len(draft.groups) == wanted:
                break
            if not await self._add(draft, group, decision, limits):
                ready.remove((group, decision))
        # Groups that turned out to be unusable may have left too few.
        return draft if self._due(ready, wanted, now) else None

    async def _draft_single(
        self, runs: Sequence[RunView], now: float, limits: Limits
    ) -> _Draft | None:
        fates = {run.id: groups.fate(run, now, self._policy) for run in runs}
        never = {r: f for r, f in fates.items() if f is not None and f != "graded"}
        if never:
            self._state.leave_out(runs=never, calls={})
        ready = sorted((r for r in runs if fates[r.id] == "graded"), key=lambda r: r.ended or now)
        wanted = self._config.runs_per_step
        overdue = now - self._config.max_wait_seconds
        if len(ready) < wanted and (len(ready) < 2 or (ready[0].ended or now) > overdue):
            return None
        draft = _Draft()
        decision = Decision("ready", rollouts=tuple(ready[:wanted]))
        return draft if await self._add(draft, None, decision, limits) else None

    def _due(self, ready: Sequence[tuple[str, Decision]], wanted: int, now: float) -> bool:
        """``ready`` is sorted, the longest waiting first."""
        return len(ready) >= wanted or (
            len(ready) > 0 and now - ready[0][1].ready_since >= self._config.max_wait_seconds
        )

    async def _add(
        self, draft: _Draft, group: str | None, decision: Decision, limits: Limits
    ) -> bool:
        """Read a ready group's calls and add it to the draft, unless too little is usable."""
        selections = {run.id: await self._select(run.id, limits) for run in decision.rollouts}
        usable = [
            replace(run, trainable_calls=len(selections[run.id].trained))
            for run in decision.rollouts
        ]
        fates = {
            run.id: "graded" if run.trainable_calls else _why(selections[run.id]) for run in usable
        }
        settled = groups.settle(usable, dict(fates), decision.ready_since, self._policy)
        calls = {call: why for s in selections.values() for call, why in s.left_out.items()}
        if settled.action == "skip":
            settled = replace(settled, left_out=decision.left_out | settled.left_out)
            self._skip(group, settled, calls)
            return False
        for run in settled.rollouts:
            assert run.reward is not None
            draft.rollouts.append(Rollout(run.id, group, run.reward))
            draft.selections.append(selections[run.id])
        draft.left_out |= decision.left_out | settled.left_out
        if group is not None:
            draft.groups.append(group)
        return True

    def _skip(self, group: str | None, decision: Decision, calls: dict[str, str]) -> None:
        logger.info("%s skipped: %s", f"group {group}" if group else "runs", decision.reason)
        self._state.leave_out(
            runs=decision.left_out,
            calls=calls,
            group=(group, decision.reason) if group is not None else None,
        )

    async def _select(self, run: str, limits: Limits) -> Selection:
        rows = self._state.calls_of(run)
        waiting = {row["id"] for row in rows if row["status"] == "waiting"}
        tools = {row["id"]: row["tools"] for row in rows}

        def rebuild() -> Selection:
            calls, missing = replay.read_calls(self._traces, rows)
            if "no_tools" not in self._config.train_side_calls:
                side = rollouts.beside_the_agent(calls, tools) & waiting
                missing |= {call: "side call: no_tools" for call in side}
            selection = rollouts.select(run, calls, waiting - missing.keys(), limits)
            return replace(selection, left_out=selection.left_out | missing)

        selection = await asyncio.to_thread(rebuild)
        self._state.note_forks(selection.forks)
        return selection

    async def _commit(self, draft: _Draft, parent: str, limits: Limits) -> None:
        number = self._state.next_step()
        path = self.batch_path(f"step-{number:06d}.npz")
        batch = draft.batch()
        digest = await asyncio.to_thread(_save, batch, path)
        plan = Plan(
            number=number,
            parent=parent,
            version=self._state.next_version(),
            batch=path.name,
            digest=digest,
            rollouts={rollout.run: rollout.reward for rollout in batch.rollouts},
            samples={
                s.sample_id: (len(s.token_ids), int(s.loss_mask.sum())) for s in batch.samples
            },
            trained=[call for s in draft.selections for call in s.trained],
            groups=draft.groups,
            metrics=_metrics(batch, limits.newest),
        )
        calls = {call: why for s in draft.selections for call, why in s.left_out.items()}
        self._state.plan_step(plan, draft.left_out, calls)
        for group in draft.groups:
            self.waiting.pop(group, None)
        logger.info(
            "step %d planned: %d rollouts, %d samples",
            number,
            len(plan.rollouts),
            len(plan.samples),
        )


def _why(selection: Selection) -> str:
    """The reason of a run none of whose calls can be trained: that of its first call."""
    return next(iter(selection.left_out.values()), "no trainable call")


def _save(batch: Batch, path: Path) -> str:
    """Save the batch so that it survives a power cut, like the step that will name it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = batch.save(path)
    for target in (path, path.parent):
        handle = os.open(target, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    return digest


def _metrics(batch: Batch, newest: int) -> dict[str, float]:
    oldest = min(int(s.versions[s.loss_mask].min()) for s in batch.samples)
    return {
        "reward_mean": sum(r.reward for r in batch.rollouts) / len(batch.rollouts),
        "rollouts": len(batch.rollouts),
        "samples": len(batch.samples),
        "sampled_tokens": sum(int(s.loss_mask.sum()) for s in batch.samples),
        "staleness_max": newest - oldest,
    }
