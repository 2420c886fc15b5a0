"""Real, unmodified harnesses through the sidecar: what is recorded of them, and what they notice.

Not part of ``make test``; ``make test-harnesses`` installs the programs and runs this.
"""

import time

import pytest

from tests.harnesses import scripts
from tests.harnesses.bench import Bench, Ran, until
from tests.harnesses.clients import BY_NAME, CLIENTS, Client, claude_at_a_terminal
from tests.harnesses.findings import NOT_SENT, Findings
from tests.harnesses.model_server import CLOSING, OUTPUT, Fault
from tests.harnesses.terminal import Terminal

pytestmark = pytest.mark.harness

ABORT_S = 0.25
TRIES = 3
FAULTS = {
    "429": Fault("status", 429),
    "500": Fault("status", 500),
    "reset": Fault("reset"),
    "break": Fault("break"),
}
HARNESS_NAMES = {
    "Claude Code": "claude-code",
    "Codex": "codex",
    "qwen-code": "qwen-code",
    "openai-agents": "openai-agents",
}

each_client = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)


@each_client
def test_tool_round_trip(client: Client, ready, bench: Bench, findings: Findings) -> None:
    ran = bench.run(ready(client))
    assert ran.status == 0 and CLOSING in ran.output, ran.output[-2000:]
    assert len(ran.asks) == 2 and ran.asks[-1].says(OUTPUT)
    assert [ask.protocol for ask in ran.asks] == [client.protocol] * 2
    assert [ask.stream for ask in ran.asks] == [client.streams] * 2
    _check_records(ran)
    assert [call["sound"] for call in ran.calls] == [1, 1]
    assert all(not call["retry_of"] and not call["side"] for call in ran.calls)
    if named := HARNESS_NAMES.get(client.name):
        assert {call["harness"] for call in ran.calls} == {named}
    for what in ("session", "agent"):
        ids = {call[what] for call in ran.calls}
        assert len(ids) == 1 and (ids != {""}) == (what in client.sends)
        if not (what == "agent" and "subagent" in client.sends):
            findings.note(client.name, what, "found" if what in client.sends else NOT_SENT)
    streamed = "streamed" if client.streams else "not streamed"
    findings.note(client.name, "protocol", f"{client.protocol}, {streamed}")
    findings.note(client.name, "tool round trip", f"{len(ran.calls)} calls")


@each_client
@pytest.mark.parametrize("fault", FAULTS)
def test_retry(client: Client, fault: str, ready, bench: Bench, findings: Findings) -> None:
    if fault == "break" and not client.streams:
        findings.note(client.name, fault, "does not stream")
        return
    ran = bench.run(ready(client), faults=[FAULTS[fault]])
    _check_records(ran)
    first, later = ran.calls[0], ran.calls[1:]
    assert not first["sound"] and first["status"] == "left_out"
    if fault in ("429", "500"):
        assert first["reason"] == f"HTTP {fault}"
    else:
        assert first["outcome"] == "upstream_error"
    retries = [call for call in later if call["retry_of"]]
    assert len(later) == (0 if fault in client.gives_up else 2), ran.output[-2000:]
    if fault in client.gives_up:
        findings.note(client.name, fault, "gives up")
        return
    assert ran.status == 0 and CLOSING in ran.output, ran.output[-2000:]
    assert [call["retry_of"] for call in retries] == [first["exchange"]]
    assert retries[0] is later[0]
    kind = "continuation" if fault == "break" and client.continues else "repeat"
    assert retries[0]["retry"] == kind
    findings.note(client.name, fault, f"retried, {'same' if kind == 'repeat' else 'continued'}")


@each_client
def test_interrupt_ends_the_upstream(
    client: Client, ready, bench: Bench, findings: Findings
) -> None:
    for _ in range(TRIES):
        # The limit is for the chain of harness and sidecar, not for what else the machine does.
        ended = bench.interrupt(ready(client), scripts.endless)
        assert [call["outcome"] for call in ended.ran.calls] == ["cancelled"]
        assert not ended.ran.calls[0]["sound"] and ended.ran.calls[0]["status"] == "left_out"
        if ended.after_signal <= ABORT_S:
            break
    assert ended.after_signal <= ABORT_S
    cell = f"{ended.after_signal * 1000:.0f} ({ended.in_sidecar * 1000:.0f}) ms"
    findings.note(client.name, "SIGINT", cell)


