"""The whole daemon over HTTP, with real shards and the trainer and engine of ``fakes``."""

import asyncio
import contextlib
import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemon import scheduler as scheduling
from daemon.client import AsyncDaemonClient, DaemonClient, DaemonUnreachable, format_status
from daemon.config import DaemonConfig
from daemon.program import check_engine, serve
from daemon.state import State
from deploy.cli import main
from deploy.errors import UserError
from sidecar.access.keys import RunKeys
from tests.daemon.fakes import FakeEngine, FakeTrainer, read_journal
from tests.daemon.recorded import append, exchange
from trainer.batch import Batch
from trainer.errors import TrainerDied, TrainingRejected


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Running:
    """A daemon in this process, and what a rollout controller does with it."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.traces = folder / "traces"
        self.directory = folder / "state"
        self.traces.mkdir(exist_ok=True)
        self.config = DaemonConfig(
            **{
                "traces": str(self.traces),
                "directory": str(self.directory),
                "listen": f"127.0.0.1:{free_port()}",
                "poll_seconds": 0.05,
                "engine_poll_seconds": 0.05,
                "settle_seconds": 0.0,
                "groups_per_step": 1,
                "trainer_restart_seconds": 0.01,
                **changes,
            }
        )
        self.url = f"http://{self.config.listen}"
        self.client = AsyncDaemonClient(self.url)
        self.engine = FakeEngine(self.directory)
        self.trainer = FakeTrainer(self.directory)
        self.task: asyncio.Task[int] | None = None

    async def start(self) -> None:
        make = (lambda report: self.trainer) if self.config.train else None
        limit = self.config.max_sequence_tokens
        self.task = asyncio.create_task(serve(self.config, self.engine, make, limit))
        await self.until(lambda status: True)

    async def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.task

    async def until(self, met: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Poll the status until it meets a condition."""
        deadline = time.monotonic() + 15
        while True:
            assert self.task is not None
            if self.task.done():
                self.task.result()
            try:
                status = await self.client.status()
                if met(status):
                    return status
            except DaemonUnreachable:
                status = None
            assert time.monotonic() < deadline, status
            await asyncio.sleep(0.02)

    async def live(self, version: str) -> dict[str, Any]:
        return await self.until(lambda status: status["live_version"] == version)

    async def rollout(
        self,
        run: str,
        reward: float | None,
        *,
        group: str | None = "g",
        size: int = 2,
        status: str | None = "completed",
        **fields: Any,
    ) -> None:
        """One whole rollout with one call."""
        await self.client.register_run(run, group=group, group_size=size)
        append(self.traces / run, [[exchange(f"call-{run}", run=run, **fields)]])
        if reward is not None:
            await self.client.reward(run=run, value=reward)
        if status is not None:
            await self.client.end_run(run, status)


@pytest.fixture
async def daemon(tmp_path):
    running: list[Running] = []

    async def start(**changes: Any) -> Running:
        one = Running(tmp_path, **changes)
        running.append(one)
        await one.start()
        return one

    yield start
    for one in running:
        await one.stop()


async def test_group_becomes_a_version(daemon):
    one = await daemon()
    await one.live("v0")
    await one.rollout("a", 1.0, versions=["v0"])
    await one.rollout("b", 0.0)
    status = await one.live("v1")
    assert status["status"] == "ok", status["problems"]
    assert status["calls"] == {"trained": 2}
    assert status["samples"] == {"trained": 2}
    assert status["checks"] == {"calls": 2, "failed": 0, "failures": {}}
    assert status["groups"] == {"trained": 1} and status["untrained_groups"] == 0
    assert one.engine.version == "v1"
    first, second = status["versions"]
    assert first["version"] == "v0" and first["status"] == "retired"
    assert second["status"] == "live" and second["live_until"] is None
    expected = {
        "reward_mean": 0.5,
        "rollouts": 2,
        "samples": 2,
        "sampled_tokens": 4,
        "staleness_max": 0,
        "kl_rollout_trainer": 0.001,
        "logprob_abs_diff_mean": 1e-5,
        "swap_pause_s": 0.1,
        "samples_left_out": 0,
    }
    assert {key: second[key] for key in expected} == expected
    text = format_status(status)
    assert "2 calls checked, 0 failed" in text and "v1" in text


