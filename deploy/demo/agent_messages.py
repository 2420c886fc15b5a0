"""What goes to the agent process and comes back, one JSON line each."""

from typing import Literal

import msgspec

from deploy.demo.grader import ToolCall
from deploy.demo.tasks import Task


class Rollout(msgspec.Struct, frozen=True):
    """One run of the agent on one task, against the model server at ``base_url``."""

    rollout: str
    base_url: str
    model: str
    task: Task


class Result(msgspec.Struct, frozen=True):
    """What became of a rollout.

    ``failure``: ``agent`` when the model led the agent nowhere (a tool that does not exist, too
    many turns), ``infrastructure`` when the model server failed it. ``error`` says more.
    ``replies`` counts the model's replies that arrived whole; ``longest_gap_s`` is the longest wait
    inside one reply's stream, in seconds.
    """

    rollout: str
    calls: list[ToolCall] = []
    final_output: str | None = None
    failure: Literal["agent", "infrastructure"] | None = None
    error: str = ""
    replies: int = 0
    longest_gap_s: float = 0.0