def test_codex_goes_on_from_what_was_whole(ready, bench: Bench, findings: Findings) -> None:
    """An item that was complete when the stream broke stays in the history of the retry."""
    client = ready(BY_NAME["Codex"])
    ran = bench.run(client, faults=[Fault("break", share=0.8)])
    _check_records(ran)
    first, second, *_ = ran.calls
    assert first["outcome"] == "upstream_error" and not first["sound"]
    assert (second["retry_of"], second["retry"]) == (first["exchange"], "continuation")
    assert not any(call["retry_of"] for call in ran.calls[2:])
    assert ran.status == 0 and CLOSING in ran.output
    findings.note(client.name, "break", "continued after a whole item")


def test_subagents_of_claude_code(ready, bench: Bench, findings: Findings) -> None:
    client = ready(BY_NAME["Claude Code"])
    more = {"subagent_type": "general-purpose", "run_in_background": False}
    ran = bench.run(client, script=scripts.delegating("Agent", **more))
    _check_records(ran)
    assert len({call["session"] for call in ran.calls}) == 1
    main = [call for call in ran.calls if not call["parent"]]
    assert len(main) == 2 and {call["agent"] for call in main} == {""}
    subagents = [call for call in ran.calls if call["parent"]]
    assert len({call["agent"] for call in subagents}) == 2 and len(subagents) == 4
    assert all(not call["retry_of"] for call in ran.calls), "equal prompts are no retries"
    findings.note(client.name, "agent", "found in subagents' calls")
    findings.note(client.name, "subagents", "by agent id")


def test_subagents_of_codex(ready, bench: Bench, findings: Findings) -> None:
    client = ready(BY_NAME["Codex"])
    ran = bench.run(client, script=scripts.codex_delegating)
    _check_records(ran)
    (session,) = {call["session"] for call in ran.calls}
    main = [call for call in ran.calls if not call["parent"]]
    subagents = [call for call in ran.calls if call["parent"]]
    assert len(main) == 3 and {call["agent"] for call in main} == {session}
    assert len(subagents) == 2 and {call["parent"] for call in subagents} == {session}
    assert len({call["agent"] for call in subagents} - {session}) == 1
    findings.note(client.name, "subagents", "by thread id")


def test_subagents_of_qwen_code(ready, bench: Bench, findings: Findings) -> None:
    """It sends no ids: its subagents show in the system prompt and tools alone."""
    client = ready(BY_NAME["qwen-code"])
    script = scripts.delegating("agent", subagent_type="general-purpose")
    ran = bench.run(client, script=script)
    _check_records(ran)
    by_context = {call["context_digest"] for call in ran.calls}
    subagents = [a for a in ran.asks if a.prompted(scripts.SUBTASK)]
    assert len(subagents) == 4 and len(by_context) == 2
    assert all(not call["retry_of"] for call in ran.calls), "equal prompts are no retries"
    findings.note(client.name, "subagents", "by system prompt and tools; equal ones by tokens only")


@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("openai-agents", scripts.delegating_once("input")),
        ("LangGraph", scripts.delegating_once("task")),
        ("smolagents", scripts.smol_delegating),
    ],
)
def test_subagents_of_a_library(name, script, ready, bench: Bench, findings: Findings) -> None:
    """No ids here either."""
    client = ready(BY_NAME[name])
    ran = bench.run(client, script=script)
    assert ran.status == 0 and CLOSING in ran.output, ran.output[-2000:]
    _check_records(ran)
    contexts = [call["context_digest"] for call in ran.calls]
    assert len(contexts) == 4 and contexts[0] == contexts[3] != contexts[1] == contexts[2]
    assert all(not call["retry_of"] and not call["side"] for call in ran.calls)
    findings.note(client.name, "subagents", "by system prompt and tools")


def test_compaction_of_claude_code(ready, bench: Bench, findings: Findings) -> None:
    client = ready(BY_NAME["Claude Code"])
    ran = bench.run(client, script=scripts.Overflowing())
    _check_records(ran)
    _check_side(ran, "compaction")
    findings.note(client.name, "side calls", "compaction")