async def test_batch_holds_the_captured_tokens(daemon):
    one = await daemon()
    await one.rollout("a", 1.0, prompt=[1, 2], outputs=[[3, 4]])
    await one.rollout("b", 0.25, prompt=[1, 2], outputs=[[5]])
    await one.live("v1")
    batch = Batch.load(one.directory / "batches" / "step-000001.npz")
    assert [(r.run, r.group, r.reward) for r in batch.rollouts] == [
        ("a", "g", 1.0),
        ("b", "g", 0.25),
    ]
    assert [s.token_ids.tolist() for s in batch.samples] == [[1, 2, 3, 4], [1, 2, 5]]
    assert batch.samples[0].logprobs[2:].tolist() == pytest.approx([-0.503, -0.504])


async def test_run_and_call_say_what_became_of_them(daemon):
    one = await daemon()
    await one.rollout("a", 1.0, outputs=[[4, 5]], versions=["v0"])
    await one.rollout("b", 0.0)
    await one.live("v1")
    run = await one.client.run("a")
    assert run["state"] == "trained" and run["trained"] == {"step": 1, "reward": 1.0}
    (call,) = run["calls"]
    assert call["versions"] == [[0, "v0"]] and call["fork"] == "root"
    assert call["reason"] == "step 1"
    with pytest.raises(UserError, match="no run nobody"):
        await one.client.run("nobody")


async def test_zero_variance_group_is_skipped_and_says_so(daemon):
    one = await daemon()
    await one.rollout("a", 1.0)
    await one.rollout("b", 1.0)
    status = await one.until(lambda s: s["groups"].get("skipped") == 1)
    assert status["skipped_groups"] == {"g": "zero reward variance (all 1)"}
    assert status["left_out"] == {"group skipped: zero reward variance (all 1)": 2}
    with pytest.raises(UserError, match="group g has already been skipped"):
        await one.client.register_run("c", group="g", group_size=2)


async def test_infrastructure_failure_is_replaced(daemon):
    one = await daemon()
    await one.rollout("a", 1.0)
    await one.rollout("b", None, status="infrastructure_failure")
    await one.until(lambda s: s["waiting"] == {"g": "1 of 2 rollouts have come"})
    await one.rollout("b2", 0.0)
    await one.live("v1")
    assert (await one.client.run("b"))["reason"] == "infrastructure_failure"


async def test_stale_calls_are_left_out(daemon):
    one = await daemon(max_staleness=0)
    await one.rollout("a", 1.0)
    await one.rollout("b", 0.0)
    await one.live("v1")
    await one.rollout("c", 1.0, group="h", versions=["v0", "v1"])
    await one.rollout("d", 0.0, group="h", versions=["v1"])
    status = await one.until(lambda s: s["groups"].get("skipped") == 1)
    assert "1 of 2 rollouts usable" in status["skipped_groups"]["h"]
    assert (await one.client.run("c"))["calls"][0]["reason"] == "stale (more than 0 versions old)"


async def test_tokens_of_an_unknown_version_and_too_long_calls_are_left_out(daemon):
    one = await daemon(max_sequence_tokens=6)
    await one.rollout("a", 1.0, versions=["v7"])
    await one.rollout("b", 0.0, outputs=[[4, 5, 6, 7]])
    status = await one.until(lambda s: s["groups"].get("skipped") == 1)
    assert set(status["left_out"]) == {
        "sampled by a version that this daemon does not have (newer than v0)",
        "too long (more than 6 tokens)",
    }


