"""What the scripted model says where a scenario needs more than the default tool round trip."""

import json
from typing import Any

from tests.harnesses.model_server import CLOSING, COMMAND, Ask, Say, Script, tool_round_trip

SUBTASK = "SUBTASK: run one command"
_FULL = 990_000


def delegating(tool: str, **more: Any) -> Script:
    """The agent gives two subtasks to subagents at once; each of those makes a tool round trip."""

    def script(ask: Ask) -> Say:
        if ask.prompted(SUBTASK):
            return tool_round_trip(ask)
        if ask.results or tool not in ask.tools:
            return Say(CLOSING)
        task = {"description": "one command", "prompt": f"{SUBTASK}.", **more}
        return Say("I delegate.", [(tool, task), (tool, task)])

    return script


def delegating_once(argument: str) -> Script:
    """The agents of ``agents/`` give one subtask away, to their tool ``delegate``."""

    def script(ask: Ask) -> Say:
        if ask.prompted(SUBTASK):
            return tool_round_trip(ask)
        if ask.results:
            return Say(CLOSING)
        return Say("I delegate.", [("delegate", {argument: f"{SUBTASK}."})])

    return script


def smol_delegating(ask: Ask) -> Say:
    """The same for smolagents, which tells tool calls and results as prose."""
    if any(message["role"] == "assistant" for message in ask.history):
        return Say("", [("final_answer", {"answer": CLOSING})])
    if ask.prompted(SUBTASK):
        return Say("", [("bash", {"command": COMMAND})])
    return Say("", [("delegate", {"task": f"{SUBTASK}.", "additional_args": {}})])


def codex_delegating(ask: Ask) -> Say:
    """The same for Codex, whose subagents are started by one tool and waited for by another."""
    if ask.prompted(SUBTASK):
        return tool_round_trip(ask)
    outputs = [item["output"] for item in ask.history if item["type"] == "function_call_output"]
    if not outputs:
        return Say("I delegate.", [("multi_agent_v1.spawn_agent", {"message": f"{SUBTASK}."})])
    if len(outputs) == 1:
        target = json.loads(outputs[0])["agent_id"]
        wait = {"targets": [target], "timeout_ms": 30000}
        return Say("", [("multi_agent_v1.wait_agent", wait)])
    return Say(CLOSING)


class Overflowing:
    """A tool round trip in which one reply claims that the context is nearly full: the one with the
    tool call, or the last (``at_end``)."""

    def __init__(self, at_end: bool = False) -> None:
        self._at_end = at_end
        self._done = False

    def __call__(self, ask: Ask) -> Say:
        said = tool_round_trip(ask)
        if not self._done and self._at_end == (not said.tools):
            self._done = True
            said.prompt_tokens = _FULL
        return said


def closing_at_once(ask: Ask) -> Say:
    """No tool call at all."""
    return Say(CLOSING)


def endless(ask: Ask) -> Say:
    """A reply that takes twenty seconds."""
    return Say("word " * 400, pause=0.05)
