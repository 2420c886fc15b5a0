"""A tool loop on the OpenAI SDK, as its documentation shows it: BASE_URL chat|responses PROMPT."""

import json
import subprocess
import sys

from openai import OpenAI

PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
}
base_url, api, prompt = sys.argv[1:]
client = OpenAI(base_url=base_url, api_key="key-of-the-harness")


def run(arguments: str) -> str:
    command = json.loads(arguments)["command"]
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout


def chat() -> str:
    function = {"name": "bash", "description": "Run a command.", "parameters": PARAMETERS}
    tools = [{"type": "function", "function": function}]
    messages = [{"role": "user", "content": prompt}]
    while True:
        completion = client.chat.completions.create(
            model="test-model", messages=messages, tools=tools
        )
        reply = completion.choices[0].message
        if not reply.tool_calls:
            return reply.content
        messages.append(reply)
        for call in reply.tool_calls:
            result = run(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses() -> str:
    tool = {
        "type": "function",
        "name": "bash",
        "description": "Run a command.",
        "parameters": PARAMETERS,
        "strict": False,
    }
    items = [{"role": "user", "content": prompt}]
    while True:
        with client.responses.stream(model="test-model", input=items, tools=[tool]) as stream:
            for _ in stream:
                pass
            reply = stream.get_final_response()
        items += reply.output
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return reply.output_text
        for call in calls:
            output = run(call.arguments)
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": output}
            )


print({"chat": chat, "responses": responses}[api]())