async def test_failed_checks_are_loud(daemon):
    one = await daemon()
    await one.rollout("a", 1.0, tap=[])
    await one.rollout("b", 0.0, params={"top_p": 0.9})
    status = await one.until(lambda s: s["checks"]["failed"] == 2)
    assert status["checks"]["failures"] == {"no engine tokens": 1, "sampling filter": 1}
    assert status["problems"] == [
        "token check 'no engine tokens' failed for 1 calls, which are not trained"
    ]
    assert "no engine tokens: 1" in format_status(status)


async def test_traffic_without_groups_forms_batches_of_its_own(daemon):
    one = await daemon(runs_per_step=3)
    for k in range(3):
        await one.rollout(f"r{k}", float(k), group=None)
    status = await one.live("v1")
    assert status["versions"][1]["rollouts"] == 3
    batch = Batch.load(one.directory / "batches" / "step-000001.npz")
    assert {r.group for r in batch.rollouts} == {None}


async def test_a_small_step_starts_after_the_longest_wait(daemon):
    one = await daemon(groups_per_step=8, max_wait_seconds=0.5)
    await one.rollout("a", 1.0)
    await one.rollout("b", 0.0)
    await one.live("v1")


async def test_idle_run_ends_and_late_reward_still_counts(daemon):
    one = await daemon(idle_seconds=0.3, runs_per_step=2)
    for k in range(2):
        append(one.traces / f"{k}", [[exchange(f"c{k}", run=f"r{k}", started=time.time())]])
    await one.until(lambda s: s["runs"] == {"ended": 2})
    await one.client.reward(run="r0", value=1)
    await one.client.reward(call="c1", value=0)
    await one.live("v1")


async def test_run_waits_for_its_named_rewards_and_sums_them(daemon):
    one = await daemon(runs_per_step=2)
    for run in ("a", "b"):
        await one.client.register_run(run, rewards=["tests", "style"])
        append(one.traces / run, [[exchange(f"call-{run}", run=run)]])
        await one.client.reward(run=run, value=0.5, name="tests")
        await one.client.end_run(run)
    await one.until(lambda s: s["calls"] == {"waiting": 2} and s["runs"] == {"ended": 2})
    await asyncio.sleep(0.5)
    assert (await one.client.status())["live_version"] == "v0"
    await one.client.reward(run="a", value=0.25, name="style")
    await one.client.reward(run="b", value=0.5, name="style")
    await one.live("v1")
    batch = Batch.load(one.directory / "batches" / "step-000001.npz")
    assert [r.reward for r in batch.rollouts] == [0.75, 1.0]


async def test_rewards_are_idempotent_by_key_and_closed_after_the_decision(daemon):
    one = await daemon()
    await one.client.register_run("a", group="g", group_size=2)
    for value in (0.5, 0.5, 1.0):
        await one.client.reward(run="a", value=value, key="k")
    assert [r["value"] for r in (await one.client.run("a"))["rewards"]] == [1.0]
    with pytest.raises(UserError, match="belongs to another run or call"):
        await one.client.reward(run="b", value=1, key="k")
    append(one.traces / "a", [[exchange("call-a", run="a")]])
    await one.client.end_run("a")
    await one.rollout("b", 0.0)
    await one.live("v1")
    await one.client.reward(run="a", value=1.0, key="k")
    with pytest.raises(UserError, match="has already been decided: trained"):
        await one.client.reward(run="a", value=0.0, key="k")
    with pytest.raises(UserError, match="already ended: completed"):
        await one.client.end_run("a", "agent_failure")
    await one.client.end_run("a")


async def test_reward_window_closes(daemon):
    one = await daemon(reward_window_seconds=0.0)
    await one.client.register_run("a")
    await one.client.end_run("a")
    await asyncio.sleep(0.05)
    with pytest.raises(UserError, match=r"window is closed|already been decided"):
        await one.client.reward(run="a", value=1.0)


async def test_call_of_a_decided_run_is_kept_but_not_trained(daemon):
    one = await daemon()
    await one.rollout("a", 1.0)
    await one.rollout("b", 0.0)
    await one.live("v1")
    append(one.traces / "late", [[exchange("late", run="a")]])
    status = await one.until(lambda s: s["calls"].get("left_out") == 1)
    assert status["left_out"] == {"arrived after its run was decided": 1}


