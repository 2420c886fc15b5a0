"""Keeps the engine on the live version: publishes new ones, and the live one after a restart."""

import asyncio
import logging
from pathlib import Path

import msgspec

from daemon.learner import ServingEngine, load_version
from daemon.state import State
from deploy.errors import UserError
from trainer.swap.client import CanaryFailed, EngineState, SwapFailed, SwapReport

logger = logging.getLogger(__name__)


class Serving:
    """The engine as the daemon sees it.

    ``engine`` is what it last said, None when it does not answer; ``problem`` one line, None when
    all is well.
    """

    def __init__(
        self, engine: ServingEngine, state: State, directory: Path, poll_seconds: float
    ) -> None:
        self._engine = engine
        self._state = state
        self._directory = directory
        self._poll_seconds = poll_seconds
        self._lock = asyncio.Lock()
        self.engine: EngineState | None = None
        self.problem: str | None = "not asked yet"

    async def publish(self, version: str, step: int | None) -> SwapReport:
        """Make ``version`` live in the engine and then in the state.

        Raises:
            UserError: the engine can't be reached or lacks our plugins.
            SwapFailed: the swap failed; the engine was put back to the version before.
        """
        async with self._lock:
            return await self._publish(version, step)

    async def _publish(self, version: str, step: int | None) -> SwapReport:
        before = self._state.previous_version(version)
        try:
            previous = load_version(self._directory, before) if before else None
        except UserError:
            previous = None  # Pruned from disk: there is nothing to go back to.
        report = await self._engine.publish(*load_version(self._directory, version), previous)
        self._state.make_live(version, msgspec.to_builtins(report), step)
        logger.info("%s is live, paused for %.3f s", version, report.pause_s)
        return report

    async def watch(self) -> None:
        """Look after the engine until cancelled: its state, and the live version after restarts."""
        while True:
            await self.look()
            await asyncio.sleep(self._poll_seconds)

    async def look(self) -> None:
        """Ask the engine once; publish the live version where it serves another one."""
        said = self.problem
        async with self._lock:
            try:
                self.engine = await self._engine.probe()
                self.problem = None
                live = self._live_version()
                if live is not None and self.engine.version != live:
                    logger.warning("engine serves %s: back to %s", self.engine.version, live)
                    await self._publish(live, None)
                    self.engine = await self._engine.probe()
            except CanaryFailed as error:
                self.problem = f"the engine does not compute what the trainer does: {error}"
            except (UserError, SwapFailed) as error:
                self.problem = str(error)
                if isinstance(error, UserError):
                    self.engine = None
        if self.problem is not None and self.problem != said:
            logger.warning("engine: %s", self.problem)

    def _live_version(self) -> str | None:
        """The version to restore; None while the next one is about to be published anyway."""
        step = self._state.unfinished_step()
        if step is not None and step["status"] == "trained":
            return None
        return self._state.live_version()
