"""Who called, what for and as which attempt: from shards into the state and into training."""

import sqlite3

import msgspec
import pytest

from daemon import exchange as exchanges
from daemon.client import format_status
from daemon.ingest import Ingester
from daemon.rollouts import beside_the_agent
from daemon.state import MIGRATIONS, State
from sidecar.traces.record import Exchange
from tests.daemon.recorded import append, exchange
from tests.daemon.test_daemon import Running
from tokenization.calls import Call

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {}}}
TITLE = [{"role": "system", "content": "You are a title generator."}, *HI]


@pytest.fixture
async def daemon(tmp_path):
    running: list[Running] = []

    async def start(**changes) -> Running:
        running.append(Running(tmp_path, **changes))
        await running[-1].start()
        return running[-1]

    yield start
    for one in running:
        await one.stop()


def kept(state: State) -> dict[str, dict]:
    return {row["id"]: row for row in state.rows("SELECT * FROM calls")}


def at(call: Exchange, path: str) -> Exchange:
    return msgspec.structs.replace(call, request=msgspec.structs.replace(call.request, path=path))


async def test_caller_and_tools_are_kept(traces, state, ingester):
    headers = [
        ("User-Agent", "claude-cli/2.1.332 (external, cli)"),
        ("X-Claude-Code-Session-Id", "s"),
        ("x-claude-code-agent-id", "a"),
    ]
    append(traces / "a", [[exchange("1", run=None, headers=headers, tools=[TOOL])]])
    await ingester.catch_up()
    row = kept(state)["1"]
    assert (row["harness"], row["session"], row["agent"], row["parent"]) == (
        "claude-code",
        "s",
        "a",
        "s",
    )
    assert row["run"] == "session:s" and row["tools"] == 1 and row["status"] == "waiting"


async def test_side_calls_are_kept_apart(traces, state, ingester):
    counted = at(exchange("count", route="other", tap=[]), "/v1/messages/count_tokens?beta=true")
    other = at(exchange("other", route="other", tap=[]), "/v1/models")
    append(traces / "a", [[exchange("title", messages=TITLE), exchange("turn"), counted, other]])
    await ingester.catch_up()
    rows = kept(state)
    assert {k: (r["side"], r["status"], r["reason"]) for k, r in rows.items()} == {
        "title": ("title", "left_out", "side call: title"),
        "turn": ("", "waiting", ""),
        "count": ("count_tokens", "left_out", "side call: count_tokens"),
    }
    assert rows["title"]["check_result"] == "passed"


async def test_side_calls_that_are_to_be_trained(traces, state):
    append(traces / "a", [[exchange("title", messages=TITLE)]])
    await Ingester(traces, state, ["title"]).catch_up()
    row = kept(state)["title"]
    assert (row["side"], row["status"]) == ("title", "waiting")


async def test_retries_are_linked_across_frames_and_shards(traces, state, ingester):
    append(traces / "a", [[exchange("1", status=429)], [exchange("2", started=1001.0, status=500)]])
    await ingester.catch_up()
    append(traces / "b", [[exchange("3", started=1003.0, outputs=[[4], [5]])]])
    append(traces / "b", [[exchange("4", started=1005.0)]])
    await ingester.catch_up()
    found = {k: (r["retry_of"], r["retry"], r["status"]) for k, r in kept(state).items()}
    assert found == {
        "1": ("", "", "left_out"),
        "2": ("1", "repeat", "left_out"),
        "3.0.0": ("2", "repeat", "waiting"),
        "3.0.1": ("2", "repeat", "waiting"),
        "4": ("", "", "waiting"),
    }


async def test_a_failure_that_is_recorded_after_its_retry(traces, state, ingester):
    append(traces / "a", [[exchange("2", started=1001.0)]])
    await ingester.catch_up()
    append(traces / "a", [[exchange("1", outcome="cancelled")]])
    await ingester.catch_up()
    assert kept(state)["2"]["retry_of"] == "1"


