"""The rollout controller: runs the agent on tasks, grades it, and keeps pace with the trainer.

A group is ``group_size`` rollouts of one task. No more groups are outstanding (begun and not yet
in a published version) than the next step takes; while it is trained, a few spare ones.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from daemon.client import AsyncDaemonClient, DaemonUnreachable
from deploy.demo.agent_messages import Result, Rollout
from deploy.demo.agent_process import AgentProcess
from deploy.demo.grader import Grade, Transcript, grade
from deploy.demo.journal import Attempt, Journal
from deploy.demo.settings import SERVED_MODEL_NAME, Settings
from deploy.demo.tasks import Task
from deploy.errors import UserError

ATTEMPTS = 5
POLL_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 5.0
BACKGROUND_ROLLOUTS = 1
"""Rollouts at a time while a step is trained. Each is followed by a rest as long as it took: the
trainer needs the processor more, and some streams should still be on when the weights change."""


class Controller:
    """Runs rollouts until ``settings.steps`` versions have been published.

    ``on_status`` gets the daemon's status at every poll, ``on_attempt`` every finished attempt.
    """

    def __init__(
        self,
        settings: Settings,
        daemon: AsyncDaemonClient,
        agent: AgentProcess,
        tasks: Iterator[Task],
        base_url: Callable[[str], str],
        journal: Journal,
        on_status: Callable[[dict[str, Any]], None],
        on_attempt: Callable[[Attempt], None],
    ) -> None:
        self._settings = settings
        self._daemon = daemon
        self._agent = agent
        self._tasks = tasks
        self._base_url = base_url
        self._journal = journal
        self._on_status = on_status
        self._on_attempt = on_attempt
        self._gate = Gate()
        self._begun = 0

    async def run(self) -> dict[str, Any]:
        """Return the daemon's last status.

        Raises:
            UserError: training has stopped for good; the message says why.
        """
        groups: set[asyncio.Task[None]] = set()
        try:
            while True:
                status = await patiently(self._daemon.status)
                self._on_status(status)
                if published_steps(status) >= self._settings.steps:
                    return status
                if status["trainer"]["stage"] == "stopped":
                    raise UserError(status["trainer"]["problem"])
                await self._gate.set_limit(BACKGROUND_ROLLOUTS if status["step"] else None)
                for _ in range(groups_to_begin(status, self._begun, self._settings)):
                    self._begun += 1
                    groups.add(asyncio.create_task(self._group(next(self._tasks))))
                for group in [group for group in groups if group.done()]:
                    group.result()
                    groups.remove(group)
                await asyncio.sleep(POLL_SECONDS)
        finally:
            for group in groups:
                group.cancel()
            await asyncio.gather(*groups, return_exceptions=True)

    async def _group(self, task: Task) -> None:
        rollouts = (self._rollout(task, k) for k in range(self._settings.group_size))
        await asyncio.gather(*rollouts)

    async def _rollout(self, task: Task, number: int) -> None:
        """Run one rollout; where the infrastructure fails it, again under a new run id."""
        async with self._gate:
            began = time.monotonic()
            for attempt in range(ATTEMPTS):
                run = f"{task.name}.{number}" + (f".{attempt}" if attempt else "")
                if await self._attempt(run, task):
                    break
            await self._gate.rest(time.monotonic() - began)

    async def _attempt(self, run: str, task: Task) -> bool:
        """Return whether the attempt says something about the model."""
        await patiently(
            lambda: self._daemon.register_run(
                run, group=task.name, group_size=self._settings.group_size, task=task.name
            )
        )
        started = time.time()
        result = await self._agent.run(Rollout(run, self._base_url(run), SERVED_MODEL_NAME, task))
        graded = None
        status = "completed"
        if result.failure == "infrastructure":
            status = "infrastructure_failure"
        else:
            if result.failure == "agent":
                status = "agent_failure"
            graded = grade(task, Transcript(result.calls, result.final_output))
            reward = graded.reward
            await patiently(lambda: self._daemon.reward(run=run, value=reward, key=run))
        await patiently(lambda: self._daemon.end_run(run, status))
        self._record(run, task, started, result, graded)
        return graded is not None

    def _record(
        self, run: str, task: Task, started: float, result: Result, graded: Grade | None
    ) -> None:
        attempt = Attempt(
            run=run,
            group=task.name,
            started=started,
            ended=time.time(),
            failure=result.failure,
            error=result.error,
            reward=graded.reward if graded else None,
            parts=graded.parts if graded else {},
            calls=result.calls,
            final_output=result.final_output,
            replies=result.replies,
            longest_gap_s=result.longest_gap_s,
        )
        self._journal.add(attempt)
        self._on_attempt(attempt)


class Gate:
    """An async context that at most ``limit`` tasks are in at once; None: any number."""

    def __init__(self) -> None:
        self._limit: int | None = None
        self._inside = 0
        self._changed = asyncio.Condition()

    async def set_limit(self, limit: int | None) -> None:
        async with self._changed:
            self._limit = limit
            self._changed.notify_all()

    async def rest(self, seconds: float) -> None:
        """Sleep, but only as long as there is a limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self._limit is None)

    async def __aenter__(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._limit is None or self._inside < self._limit)
            self._inside += 1

    async def __aexit__(self, *_: object) -> None:
        async with self._changed:
            self._inside -= 1
            self._changed.notify_all()


def published_steps(status: dict[str, Any]) -> int:
    """Return how many trained versions have gone live."""
    return sum(v["step"] is not None and v["live_from"] is not None for v in status["versions"])


def groups_to_begin(status: dict[str, Any], begun: int, settings: Settings) -> int:
    """Return how many groups to begin now.

    Args:
        status: the daemon's status.
        begun: groups begun so far, whether or not the daemon has heard of them.
    """
    groups, step = status["groups"], status["step"]
    decided = sum(n for state, n in groups.items() if state not in ("open", "planned"))
    lost = decided - groups.get("trained", 0)
    room = settings.groups_per_step - (begun - decided)
    if step is not None and step["status"] == "planned":
        room += settings.spare_groups
    elif step is not None:
        # Its version is not live yet: what begins now would still meet the old one.
        room -= settings.groups_per_step
    needed = settings.steps * settings.groups_per_step + lost - begun
    return max(0, min(room, needed))


async def patiently[T](request: Callable[[], Awaitable[T]]) -> T:
    """Repeat a request until a daemon answers; it may be restarting."""
    wait = 0.1
    while True:
        try:
            return await request()
        except DaemonUnreachable:
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)
