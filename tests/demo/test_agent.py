"""The agent program itself, as a process, against a model server that answers as it is told."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from deploy.demo.agent_messages import Result, Rollout
from deploy.demo.agent_process import AgentProcess
from deploy.demo.grader import ToolCall
from deploy.demo.tasks import Priced, Task, answer

TASK = Task("000-piano", Priced("piano", 37), Priced("lemon", 81))
RIGHT_CALL = {
    "tool_calls": [
        {
            "index": 0,
            "id": "call_1",
            "type": "function",
            "function": {"name": "price", "arguments": '{"item": "piano"}'},
        }
    ]
}


class FakeModelServer:
    """Streams the deltas that ``reply`` returns; ``breaks`` cuts the stream off instead."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.reply: Callable[[dict[str, Any]], dict[str, Any]] = lambda request: {"content": "?"}
        self.status = 200
        self.breaks = False
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "too long"}}, status=self.status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        delta = self.reply(body)
        finish = "tool_calls" if "tool_calls" in delta else "stop"
        await self._send(response, {"role": "assistant", **delta}, None)
        if self.breaks:
            assert request.transport is not None
            request.transport.abort()
            return response
        await asyncio.sleep(0.2)
        await self._send(response, {}, finish)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, delta: Any, finish: str | None) -> None:
        chunk = {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 0,
            "model": "m",
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        }
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())


@pytest.fixture
async def server() -> AsyncIterator[FakeModelServer]:
    fake = FakeModelServer()
    app = web.Application()
    app.router.add_post("/r/{run}/v1/chat/completions", fake.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield fake
    await runner.cleanup()


@pytest.fixture(scope="module")
def agent_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agent") / "agent.log"


@pytest.fixture
async def agent(agent_log: Path) -> AsyncIterator[AgentProcess]:
    process = AgentProcess(agent_log)
    yield process
    await process.close()


async def rollout(agent: AgentProcess, server: FakeModelServer, run: str = "a") -> Result:
    return await asyncio.wait_for(
        agent.run(Rollout(run, f"{server.url}/r/{run}/v1", "m", TASK)), 60
    )


async def test_calls_the_tool_and_answers_with_its_result(agent, server):
    server.reply = lambda request: (
        {"content": answer(TASK.asked)}
        if request["messages"][-1] == {"role": "tool", "tool_call_id": "call_1", "content": "37"}
        else RIGHT_CALL
    )
    result = await rollout(agent, server)
    assert result.calls == [ToolCall("price", '{"item": "piano"}')]
    assert result.final_output == "The piano costs 37 coins."
    assert result.failure is None
    assert 0.1 < result.longest_gap_s < 5
    first, second = server.requests
    assert first["stream"] is True
    assert [message["role"] for message in first["messages"]] == (
        ["system", "user", "assistant", "tool", "assistant", "user"]
    )
    assert [tool["function"]["name"] for tool in first["tools"]] == ["price"]
    assert second["messages"][: len(first["messages"])] == first["messages"]


async def test_failures_of_the_agent_and_of_the_server_are_told_apart(agent, server):
    def reply(request: dict[str, Any]) -> dict[str, Any]:
        unknown = json.loads(json.dumps(RIGHT_CALL).replace('"price"', '"prize"'))
        return unknown

    server.reply = reply
    assert (await rollout(agent, server, "unknown-tool")).failure == "agent"

    server.reply = lambda request: RIGHT_CALL
    endless = await rollout(agent, server, "too-many-turns")
    assert endless.failure == "agent"
    assert endless.calls[0] == ToolCall("price", '{"item": "piano"}')

    server.status = 400
    assert (await rollout(agent, server, "refused")).failure == "agent"

    server.status, server.breaks = 200, True
    broken = await rollout(agent, server, "broken")
    assert broken.failure == "infrastructure"
    assert broken.error


async def test_rollouts_run_side_by_side_and_a_dead_process_is_replaced(agent, server):
    server.reply = lambda request: {"content": request["messages"][-1]["content"]}
    results = await asyncio.gather(*(rollout(agent, server, f"r{k}") for k in range(8)))
    assert [result.rollout for result in results] == [f"r{k}" for k in range(8)]
    assert all(result.final_output == "How much is a piano?" for result in results)

    hanging = asyncio.create_task(rollout(agent, server, "killed"))
    await asyncio.sleep(0.05)
    agent._process.kill()
    lost = await hanging
    assert lost.failure == "infrastructure"
    assert (await rollout(agent, server, "after")).failure is None
