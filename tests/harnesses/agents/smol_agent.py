"""A smolagents tool-calling agent with a tool and a managed agent: BASE_URL PROMPT."""

import subprocess
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

base_url, prompt = sys.argv[1:]


@tool
def bash(command: str) -> str:
    """Run a command.

    Args:
        command: the command line.
    """
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout


model = OpenAIServerModel(model_id="test-model", api_base=base_url, api_key="key-of-the-harness")
helper = ToolCallingAgent(tools=[bash], model=model, name="delegate", description="Does a subtask.")
print(ToolCallingAgent(tools=[bash], model=model, managed_agents=[helper]).run(prompt))
