"""The agent of the demo: an ordinary program on the openai-agents SDK, streaming, with one tool.

It knows nothing of Ridealong. Rollouts come as JSON lines on stdin (``Rollout``), each with the
base URL of its model server; results go as JSON lines to stdout (``Result``), in the order they
end. Importing the SDK takes seconds, so one process runs all rollouts, side by side. It ends when
stdin does.
"""

import asyncio
import sys
import time
from typing import BinaryIO, Literal

import msgspec
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunContextWrapper,
    Runner,
    TResponseInputItem,
    function_tool,
    set_tracing_disabled,
)
from agents.exceptions import AgentsException
from agents.items import ToolCallItem
from agents.result import RunResultStreaming
from openai import AsyncOpenAI, BadRequestError

from deploy.demo.agent_messages import Result, Rollout
from deploy.demo.grader import ToolCall
from deploy.demo.tasks import Task, answer, question

INSTRUCTIONS = "Look up the price."
MAX_TURNS = 2
"""One for the tool call, one for the answer."""
MAX_TOKENS = 32
MAX_RETRIES = 8
"""The SDK's waits double from 0.5 to 8 s: a server that is away for half a minute is survived."""
TIMEOUT_SECONDS = 180.0


def _unknown(context: RunContextWrapper[Task], error: Exception) -> str:
    return "unknown"


@function_tool(failure_error_function=_unknown)
async def price(context: RunContextWrapper[Task], item: str) -> str:
    """Look up the price of an item."""
    asked = context.context.asked
    return str(asked.price) if item.strip() == asked.item else "unknown"


async def run_rollout(client: AsyncOpenAI, rollout: Rollout) -> Result:
    """Run the agent once. Never raises: what goes wrong is in the result."""
    agent = Agent[Task](
        name="shopkeeper",
        instructions=INSTRUCTIONS,
        model=OpenAIChatCompletionsModel(
            rollout.model, client.with_options(base_url=rollout.base_url)
        ),
        model_settings=ModelSettings(temperature=1.0, max_tokens=MAX_TOKENS),
        tools=[price],
    )
    run = Runner.run_streamed(
        agent, _conversation(rollout.task), context=rollout.task, max_turns=MAX_TURNS
    )
    stream = _Stream()
    try:
        async for event in run.stream_events():
            if event.type == "raw_response_event":
                stream.event(event.data.type)
    except (AgentsException, BadRequestError) as error:
        # The SDK rejects what the model wrote, or the server the conversation made of it.
        return _result(rollout, run, stream, "agent", error)
    except Exception as error:
        return _result(rollout, run, stream, "infrastructure", error)
    return _result(rollout, run, stream)


def _conversation(task: Task) -> list[TResponseInputItem]:
    """The worked example as if it had just happened, then the question."""
    example = task.example
    return [
        {"role": "user", "content": question(example.item)},
        {
            "type": "function_call",
            "call_id": "call_example",
            "name": price.name,
            "arguments": msgspec.json.encode({"item": example.item}).decode(),
        },
        {
            "type": "function_call_output",
            "call_id": "call_example",
            "output": str(example.price),
        },
        {"role": "assistant", "content": answer(example)},
        {"role": "user", "content": question(task.asked.item)},
    ]


def _result(
    rollout: Rollout,
    run: RunResultStreaming,
    stream: "_Stream",
    failure: Literal["agent", "infrastructure"] | None = None,
    error: Exception | None = None,
) -> Result:
    calls = [
        ToolCall(item.tool_name or "", str(getattr(item.raw_item, "arguments", "")))
        for item in run.new_items
        if isinstance(item, ToolCallItem)
    ]
    return Result(
        rollout=rollout.rollout,
        calls=calls,
        final_output=None if run.final_output is None else str(run.final_output),
        failure=failure,
        error="" if error is None else f"{type(error).__name__}: {error}",
        replies=stream.replies,
        longest_gap_s=stream.longest_gap,
    )


class _Stream:
    """Counts the replies that came to their end, and the longest time between two events of one."""

    def __init__(self) -> None:
        self.replies = 0
        self.longest_gap = 0.0
        self._last: float | None = None

    def event(self, kind: str) -> None:
        now = time.monotonic()
        if self._last is not None and kind != "response.created":
            self.longest_gap = max(self.longest_gap, now - self._last)
        self._last = now
        self.replies += kind == "response.completed"


async def serve(results: BinaryIO) -> None:
    """Run rollouts from stdin until it ends, then drop what is unfinished."""
    reader = asyncio.StreamReader(limit=2**20)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    client = AsyncOpenAI(
        base_url="http://127.0.0.1",
        api_key="none",
        max_retries=MAX_RETRIES,
        timeout=TIMEOUT_SECONDS,
    )

    async def run(rollout: Rollout) -> None:
        result = await run_rollout(client, rollout)
        results.write(msgspec.json.encode(result) + b"\n")
        results.flush()

    running: set[asyncio.Task[None]] = set()
    while line := await reader.readline():
        task = asyncio.create_task(run(msgspec.json.decode(line, type=Rollout)))
        running.add(task)
        task.add_done_callback(running.discard)
    for task in running:
        task.cancel()


def main() -> None:
    """Libraries that print must not spoil the results: they get stderr."""
    results = sys.stdout.buffer
    sys.stdout = sys.stderr
    set_tracing_disabled(True)
    asyncio.run(serve(results))


if __name__ == "__main__":
    main()
