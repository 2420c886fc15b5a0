"""What harnesses send of themselves: the header shapes of notes taken from the real programs."""

import json

import pytest

from daemon.runs import RunKey, read_caller, run_key
from sidecar.traces.record import Body, Exchange, Request, Session


def call(
    headers: dict[str, str] | None = None,
    body: object = None,
    *,
    run: str | None = None,
    session: str | None = None,
) -> Exchange:
    raw = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
    return Exchange(
        id="1",
        route="chat",
        session=Session(run=run, session=session, peer="10.0.0.7:5000"),
        upstream="http://upstream",
        request=Request("POST", "/v1/x", list((headers or {}).items()), Body.of(raw)),
        started=1.0,
        ended=2.0,
        outcome="complete",
    )


CLAUDE = {"User-Agent": "claude-cli/2.1.332 (external, sdk-cli)", "X-Claude-Code-Session-Id": "s1"}
CODEX = {
    "User-Agent": "codex_exec/0.171.0 (Debian 12.0.0; x86_64) dumb (codex_exec; 0.171.0)",
    "session-id": "t1",
    "thread-id": "t1",
    "x-codex-window-id": "t1:0",
}


def test_claude_code_and_its_subagents():
    main = read_caller(call(CLAUDE))
    assert (main.harness, main.session, main.agent, main.parent) == ("claude-code", "s1", "", "")
    sub = read_caller(call(CLAUDE | {"x-claude-code-agent-id": "a1"}))
    assert (sub.session, sub.agent, sub.parent) == ("s1", "a1", "s1")
    nested = {"x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"}
    assert read_caller(call(CLAUDE | nested)).parent == "a1"


def test_codex_and_its_subagents():
    main = read_caller(call(CODEX))
    assert (main.harness, main.session, main.agent, main.parent) == ("codex", "t1", "t1", "")
    assert main.window == "t1:0"
    sub = read_caller(call(CODEX | {"thread-id": "t2", "x-codex-parent-thread-id": "t1"}))
    assert (sub.session, sub.agent, sub.parent) == ("t1", "t2", "t1")


def test_a_subagent_of_opencode_belongs_to_its_parents_run():
    headers = {"x-session-id": "child", "x-parent-session-id": "root"}
    sub = read_caller(call(headers))
    assert (sub.session, sub.agent, sub.parent) == ("root", "child", "root")
    main = read_caller(call({"x-session-id": "root"}))
    assert run_key(call(headers)) == run_key(call({"x-session-id": "root"}))
    assert main.parent == ""


@pytest.mark.parametrize("name", ["session_id", "x-session-affinity", "x-affinity"])
def test_session_headers(name):
    assert read_caller(call({name: "s"})).session == "s"


@pytest.mark.parametrize(
    ("body", "session"),
    [
        ({"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "s1"})}}, "s1"),
        (
            {
                "metadata": {
                    "user_id": "user_0a_account__session_5f0c8a8e-3c1e-4a2e-9d6b-0123456789ab"
                }
            },
            "5f0c8a8e-3c1e-4a2e-9d6b-0123456789ab",
        ),
        ({"metadata": {"user_id": "somebody"}}, ""),
        ({"metadata": {"user_id": "{broken"}, "prompt_cache_key": "k"}, "k"),
        ({"prompt_cache_key": "conversation"}, "conversation"),
        ({"user_id": "not where it belongs"}, ""),
        (b'{"prompt_cache_key": "torn', ""),
        (b'{"prompt_cache_key": 7}', ""),
        (b"\xff\xfe", ""),
        (b'{"prompt_cache_key":' + b"[" * 100_000, ""),
    ],
)
def test_session_in_the_body(body, session):
    assert read_caller(call(body=body)).session == session


def test_a_header_counts_before_the_body():
    caller = read_caller(call(CLAUDE, {"prompt_cache_key": "shared"}))
    assert caller.session == "s1"


def test_precedence_of_the_run():
    told = call(CLAUDE, run="r", session="x")
    assert run_key(told) == RunKey("r", told=True)
    assert run_key(call(CLAUDE, session="x")) == RunKey("x", told=True)
    assert run_key(call(CLAUDE)) == RunKey("session:s1", told=False)
    keyed = call(body={"prompt_cache_key": "k"})
    assert run_key(keyed) == RunKey("session:k", told=False)
    assert run_key(call()) == RunKey("peer:10.0.0.7", told=False)


@pytest.mark.parametrize(
    ("user_agent", "harness"),
    [
        ("QwenCode/0.24.4 (linux; x64)", "qwen-code"),
        ("Agents/Python 0.24.0", "openai-agents"),
        ("OpenAI/Python 3.57.0", "openai-python"),
        ("AsyncOpenAI/Python 3.57.0", "openai-python"),
        ("Anthropic/JS 1.14.0", "anthropic-node"),
        ("curl/8", ""),
    ],
)
def test_harness_by_user_agent(user_agent, harness):
    assert read_caller(call({"user-agent": user_agent})).harness == harness
