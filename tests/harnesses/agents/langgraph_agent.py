"""LangChain's agent (a LangGraph graph) with a tool and a subagent, streamed: BASE_URL
PROMPT."""

import subprocess
import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

base_url, prompt = sys.argv[1:]


@tool
def bash(command: str) -> str:
    """Run a command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout


model = ChatOpenAI(
    base_url=base_url, api_key="key-of-the-harness", model="test-model", streaming=True
)
helper = create_agent(model, tools=[bash], system_prompt="Do the subtask.")


@tool
def delegate(task: str) -> str:
    """Give a subtask away."""
    return helper.invoke({"messages": [{"role": "user", "content": task}]})["messages"][-1].content


agent = create_agent(model, tools=[bash, delegate], system_prompt="Use the tools.")
result = agent.invoke({"messages": [{"role": "user", "content": prompt}]})
print(result["messages"][-1].content)
