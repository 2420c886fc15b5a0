"""Somebody else who uses the model while it is trained: one long reply across every swap.

The task's own replies are short; a swap meets few of them. The bystander is an ordinary OpenAI
client that streams a longer reply whenever a version is about to be published.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
from openai import AsyncOpenAI

from deploy.demo.settings import SERVED_MODEL_NAME

MAX_TOKENS = 96
PROMPT = "Tell me a long story about a dragon who likes to bake bread."
PUBLISHING_NEXT = ("writing", "publishing")
"""Words in the trainer's or the scheduler's stage that say that a swap is near."""


class Reply(msgspec.Struct, frozen=True):
    """One streamed reply. ``finish`` is the finish reason, None when the stream broke off;
    ``longest_gap_s`` the longest wait between two of its events, in seconds."""

    run: str
    finish: str | None
    longest_gap_s: float
    error: str = ""


class Bystander:
    """Speaks once for every step; ``replies`` holds what came of it."""

    def __init__(self, base_url: Callable[[str], str]) -> None:
        self._client = AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", max_retries=8)
        self._base_url = base_url
        self._spoken: dict[int, asyncio.Task[None]] = {}
        self.replies: list[Reply] = []

    def status(self, status: dict[str, Any]) -> None:
        """Take the daemon's status: speak when a version is about to be published."""
        step, trainer = status["step"], status["trainer"]
        if not step or step["number"] in self._spoken:
            return
        stage = f"{trainer['detail']} {trainer['stage']}"
        if any(word in stage for word in PUBLISHING_NEXT):
            self._spoken[step["number"]] = asyncio.create_task(self._speak(step["number"]))

    async def _speak(self, step: int) -> None:
        run = f"bystander.{step}"
        finish, longest, last, error = None, 0.0, None, ""
        try:
            stream = await self._client.with_options(
                base_url=self._base_url(run)
            ).chat.completions.create(
                model=SERVED_MODEL_NAME,
                messages=[{"role": "user", "content": PROMPT}],
                max_tokens=MAX_TOKENS,
                temperature=1.0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for chunk in stream:
                now = time.monotonic()
                longest = max(longest, now - last) if last is not None else 0.0
                last = now
                finish = chunk.choices[0].finish_reason or finish
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        self.replies.append(Reply(run, finish, longest, error))

    async def close(self) -> None:
        """Wait for replies under way, for a moment, and drop what does not end."""
        if self._spoken:
            _, late = await asyncio.wait(self._spoken.values(), timeout=30)
            for task in late:
                task.cancel()
        await self._client.close()
