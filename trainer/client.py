"""The daemon's side of the trainer process."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from deploy.errors import UserError
from trainer.batch import Manifest
from trainer.config import TrainerConfig
from trainer.errors import TrainerDied, TrainingRejected

__all__ = ["TrainerClient", "TrainerDied", "TrainingRejected"]

_LINE_LIMIT = 2**28
_CLOSE_SECONDS = 20.0

Progress = Callable[[str], None]


class TrainerClient:
    """Starts the trainer process and asks it for versions, one at a time.

    After ``TrainerDied`` call ``start`` again and repeat: a step that was completed is answered
    without training twice, one that was not begins anew from the parent's checkpoint.
    """

    def __init__(
        self,
        config: TrainerConfig,
        model: Path,
        directory: Path,
        on_progress: Progress | None = None,
    ) -> None:
        """Args:
        config: how to train.
        model: Hugging Face folder of the start model.
        directory: where ``weights/`` and ``checkpoints/`` are kept.
        on_progress: called with the name of each stage as it begins.
        """
        self._config = config
        self._model = model
        self._directory = directory
        self._on_progress = on_progress
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        # Also those whose caller was cancelled: the process still works on them.
        self._unanswered: set[int] = set()
        self._next_id = 0

    async def start(self) -> None:
        """Start the process and wait until it owns the directory.

        Raises:
            UserError: the model, the directory or the device can't be used.
            TrainerDied: the process ended instead of answering.
        """
        await self.close()
        self._unanswered.clear()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "trainer.service",
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_LIMIT,
            # OpenMP's threads spin at barriers by default. Where the serving engine shares the
            # cores they spin while what they wait for can't run: a step takes many times as long.
            env={"OMP_WAIT_POLICY": "PASSIVE"} | os.environ,
            # Ctrl-C ends it through the daemon, in order.
            start_new_session=True,
        )
        self._reader = asyncio.create_task(self._read(self._process))
        try:
            await self._call(
                "hello",
                config=msgspec.to_builtins(self._config),
                model=str(self._model),
                directory=str(self._directory),
            )
        except BaseException:
            await self.close()
            raise

    @property
    def pid(self) -> int | None:
        """Process id of the running trainer, None when there is none."""
        if self._process is None or self._process.returncode is not None:
            return None
        return self._process.pid

    async def bootstrap(self) -> Manifest:
        """Return version ``v0``, the start model, making it at the first call.

        Raises:
            UserError: it could not be written.
            TrainerDied: the process is gone.
        """
        return msgspec.convert(await self._call("bootstrap"), Manifest)

    async def train(self, batch: Path, parent: str, version: str) -> Manifest:
        """Make ``version`` from ``parent`` and a batch file (``trainer.batch.Batch.save``).

        A relative ``batch`` is relative to this process's working directory, which the trainer
        shares.

        Raises:
            TrainingRejected: the batch can't be trained on; nothing changed.
            UserError: the version could not be written; nothing changed.
            TrainerDied: the process is gone; start it and repeat.
        """
        reply = await self._call("train", batch=str(batch), parent=parent, version=version)
        return msgspec.convert(reply, Manifest)

    async def close(self) -> None:
        """End the process: at once when idle, else after a grace period by killing it."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            # A step under way is repeated from its batch: nothing is gained by waiting for it.
            async with asyncio.timeout(0 if self._unanswered else _CLOSE_SECONDS):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._reader is not None:
            await self._reader

    async def _call(self, method: str, **params: Any) -> Any:
        process = self._process
        if process is None or process.stdin is None or process.returncode is not None:
            raise TrainerDied("the trainer process is not running")
        self._next_id += 1
        number = self._next_id
        request = {"id": number, "method": method, "params": params}
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._unanswered.add(number)
        try:
            process.stdin.write(msgspec.json.encode(request) + b"\n")
            with contextlib.suppress(ConnectionError):
                # The reader reports the end of a process that no longer listens.
                await process.stdin.drain()
            return await future
        finally:
            self._waiting.pop(number, None)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        last_words = None
        async for line in process.stdout:
            message = msgspec.json.decode(line)
            if "progress" in message:
                if self._on_progress is not None:
                    self._on_progress(message["progress"])
                continue
            error = message.get("error")
            if error == "died":
                last_words = message["message"]
                continue
            self._unanswered.discard(message["id"])
            future = self._waiting.pop(message["id"], None)
            if future is None or future.done():
                continue
            if error == "rejected":
                future.set_exception(TrainingRejected(message["message"]))
            elif error == "user":
                future.set_exception(UserError(message["message"]))
            else:
                future.set_result(message["result"])
        code = await process.wait()
        reason = last_words or (f"killed by signal {-code}" if code < 0 else f"exit code {code}")
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(TrainerDied(f"the trainer process died: {reason}"))