async def test_runs_and_agents_do_not_retry_each_other(traces, state, ingester):
    append(
        traces / "a",
        [
            [
                exchange("1", status=500),
                exchange("2", started=1001.0, run="another"),
                exchange("3", started=1001.0, headers=[("thread-id", "t")]),
            ]
        ],
    )
    await ingester.catch_up()
    assert {row["retry_of"] for row in kept(state).values()} == {""}


async def test_a_strange_body_costs_nothing_else(traces, state, ingester):
    body = '{"messages": 7, "prompt_cache_key": ["x"], "metadata": {"user_id": {}}}'
    strange = exchange("1")
    request = msgspec.structs.replace(strange.request, body=type(strange.request.body)(text=body))
    append(traces / "a", [[msgspec.structs.replace(strange, request=request), exchange("2")]])
    await ingester.catch_up()
    rows = kept(state)
    assert rows["1"]["status"] == "left_out" and rows["2"]["status"] == "waiting"
    assert rows["1"]["history_digest"].startswith("bytes:")


async def test_a_state_of_the_first_schema_is_brought_up_to_date(tmp_path, traces):
    path = tmp_path / "old.db"
    with sqlite3.connect(path) as db:
        db.executescript(MIGRATIONS[0])
        values = ["old", "old", "run-1", "", "chat", "complete", 1.0, 2.0, "passed", "[]"]
        values += ["waiting", "", "", "engine", 3, 2, "[]", "a", 0, 0]
        db.execute(f"INSERT INTO calls VALUES ({', '.join('?' * 20)})", values)
        db.execute(
            "INSERT INTO runs (id, key, registered, first_seen, last_seen) "
            "VALUES ('run-1', 'run-1', 0, 1, 2)"
        )
        db.execute("PRAGMA user_version = 1")
    for _ in range(2):
        opened = State(path)
        (row,) = opened.rows("SELECT * FROM calls WHERE id = 'old'")
        assert (row["status"], row["side"], row["sound"], row["retry_of"]) == ("waiting", "", 1, "")
        opened.close()
    opened = State(path)
    append(traces / "a", [[exchange("1", started=3.0, status=500), exchange("2", started=4.0)]])
    await Ingester(traces, opened).catch_up()
    assert kept(opened)["2"]["retry_of"] == "1"
    opened.close()


def read(call: Exchange) -> Call:
    (entry,) = exchanges.read(call)
    assert entry.call is not None
    return entry.call


def test_calls_without_tools_beside_an_agent():
    turn = [*HI, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "go on"}]
    title = [{"role": "user", "content": "name this"}]
    calls = [
        read(exchange("title", messages=title)),
        read(exchange("first", messages=HI, tools=[TOOL])),
        read(exchange("last", messages=turn)),
    ]
    tools = {"title": 0, "first": 1, "last": 0}
    assert beside_the_agent(calls, tools) == {"title"}
    assert beside_the_agent(calls[:1], tools) == set()


@pytest.mark.parametrize("trained", [False, True])
async def test_a_call_without_tools_is_left_out_when_its_run_is_trained(daemon, trained):
    one = await daemon(train_side_calls=["no_tools"] if trained else [])
    await one.live("v0")
    named = [{"role": "user", "content": "name this"}]
    append(one.traces / "x", [[exchange("title", run="a", messages=named, prompt=(9, 8))]])
    await one.rollout("a", 1.0, tools=[TOOL])
    await one.rollout("b", 0.0)
    status = await one.live("v1")
    left_out = {} if trained else {"side call: no_tools": 1}
    assert status["left_out"] == left_out


async def test_the_status_counts_harnesses_side_calls_and_retries(daemon):
    one = await daemon(train=False)
    agent = [("user-agent", "codex_exec/0.171.0")]
    lines = [
        exchange("1", headers=agent, status=500),
        exchange("2", headers=agent, started=1001.0),
        exchange("3", messages=TITLE),
    ]
    append(one.traces / "x", [lines])
    status = await one.until(lambda status: sum(status["calls"].values()) == 3)
    assert status["harnesses"] == {"codex": 2}
    assert status["side_calls"] == {"title": 1} and status["retries"] == {"repeat": 1}
    text = format_status(status)
    assert "harnesses 2 codex" in text and "aside     1 title" in text
