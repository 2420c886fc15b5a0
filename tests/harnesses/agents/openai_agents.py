"""An agent of the OpenAI Agents SDK with a tool and a subagent, streamed: BASE_URL PROMPT."""

import asyncio
import subprocess
import sys

from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI

base_url, prompt = sys.argv[1:]


@function_tool
def bash(command: str) -> str:
    """Run a command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout


async def main() -> None:
    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=base_url, api_key="key-of-the-harness"))
    helper = Agent(name="helper", instructions="Do the subtask.", model="test-model", tools=[bash])
    delegate = helper.as_tool(tool_name="delegate", tool_description="Give a subtask away.")
    agent = Agent(
        name="worker", instructions="Use the tools.", model="test-model", tools=[bash, delegate]
    )
    result = Runner.run_streamed(agent, prompt)
    async for _ in result.stream_events():
        pass
    print(result.final_output)


asyncio.run(main())