# Faults of the trainer and the engine


async def test_trainer_that_dies_repeats_the_same_step(daemon):
    one = await daemon()
    one.trainer.deaths = [TrainerDied("killed by signal 9")] * 3
    await one.rollout("a", 1.0)
    await one.rollout("b", 0.0)
    status = await one.live("v1")
    assert status["trainer"]["deaths"] == 3
    assert [e["version"] for e in read_journal(one.directory / "trained.jsonl")] == ["v0", "v1"]


async def test_batch_that_always_kills_the_trainer_is_rejected(daemon):
    one = await daemon()
    one.trainer.deaths = [TrainerDied("killed by signal 9")] * scheduling.MAX_DEATHS_PER_STEP
    await one.rollout("a", 1.0)
    await one.rollout("b", 0.0)
    await one.until(lambda s: s["samples"] == {"rejected": 2})
    await one.rollout("c", 1.0, group="h")
    await one.rollout("d", 0.0, group="h")
    await one.live("v2")


async def test_rejected_batch_is_left_out_and_training_goes_on(daemon):
    one = await daemon()
    one.trainer.rejections = [TrainingRejected("the loss is not finite")]
    await one.rollout("a", 1.0)
    await one.rollout("b", 0.0)
    status = await one.until(lambda s: s["samples"] == {"rejected": 2})
    assert status["left_out"] == {"step 1 rejected: the loss is not finite": 2}
    assert any("the loss is not finite" in problem for problem in status["problems"])
    await one.rollout("c", 1.0, group="h")
    await one.rollout("d", 0.0, group="h")
    status = await one.live("v2")
    assert [v["version"] for v in status["versions"]] == ["v0", "v2"]
    assert status["versions"][1]["parent"] == "v0"


async def test_training_stops_after_three_rejections(daemon):
    one = await daemon()
    one.trainer.rejections = [TrainingRejected("no")] * 9
    for k in range(4):
        await one.rollout(f"a{k}", 1.0, group=f"g{k}")
        await one.rollout(f"b{k}", 0.0, group=f"g{k}")
    status = await one.until(lambda s: s["trainer"]["stage"] == "stopped")
    assert status["samples"] == {"rejected": 6} and status["calls"]["waiting"] == 2
    assert "3 steps in a row were rejected" in status["trainer"]["problem"]


async def test_failed_canary_rejects_the_version(daemon):
    one = await daemon()
    one.engine.canary_fails = {"v1"}
    await one.rollout("a", 1.0)
    await one.rollout("b", 0.0)
    status = await one.until(lambda s: s["samples"] == {"rejected": 2})
    assert status["live_version"] == "v0" == one.engine.version
    assert any("canary of v1" in problem for problem in status["problems"])
    await one.rollout("c", 1.0, group="h")
    await one.rollout("d", 0.0, group="h")
    status = await one.live("v2")
    assert [(v["version"], v["status"]) for v in status["versions"]] == [
        ("v0", "retired"),
        ("v1", "rejected"),
        ("v2", "live"),
    ]
    assert status["versions"][2]["parent"] == "v0"


async def test_restarted_engine_gets_the_live_version_again(daemon):
    one = await daemon()
    await one.rollout("a", 1.0)
    await one.rollout("b", 0.0)
    before = (await one.live("v1"))["versions"]
    one.engine.restart("v0")
    status = await one.until(
        lambda s: one.engine.version == "v1" and s["engine"]["version"] == "v1"
    )
    assert status["versions"] == before


async def test_daemon_waits_for_an_engine_and_reads_traces_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduling, "RETRY_SECONDS", 0.05)
    one = Running(tmp_path)
    one.engine.unreachable = True
    await one.start()
    try:
        await one.rollout("a", 1.0)
        status = await one.until(lambda s: s["calls"] == {"waiting": 1})
        assert status["status"] == "degraded" and status["live_version"] is None
        assert any("no vLLM answers" in problem for problem in status["problems"])
        one.engine.unreachable = False
        await one.rollout("b", 0.0)
        status = await one.live("v1")
        await one.until(lambda s: s["status"] == "ok")
    finally:
        await one.stop()


