"""Grades a rollout from what the agent did: which tools it called, and what it said in the end."""

import json
from typing import Any

import msgspec

from deploy.demo.tasks import Task, answer

TOOL, ARGUMENT = "price", "item"
TOOL_CALLED, RIGHT_ITEM, RIGHT_ANSWER = 0.3, 0.3, 0.4


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call as the agent reports it; ``arguments`` is the JSON text from the model."""

    name: str
    arguments: str


class Transcript(msgspec.Struct, frozen=True):
    """What the agent reports of a rollout; ``final_output`` is None when it gave up before."""

    calls: list[ToolCall] = []
    final_output: str | None = None


class Grade(msgspec.Struct, frozen=True):
    """``parts`` by name; ``reward`` is their sum, in [0, 1]."""

    reward: float
    parts: dict[str, float]


def grade(task: Task, transcript: Transcript) -> Grade:
    """Return the reward of a rollout.

    0.3 for calling the price tool with an item, 0.3 more when it is the item asked for, 0.4 more
    for the right answer afterwards. Each part needs the one before: a price that was guessed, or
    taken from the example, earns nothing. Only the first call counts, so that trying all items
    doesn't pay.
    """
    item = _first_item(transcript.calls)
    called = item is not None
    right_item = called and item == task.asked.item
    right_answer = right_item and (transcript.final_output or "").strip() == answer(task.asked)
    parts = {
        "tool_called": TOOL_CALLED * called,
        "right_item": RIGHT_ITEM * right_item,
        "right_answer": RIGHT_ANSWER * right_answer,
    }
    return Grade(round(sum(parts.values()), 6), parts)


def _first_item(calls: list[ToolCall]) -> str | None:
    """Return the item of the first call, None when it isn't a call of the price tool."""
    if not calls or calls[0].name != TOOL:
        return None
    try:
        arguments: Any = json.loads(calls[0].arguments)
    except json.JSONDecodeError:
        return None
    if not isinstance(arguments, dict) or list(arguments) != [ARGUMENT]:
        return None
    item = arguments[ARGUMENT]
    return item.strip() if isinstance(item, str) else None