def test_token_counts_of_claude_code(ready, bench: Bench, findings: Findings) -> None:
    client = ready(BY_NAME["Claude Code"])
    ran = bench.run(client, script=scripts.closing_at_once, prompt="/context")
    counted = [e for e in ran.others if "/count_tokens" in e.request.path]
    assert counted and not ran.asks
    assert {call["side"] for call in ran.calls} == {"count_tokens"}
    assert len(ran.calls) == len(counted)
    findings.note(client.name, "side calls", "count_tokens")


def test_titles_of_claude_code(ready, bench: Bench, findings: Findings) -> None:
    """They are made for a person at a terminal alone, one with every prompt."""
    client = ready(BY_NAME["Claude Code"])
    bench.server.play(client.script)
    with bench.place(client) as (run, place):
        argv, env = claude_at_a_terminal(place)
        terminal = Terminal(argv, client.env(place) | env, place.home / "work")
        try:
            terminal.await_text("❯")
            time.sleep(2)
            terminal.type(place.prompt)
            time.sleep(1)
            terminal.type("\r")
            until(lambda: len(bench.server.asks) >= 3, "three calls", 60)
            terminal.await_text("DONE:")
        finally:
            terminal.close()
    ran = bench.finish(run)
    _check_records(ran)
    (title,) = _check_side(ran, "title")
    assert title["session"] and {call["session"] for call in ran.calls} == {title["session"]}
    findings.note(client.name, "side calls", "title")


def test_compaction_of_codex(ready, bench: Bench, findings: Findings) -> None:
    client = ready(BY_NAME["Codex"])
    ran = bench.run(client, script=scripts.Overflowing())
    _check_records(ran)
    side = _check_side(ran, "compaction")
    before = {call["window"] for call in ran.calls if call["started"] <= side[-1]["started"]}
    after = {call["window"] for call in ran.calls if call["started"] > side[-1]["started"]}
    assert before and after and before.isdisjoint(after)
    findings.note(client.name, "side calls", "compaction")


def test_compaction_of_pi(ready, bench: Bench, findings: Findings) -> None:
    for name in ("pi, chat", "pi, Responses", "pi, Messages"):
        ran = bench.run(ready(BY_NAME[name]), script=scripts.Overflowing(at_end=True))
        _check_records(ran)
        _check_side(ran, "compaction")
        findings.note(name, "side calls", "compaction")


def test_compaction_of_qwen_code(ready, bench: Bench, findings: Findings) -> None:
    client = ready(BY_NAME["qwen-code"])
    # It ends there: the scripted summary is not of the form that it asks for.
    ran = bench.run(client, script=scripts.Overflowing())
    _check_records(ran)
    _check_side(ran, "compaction")
    findings.note(client.name, "side calls", "compaction")


def test_memory_extraction_of_qwen_code(ready, bench: Bench, findings: Findings) -> None:
    client = ready(BY_NAME["qwen-code"])
    ran = bench.run(client, script=scripts.closing_at_once)
    _check_records(ran)
    _check_side(ran, "memory")
    findings.note(client.name, "side calls", "memory extraction")


def _check_records(ran: Ran) -> None:
    """Every call that reached the model server is recorded under the run, as it was sent."""
    assert len(ran.exchanges) == len(ran.asks) == len(ran.calls) > 0
    for exchange, ask in zip(ran.exchanges, ran.asks, strict=True):
        assert exchange.route == ask.protocol and exchange.session.run == ran.run
        assert exchange.request.path == ask.path
        headers = {name.lower(): value for name, value in exchange.request.headers}
        assert headers["user-agent"] == ask.headers["user-agent"]
        assert "key-of-the-harness" not in str(exchange.request.headers)
    assert {call["run"] for call in ran.calls} == {ran.run}


def _check_side(ran: Ran, kind: str) -> list[dict[str, object]]:
    """Some calls are side calls of this kind and kept apart, and the agent's own are not."""
    side = [call for call in ran.calls if call["side"]]
    assert {call["side"] for call in side} == {kind}
    assert {call["reason"] for call in side} == {f"side call: {kind}"}
    assert len(side) < len(ran.calls)
    return side