async def test_restarted_daemon_knows_everything(daemon, tmp_path):
    one = await daemon()
    await one.rollout("a", 1.0)
    await one.rollout("b", 0.0)
    before = await one.live("v1")
    await one.stop()
    two = await daemon()
    after = await two.live("v1")
    for key in ("calls", "samples", "runs", "groups", "versions"):
        assert after[key] == before[key]
    await two.rollout("c", 1.0, group="h")
    await two.rollout("d", 0.0, group="h")
    await two.live("v2")


async def test_without_training_it_only_reads(daemon):
    one = await daemon(train=False)
    await one.rollout("a", 1.0)
    await one.rollout("b", 0.0)
    status = await one.until(lambda s: s["calls"] == {"waiting": 2})
    assert status["trainer"]["stage"] == "off" and status["versions"] == []
    format_status(status)


# The API


def request(url: str, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
    message = urllib.request.Request(url + path, data=body, method=method)
    try:
        with urllib.request.urlopen(message, timeout=10) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, msgspec.json.decode(error.read())["error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/v1/rewards", b"{", 400, "Input data was truncated"),
        ("/v1/rewards", b'{"run": "a"}', 400, "missing required field `value`"),
        ("/v1/rewards", b'{"run": "a", "value": "1"}', 400, "Expected `float`, got `str`"),
        ("/v1/rewards", b'{"run": "a", "value": true}', 400, "Expected `float`, got `bool`"),
        ("/v1/rewards", b'{"value": 1}', 400, "either a run or a call"),
        ("/v1/rewards", b'{"value": 1, "run": "a", "call": "b"}', 400, "either a run or a call"),
        ("/v1/rewards", b'{"value": 1e999, "run": "a"}', 400, "out of range"),
        ("/v1/rewards", b'{"value": NaN, "run": "a"}', 400, "has to be a finite number, not NaN"),
        ("/v1/rewards", b'{"value": -Infinity, "run": "a"}', 400, "number, not -Infinity"),
        ("/v1/rewards", b'{"value": 1, "run": "a", "what": 2}', 400, "unknown field `what`"),
        ("/v1/rewards", b'{"value": -1.1e6, "run": "a"}', 400, "between -1000000 and 1000000"),
        ("/v1/rewards", b"[" * 200_000, 400, "POST /v1/rewards: "),
        ("/v1/rewards", b"\xff\xfe", 400, "POST /v1/rewards: "),
        ("/v1/rewards", rb'{"run": "\ud800", "value": 1}', 400, "POST /v1/rewards: "),
        ("/v1/runs", b'{"run": "a", "group": "g", "group_size": 10001}', 400, "<= 10000"),
        ("/v1/runs", b'{"run": ""}', 400, "length >= 1"),
        ("/v1/runs", b'{"run": "a", "group": "g", "group_size": 0}', 400, ">= 1"),
        ("/v1/runs/nobody/end", b'{"status": "completed"}', 404, "no run nobody"),
        ("/v1/runs/nobody/end", b'{"status": "fine"}', 400, "Invalid enum value 'fine'"),
        ("/v1/nothing", b"{}", 404, "POST /v1/nothing: Not Found"),
    ],
)
async def test_bad_requests_get_one_clear_line(daemon, path, body, status, text):
    one = await daemon(train=False)
    got, error = await asyncio.to_thread(request, one.url, "POST", path, body)
    assert got == status
    assert text in error and "\n" not in error


async def test_run_can_not_change_its_group(daemon):
    one = await daemon(train=False)
    await one.client.register_run("a", group="g", group_size=2)
    await one.client.register_run("a", group="g", group_size=2)
    with pytest.raises(UserError, match="already registered in group g"):
        await one.client.register_run("a", group="h", group_size=2)


