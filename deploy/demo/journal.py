"""The demo's own record of every attempt at a rollout, in ``rollouts.jsonl``."""

from pathlib import Path
from typing import Literal

import msgspec

from deploy.demo.grader import ToolCall


class Attempt(msgspec.Struct, frozen=True):
    """One attempt. ``reward`` is None, and ``parts`` empty, for an infrastructure failure: it says
    nothing about the model. Times are Unix seconds."""

    run: str
    group: str
    started: float
    ended: float
    failure: Literal["agent", "infrastructure"] | None
    error: str
    reward: float | None
    parts: dict[str, float]
    calls: list[ToolCall]
    final_output: str | None
    replies: int
    longest_gap_s: float


class Journal:
    """Appends attempts to a file and keeps them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.attempts: list[Attempt] = []

    def add(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(attempt) + b"\n")
