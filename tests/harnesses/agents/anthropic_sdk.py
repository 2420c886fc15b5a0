"""A streamed tool loop on the Anthropic SDK, as its documentation shows it: BASE_URL PROMPT."""

import subprocess
import sys

from anthropic import Anthropic

SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
}
base_url, prompt = sys.argv[1:]
client = Anthropic(base_url=base_url, api_key="key-of-the-harness")
tool = {"name": "bash", "description": "Run a command.", "input_schema": SCHEMA}
messages = [{"role": "user", "content": prompt}]
while True:
    with client.messages.stream(
        model="test-model", max_tokens=1000, messages=messages, tools=[tool]
    ) as stream:
        reply = stream.get_final_message()
    messages.append({"role": "assistant", "content": reply.content})
    calls = [block for block in reply.content if block.type == "tool_use"]
    if not calls:
        break
    results = []
    for call in calls:
        done = subprocess.run(
            call.input["command"], shell=True, capture_output=True, text=True, check=True
        )
        results.append({"type": "tool_result", "tool_use_id": call.id, "content": done.stdout})
    messages.append({"role": "user", "content": results})
print("".join(block.text for block in reply.content if block.type == "text"))