async def test_runs_of_a_group_agree_on_its_size(daemon):
    one = await daemon(train=False)
    await one.client.register_run("a", group="g", group_size=2)
    said = r"group g was announced with group_size 2 \(run a\), not 3"
    with pytest.raises(UserError, match=said):
        await one.client.register_run("b", group="g", group_size=3)
    await one.client.register_run("b", group="g", group_size=2)
    await one.client.register_run("c", group="g")
    await one.client.register_run("d", group="h", group_size=3)


@pytest.mark.parametrize("changes", [{"group_size": 3}, {"task": "u"}, {"rewards": ["b"]}])
async def test_run_can_not_be_registered_otherwise(daemon, changes):
    one = await daemon(train=False)
    said = {"group": "g", "group_size": 2, "task": "t", "rewards": ["a", "c"]}
    await one.client.register_run("a", **said)
    await one.client.register_run("a", **{**said, "rewards": ["c", "a"]})
    with pytest.raises(UserError, match="already registered with"):
        await one.client.register_run("a", **{**said, **changes})


async def test_reward_key_belongs_to_one_name(daemon):
    one = await daemon(train=False)
    await one.client.reward(run="a", value=1.0, name="x", key="k")
    await one.client.reward(run="a", value=1.0, name="x", key="k")
    with pytest.raises(UserError, match="key k belongs to the reward 'x'"):
        await one.client.reward(run="a", value=1.0, name="y", key="k")


async def test_default_reward_keys_do_not_collide(daemon):
    one = await daemon(train=False)
    given = [
        await one.client.reward(run="p", name="q/r", value=1.0),
        await one.client.reward(call="p", name="q/r", value=1.0),
        await one.client.reward(call="p/q", name="r", value=1.0),
        await one.client.reward(call="p%2Fq", name="r", value=1.0),
    ]
    assert len({reply["key"] for reply in given}) == 4


@pytest.mark.parametrize("run", ["run 20", "a/b", "-a", "ä", "a" * 129, "a%20b"])
async def test_what_is_no_run_id_is_refused(daemon, run):
    one = await daemon(train=False)
    with pytest.raises(ValueError, match="is not a run id") as elsewhere:
        RunKeys(b"").issue(run)
    for path, body in (("/v1/runs", {"run": run}), ("/v1/rewards", {"run": run, "value": 1.0})):
        raw = msgspec.json.encode(body)
        got, error = await asyncio.to_thread(request, one.url, "POST", path, raw)
        assert (got, error) == (400, str(elsewhere.value))
    assert (await one.client.status())["runs"] == {}


