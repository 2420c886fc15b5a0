"""Runs the agent program as a child process and hands it rollouts."""

import asyncio
import contextlib
import sys
from pathlib import Path

import msgspec

from deploy.demo.agent_messages import Result, Rollout

STOP_SECONDS = 5.0


class AgentProcess:
    """One agent process that runs many rollouts at once. One that died is started again."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[str, asyncio.Future[Result]] = {}
        self._starting = asyncio.Lock()

    async def run(self, rollout: Rollout) -> Result:
        """Run one rollout. When the process dies meanwhile, that is an infrastructure failure."""
        process = await self._running()
        assert process.stdin is not None
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[rollout.rollout] = waiting
        try:
            process.stdin.write(msgspec.json.encode(rollout) + b"\n")
            await process.stdin.drain()
            return await waiting
        except ConnectionError as error:
            return _lost(rollout.rollout, f"the agent process can't be reached: {error}")
        finally:
            self._waiting.pop(rollout.rollout, None)

    async def close(self) -> None:
        """End the process; rollouts in flight are dropped."""
        if self._reader is not None:
            self._reader.cancel()
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _running(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None or self._reader is None or self._reader.done():
                self._log.parent.mkdir(parents=True, exist_ok=True)
                with self._log.open("ab") as log:
                    self._process = await asyncio.create_subprocess_exec(
                        *(sys.executable, "-m", "deploy.demo.agent"),
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        stderr=log,
                        # Ctrl-C is for us alone; the end of stdin tells the agent.
                        start_new_session=True,
                    )
                self._reader = asyncio.create_task(self._read(self._process), name="agent results")
            assert self._process is not None
            return self._process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            result = msgspec.json.decode(line, type=Result)
            self._settle(result.rollout, result)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        code = await process.wait()
        for rollout in list(self._waiting):
            self._settle(rollout, _lost(rollout, f"the agent process ended ({code})"))

    def _settle(self, rollout: str, result: Result) -> None:
        waiting = self._waiting.get(rollout)
        if waiting is not None and not waiting.done():
            waiting.set_result(result)


def _lost(rollout: str, error: str) -> Result:
    return Result(rollout, failure="infrastructure", error=error)
