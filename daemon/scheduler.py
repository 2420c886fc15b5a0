"""The learning loop: plan a step, train it, publish its version.

Each arrow is one committed transaction, and each stage can be repeated: the batch is a file whose
digest the trainer recognises, publishing a version that already serves does nothing. Killed
anywhere, the loop resumes at the stage that was not committed.
"""

import asyncio
import logging
from typing import Any

from daemon.config import DaemonConfig
from daemon.learner import TrainerFactory
from daemon.planner import Planner
from daemon.serving import Serving
from daemon.state import State
from deploy.errors import UserError
from trainer.errors import TrainerDied, TrainingRejected
from trainer.swap.client import CanaryFailed, SwapFailed

logger = logging.getLogger(__name__)

PLAN_SECONDS = 0.25
RETRY_SECONDS = 5.0
MAX_DEATHS_PER_STEP = 5
"""A batch that kills its trainer this often is rejected instead of being tried for ever."""
MAX_SWAP_FAILURES = 3
MAX_REJECTED_IN_A_ROW = 3
KEEP_BATCHES = 4
"""Batch files kept after their step, for looking into; they can be rebuilt from the shards."""


class Scheduler:
    """Runs the loop.

    ``stage`` says what it is doing, ``trainer_stage`` what the trainer last said that it is doing,
    ``problem`` what keeps the loop from going on.
    """

    def __init__(
        self,
        config: DaemonConfig,
        state: State,
        planner: Planner,
        make_trainer: TrainerFactory,
        serving: Serving,
    ) -> None:
        self._config = config
        self._state = state
        self._planner = planner
        self._trainer = make_trainer(self._note_progress)
        self._serving = serving
        self._rejected = 0
        self.stage = "starting"
        self.trainer_stage = ""
        self.problem: str | None = None
        self.trainer_deaths = 0

    async def run(self) -> None:
        """Run until cancelled.

        Raises:
            UserError: the trainer can't start with this model, directory or device.
        """
        await self._bootstrap()
        while True:
            step = self._state.unfinished_step()
            if step is None:
                await self._plan()
            elif step["status"] == "planned":
                await self._train(step)
            else:
                await self._publish(step)

    async def close(self) -> None:
        """End the trainer."""
        await self._trainer.close()

    async def _bootstrap(self) -> None:
        self.stage = "starting the trainer"
        while True:
            try:
                await self._trainer.start()
                first = await self._trainer.bootstrap()
                break
            except TrainerDied as error:
                await self._restart_after(error)
        self._state.add_first_version(first.version)
        if self._state.live_version() is None and self._state.unfinished_step() is None:
            await self._publish_first(first.version)
        self.problem = None

    async def _publish_first(self, version: str) -> None:
        """Verify that the engine serves the model that training starts from."""
        self.stage = f"waiting for the engine to serve {version}"
        while True:
            try:
                await self._serving.publish(version, None)
                return
            except (UserError, SwapFailed) as error:
                self._report(f"{version} is not served: {error}")
                await asyncio.sleep(RETRY_SECONDS)

    async def _plan(self) -> None:
        if self._rejected >= MAX_REJECTED_IN_A_ROW:
            self.stage = "stopped"
            self.problem = (
                f"{self._rejected} steps in a row were rejected ({self.problem}): training has "
                "stopped; put the cause right and restart the daemon"
            )
            await asyncio.Event().wait()
        self.stage = "waiting for rollouts"
        parent = self._state.live_version()
        assert parent is not None
        if not await self._planner.plan(parent):
            await asyncio.sleep(PLAN_SECONDS)

    async def _train(self, step: dict[str, Any]) -> None:
        number, version = step["number"], step["version"]
        self.stage = f"training step {number} ({step['parent']} to {version})"
        deaths = 0
        while True:
            try:
                manifest = await self._trainer.train(
                    self._planner.batch_path(step["batch"]), step["parent"], version
                )
                self._state.finish_training(number, manifest.metrics, manifest.samples)
                self.trainer_stage = ""
                self.problem = None
                return
            except TrainingRejected as error:
                return self._reject(number, str(error))
            except UserError as error:
                self._report(f"step {number}: {error}")
                await asyncio.sleep(RETRY_SECONDS)
            except TrainerDied as error:
                deaths += 1
                if deaths >= MAX_DEATHS_PER_STEP:
                    self._reject(number, f"the trainer died {deaths} times: {error}")
                await self._restart_after(error)
                if deaths >= MAX_DEATHS_PER_STEP:
                    return None

    async def _restart_after(self, error: TrainerDied) -> None:
        """Start the trainer again, as often as it takes."""
        while True:
            self.trainer_deaths += 1
            self._report(f"the trainer died ({error}) and is started again")
            await asyncio.sleep(self._config.trainer_restart_seconds)
            try:
                return await self._trainer.start()
            except TrainerDied as again:
                error = again

    async def _publish(self, step: dict[str, Any]) -> None:
        number, version = step["number"], step["version"]
        self.stage = f"publishing {version}"
        failures = 0
        while True:
            try:
                await self._serving.publish(version, number)
                self._rejected = 0
                self.problem = None
                return self._planner.drop_batches(number - KEEP_BATCHES)
            except UserError as error:
                self._report(f"{version} is not published: {error}")
            except SwapFailed as error:
                failures += 1
                self._report(f"{version} is not published: {error}")
                # Another try would only show the wrong weights to the agents once more.
                if failures >= MAX_SWAP_FAILURES or isinstance(error, CanaryFailed):
                    self._rejected += 1
                    return self._state.reject_version(version, number, str(error))
            await asyncio.sleep(RETRY_SECONDS)

    def _note_progress(self, stage: str) -> None:
        self.trainer_stage = stage

    def _reject(self, number: int, reason: str) -> None:
        self._rejected += 1
        self._report(f"step {number} rejected: {reason}")
        self._state.reject_step(number, reason)

    def _report(self, problem: str) -> None:
        if problem != self.problem:
            logger.error("%s", problem)
        self.problem = problem
