"""Shows the demo live: a bar and a table on a terminal, plain lines elsewhere."""

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from deploy.demo.journal import Attempt

ROWS = 12
RECENT = 32
BAR = 20


class Display:
    """Takes what happens and shows it: ``event`` lines, the daemon's ``status``, ``attempt``s."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self._steps = steps
        self._console = console or Console(highlight=False)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("", total=steps)
        self._live: Live | None = None
        self._versions: list[dict[str, Any]] = []
        self._stage = "starting"
        self._recent: list[float] = []
        self._rollouts = 0
        self._first: float | None = None
        self._problems: list[str] = []

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show the live part while inside; without a terminal there is none."""
        if not self._console.is_terminal:
            yield
            return
        with Live(self._view(), console=self._console, refresh_per_second=4) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None
                live.update(self._view(), refresh=True)

    def event(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(Text(f"{time.strftime('%H:%M:%S')} {text}"), soft_wrap=True)

    def attempt(self, attempt: Attempt) -> None:
        if self._first is None:
            self._first = attempt.started
        if attempt.reward is None:
            self.event(f"rollout {attempt.run} is repeated: {attempt.error}")
            return
        self._rollouts += 1
        self._recent = [*self._recent, attempt.reward][-RECENT:]
        self._refresh()

    def status(self, status: dict[str, Any]) -> None:
        trainer = status["trainer"]
        self._stage = trainer["stage"] + (f": {trainer['detail']}" if trainer["detail"] else "")
        published = [v for v in status["versions"] if v["step"] is not None and v["live_from"]]
        for version in published[len(self._versions) :]:
            self._versions.append(version)
            if self._live is None:
                self.event(self._line(version))
        for problem in status["problems"]:
            if problem not in self._problems:
                self.event(f"problem: {problem}")
        self._problems = status["problems"]
        self._bar.update(self._task, completed=len(self._versions))
        self._refresh()

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._view())

    def _line(self, version: dict[str, Any]) -> str:
        return (
            f"step {len(self._versions)}/{self._steps}  {version['version']}"
            f"  reward {version['reward_mean']:.2f}  {version['rollouts']:.0f} rollouts"
            f"  {version['sampled_tokens']:.0f} tokens ({self._tokens_per_second():.0f}/s)"
            f"  swap pause {version['swap_pause_s'] or 0:.2f} s"
        )

    def _tokens_per_second(self) -> float:
        """Sampled and trained tokens over the time since the first rollout."""
        if self._first is None or not self._versions:
            return 0.0
        tokens = sum(v["sampled_tokens"] for v in self._versions)
        return tokens / max(1e-3, self._versions[-1]["live_from"] - self._first)

    def _view(self) -> Group:
        rows = Table(box=None, pad_edge=False)
        for name in ("version", "reward", "", "rollouts", "tokens", "swap pause"):
            rows.add_column(name, justify="left" if name in ("", "version") else "right")
        for version in self._versions[-ROWS:]:
            reward = version["reward_mean"]
            rows.add_row(
                version["version"],
                f"{reward:.2f}",
                Text("█" * round(BAR * reward), style="cyan"),
                f"{version['rollouts']:.0f}",
                f"{version['sampled_tokens']:.0f}",
                f"{version['swap_pause_s'] or 0:.2f} s",
            )
        recent = f"{statistics.fmean(self._recent):.2f}" if self._recent else "-"
        now = (
            f"{self._stage}  ·  {self._rollouts} rollouts, reward of the last {RECENT}: {recent}"
            f"  ·  {self._tokens_per_second():.0f} tokens/s"
        )
        return Group(rows, self._bar, Text(now, style="dim"))