async def test_runs_that_nobody_named_can_be_rewarded(daemon):
    one = await daemon(train=False)
    headers = [("x-session-id", "a b/c")]
    calls = [
        exchange("1", run=None, headers=headers),
        exchange("2", run=None, session="told, with blanks"),
    ]
    await one.client.reward(run="session:a b/c", value=1.0)
    append(one.traces / "x", [calls])
    await one.until(lambda status: status["runs"] == {"open": 2})
    for run in ("session:a b/c", "told, with blanks"):
        await one.client.reward(run=run, value=0.5)
        assert [r["value"] for r in (await one.client.run(run))["rewards"]] == [0.5]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_client_gives_no_reward_that_is_not_finite(value):
    client = DaemonClient(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(UserError, match=f"has to be a finite number, not {value}"):
        client.reward(run="a", value=value)


async def test_fault_of_the_daemon_is_json_too(daemon, monkeypatch):
    one = await daemon(train=False)

    def fake_full_disk(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(State, "register_run", fake_full_disk)
    got, error = await asyncio.to_thread(request, one.url, "POST", "/v1/runs", b'{"run": "a"}')
    assert (got, error) == (500, "POST /v1/runs: OSError, see the daemon's log")


async def test_health_and_metrics(daemon):
    one = await daemon()
    await one.rollout("a", 1.0)
    await one.rollout("b", 0.0)
    await one.live("v1")
    status, body = await asyncio.to_thread(request, one.url, "GET", "/healthz")
    assert (status, msgspec.json.decode(body)) == (200, {"status": "ok", "problems": []})
    status, body = await asyncio.to_thread(request, one.url, "GET", "/metrics")
    lines = body.decode().splitlines()
    assert 'ridealong_calls{status="trained"} 2.0' in lines
    assert "ridealong_live_version 1.0" in lines


def test_client_without_a_daemon():
    with pytest.raises(DaemonUnreachable, match="start it with `ridealong daemon`"):
        DaemonClient(f"http://127.0.0.1:{free_port()}").status()


async def test_two_daemons_on_one_directory(daemon):
    one = await daemon(train=False)
    with pytest.raises(UserError, match="another daemon runs on"):
        await serve(one.config, one.engine, None, 100)


async def test_occupied_port(daemon, tmp_path):
    one = await daemon(train=False)
    config = msgspec.structs.replace(one.config, directory=str(tmp_path / "other"))
    with pytest.raises(UserError, match="can't be used"):
        await serve(config, one.engine, None, 100)


async def test_trace_folder_that_can_not_be_made(tmp_path):
    (tmp_path / "file").touch()
    config = DaemonConfig(
        traces=str(tmp_path / "file" / "traces"), directory=str(tmp_path), listen="127.0.0.1:0"
    )
    with pytest.raises(UserError, match=r"daemon\.traces .* can't be used"):
        await serve(config, FakeEngine(tmp_path), None, 100)


async def test_trace_folder_that_was_made_is_told(daemon, tmp_path, caplog):
    await daemon(train=False)
    assert "did not exist" not in caplog.text
    await daemon(train=False, traces=str(tmp_path / "nowhere"), directory=str(tmp_path / "other"))
    told = f"daemon.traces {tmp_path / 'nowhere'} did not exist and has been made"
    assert [r.levelname for r in caplog.records if told in r.message] == ["WARNING"]


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ("foo", "'foo': give the vLLM server's URL, such as http://127.0.0.1:8000"),
        ("ftp://a", "give the vLLM server's URL"),
        ("http://", "give the vLLM server's URL"),
        ("http://a:b", "is not a URL"),
        ("http://[", "is not a URL"),
        ("http://a?b", "leave out query and fragment"),
    ],
)
def test_bad_engine_url(tmp_path, capsys, engine, text):
    # What is wrong with the address comes later, and ends a daemon that takes the engine.
    flags = ["--engine", engine, "--directory", str(tmp_path), "--listen", "0.0.0.0:1"]
    assert main(["daemon", *flags, "--set", "daemon.train=false"]) == 2
    error = capsys.readouterr().err
    assert "daemon.engine" in error and text in error


def test_engine_urls():
    for url in ("http://127.0.0.1:8000", "https://me:secret@host/prefix/", "http://[::1]:8000"):
        check_engine(url)


@pytest.mark.parametrize("listen", ["0.0.0.0:8790", "8790", "127.0.0.1:x", "example.org:80"])
async def test_bad_listen_address(tmp_path, listen):
    config = DaemonConfig(directory=str(tmp_path), listen=listen)
    with pytest.raises(UserError, match=r"daemon\.listen"):
        await serve(config, FakeEngine(tmp_path), None, 100)


def test_a_run_is_never_in_two_steps(tmp_path):
    """The database itself refuses it, whatever a bug in the planner may ask for."""
    import sqlite3

    from daemon.state import Plan

    state = State(tmp_path / "daemon.db")

    def plan(number: int, run: str, sample: str) -> Plan:
        return Plan(
            number=number,
            parent="v0",
            version=f"v{number}",
            batch="b",
            digest="d",
            rollouts={run: 1.0},
            samples={sample: (4, 2)},
            trained=[],
            groups=[],
            metrics={},
        )

    state.plan_step(plan(1, "a", "a/0"), {}, {})
    for again in (plan(2, "a", "a/1"), plan(2, "b", "a/0")):
        with pytest.raises(sqlite3.IntegrityError):
            state.plan_step(again, {}, {})
    assert len(state.rows("SELECT * FROM steps")) == 1
    state.close()
