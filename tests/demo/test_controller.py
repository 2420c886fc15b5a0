import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from daemon.client import DaemonUnreachable
from deploy.demo import controller as module
from deploy.demo.agent_messages import Result, Rollout
from deploy.demo.controller import Controller, Gate, groups_to_begin, published_steps
from deploy.demo.grader import ToolCall
from deploy.demo.journal import Journal
from deploy.demo.settings import Settings
from deploy.demo.tasks import answer, tasks
from deploy.errors import UserError

SETTINGS = Settings(seed=0, steps=3, groups_per_step=2, group_size=2, spare_groups=1)


def status(
    step: str | None = None, published: int = 0, stage: str = "", **groups: int
) -> dict[str, Any]:
    versions = [{"step": None, "live_from": 1.0}]
    versions += [{"step": k, "live_from": 1.0} for k in range(1, published + 1)]
    return {
        "groups": groups,
        "step": {"status": step} if step else None,
        "versions": [*versions, {"step": published + 1, "live_from": None}],
        "trainer": {"stage": stage, "problem": "the batch is bad"},
    }


def test_only_published_steps_count():
    assert published_steps(status(published=2)) == 2


@pytest.mark.parametrize(
    ("begun", "now", "expected"),
    [
        (0, status(), 2),
        (2, status(open=1), 0),  # begun, though the daemon has heard of one only
        (2, status(planned=2, step="planned"), 1),  # the spare group, while the trainer works
        (3, status(open=1, planned=2, step="planned"), 0),
        (3, status(open=1, trained=2, step="trained"), 0),  # trained, not yet published
        (3, status(open=1, trained=2, published=1), 1),
        (4, status(open=2, trained=2, published=1), 0),
        (4, status(planned=2, trained=2, published=1, step="planned"), 1),
        (6, status(planned=2, trained=4, published=2, step="planned"), 0),  # the last step
        (5, status(open=1, trained=4, published=2), 1),
        (6, status(open=1, trained=4, skipped=1, published=2), 1),  # a lost group is replaced
    ],
)
def test_back_pressure(begun: int, now: dict[str, Any], expected: int):
    assert groups_to_begin(now, begun, SETTINGS) == expected


async def test_the_gate_keeps_to_its_limit_as_it_changes():
    gate, inside, most = Gate(), 0, 0

    async def enter() -> None:
        nonlocal inside, most
        async with gate:
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.01)
            inside -= 1

    await gate.set_limit(2)
    await asyncio.gather(*(enter() for _ in range(6)))
    assert most == 2
    await gate.set_limit(None)
    await asyncio.gather(*(enter() for _ in range(6)))
    assert most == 6


async def test_a_rest_ends_when_the_limit_is_lifted():
    gate = Gate()
    await gate.set_limit(1)
    resting = asyncio.create_task(gate.rest(60))
    await asyncio.wait({resting}, timeout=0.02)
    assert not resting.done()
    await gate.set_limit(None)
    await asyncio.wait_for(resting, 1)
    await asyncio.wait_for(gate.rest(60), 1)
    await gate.set_limit(1)
    await asyncio.wait_for(gate.rest(0.01), 1)


class FakeUnsteadyDaemon:
    """Trains every two complete groups; every third request finds no daemon, as in a restart."""

    def __init__(self) -> None:
        self.requests = count(1)
        self.groups: dict[str, set[str]] = {}
        self.rewards: dict[str, float] = {}
        self.ends: dict[str, str] = {}
        self.stage = ""

    def _steady(self) -> None:
        if next(self.requests) % 3 == 0:
            raise DaemonUnreachable("restarting")

    async def status(self) -> dict[str, Any]:
        self._steady()
        done = [g for g, runs in self.groups.items() if self._complete(runs)]
        trained = len(done) // 2 * 2
        return status(
            published=trained // 2,
            open=len(self.groups) - trained,
            trained=trained,
            stage=self.stage,
        )

    def _complete(self, runs: set[str]) -> bool:
        sound = [run for run in runs if self.ends.get(run) not in (None, "infrastructure_failure")]
        return len(sound) == SETTINGS.group_size

    async def register_run(self, run: str, *, group: str, group_size: int, task: str) -> None:
        self._steady()
        assert group_size == SETTINGS.group_size
        self.groups.setdefault(group, set()).add(run)

    async def reward(self, *, run: str, value: float, key: str) -> None:
        self._steady()
        self.rewards[run] = value

    async def end_run(self, run: str, ending: str) -> None:
        self._steady()
        self.ends[run] = ending


class FakeFailingAgent:
    """Answers right; the first attempt of every second rollout meets a broken server."""

    def __init__(self) -> None:
        self.rollouts: list[str] = []

    async def run(self, rollout: Rollout) -> Result:
        self.rollouts.append(rollout.rollout)
        await asyncio.sleep(0)
        if rollout.rollout.endswith(".1"):
            return Result(rollout.rollout, failure="infrastructure", error="connection reset")
        asked = rollout.task.asked
        call = ToolCall("price", f'{{"item": "{asked.item}"}}')
        if rollout.rollout.endswith(".0"):
            return Result(rollout.rollout, [call], None, "agent", "too many turns")
        return Result(rollout.rollout, [call], answer(asked))


def controller(daemon: Any, agent: Any, journal: Journal) -> Controller:
    return Controller(
        SETTINGS,
        daemon,
        agent,
        tasks(0),
        lambda run: f"http://sidecar/r/{run}/v1",
        journal,
        lambda status: None,
        lambda attempt: None,
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(module, "LONGEST_WAIT_SECONDS", 0.01)


async def test_the_loop_outlives_an_unsteady_daemon_and_a_broken_server(tmp_path: Path):
    daemon, agent = FakeUnsteadyDaemon(), FakeFailingAgent()
    journal = Journal(tmp_path / "rollouts.jsonl")
    last = await asyncio.wait_for(controller(daemon, agent, journal).run(), 20)
    assert published_steps(last) == SETTINGS.steps
    assert len(daemon.groups) == SETTINGS.steps * SETTINGS.groups_per_step
    for runs in daemon.groups.values():
        endings = {run.partition(".")[2]: daemon.ends[run] for run in runs}
        assert endings == {
            "0": "agent_failure",
            "1": "infrastructure_failure",
            "1.1": "infrastructure_failure",
            "1.2": "completed",
        }
    # A failure of the infrastructure gets no reward, a failure of the agent does.
    assert {run.partition(".")[2]: value for run, value in daemon.rewards.items()} == {
        "0": 0.6,
        "1.2": 1.0,
    }
    assert len(agent.rollouts) == len(set(agent.rollouts)) == len(journal.attempts)
    assert len((tmp_path / "rollouts.jsonl").read_bytes().splitlines()) == len(journal.attempts)


async def test_training_that_has_stopped_ends_the_demo_with_its_reason(tmp_path: Path):
    daemon = FakeUnsteadyDaemon()
    daemon.stage = "stopped"
    with pytest.raises(UserError, match="the batch is bad"):
        await controller(daemon, FakeFailingAgent(), Journal(tmp_path / "r.jsonl")).run()
