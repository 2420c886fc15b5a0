"""What the agent receives through the sidecar, beside what it receives without it."""

import json
import re
import time
from typing import Any

import httpx
import pytest

from tests.loop.conftest import RunningSidecar
from tokenization.tap import wire

pytestmark = pytest.mark.vllm

MESSAGES = [{"role": "user", "content": "Tell me three facts about the sea."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a word up",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 24}),
    "chat n=2": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 12, "n": 2}),
    "chat logprobs": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 8, "logprobs": True, "top_logprobs": 2},
    ),
    "chat tools": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 16, "tools": [TOOL], "tool_choice": "auto"},
    ),
    "completions": ("/v1/completions", {"prompt": "The sea is", "max_tokens": 16}),
    # The Messages API has no seed: only greedy decoding repeats itself.
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 16, "temperature": 0}),
    "responses": ("/v1/responses", {"input": "Hello there.", "max_output_tokens": 16}),
    "bad request": ("/v1/chat/completions", {"messages": "no list"}),
    "unknown model": ("/v1/chat/completions", {"messages": MESSAGES, "model": "nobody"}),
}


def _without_what_differs_by_nature(body: bytes) -> bytes:
    """Blank what no two calls share: times of creation, and ids the server draws at random."""
    body = re.sub(rb'"(created|created_at|completed_at)":\s*[\d.]+', rb'"\1":0', body)
    body = re.sub(
        rb"(chatcmpl|cmpl|resp|msg|rs|fc|call|chatcmpl-tool)[-_][0-9a-z_-]+", rb"\1", body
    )
    body = re.sub(rb'"(id|item_id)":\s*"[0-9a-f]{16,32}"', rb'"\1":"x"', body)
    # Several choices are sampled side by side, and which comes first is the engine's timing.
    first = rb'data: \{"id":"[^"]*","object":"chat\.completion\.chunk"'
    if not re.match(first, body):
        return body
    return b"\n\n".join(sorted(body.split(b"\n\n"), key=_choice))


def _choice(event: bytes) -> int:
    """The choice that an event of a chat stream belongs to; what belongs to none comes last."""
    found = re.search(rb'"choices":\[\{"index":(\d+)', event)
    return int(found[1]) if found else 1 << 30


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", list(CALLS))
def test_replies_are_the_same_bytes(
    sidecar: RunningSidecar, vllm_server: str, name: str, stream: bool
) -> None:
    path, body = CALLS[name]
    body = {"model": "smol", "temperature": 0.7, "seed": 7, **body}
    if stream:
        body["stream"] = True
        if path == "/v1/chat/completions":
            body["stream_options"] = {"include_usage": True}
    content = json.dumps(body).encode()
    headers = {"content-type": "application/json", "x-request-id": "the-same"}

    def call(base: str) -> httpx.Response:
        return httpx.post(base + path, content=content, headers=headers, timeout=120)

    # The prefix cache changes usage details, so both find it filled.
    call(vllm_server)
    direct = call(vllm_server)
    proxied = call(sidecar.url)
    assert proxied.status_code == direct.status_code
    assert _without_what_differs_by_nature(proxied.content) == _without_what_differs_by_nature(
        direct.content
    )
    volatile = {"date", "content-length", "x-request-id"}
    assert {k: v for k, v in proxied.headers.items() if k not in volatile} == {
        k: v for k, v in direct.headers.items() if k not in volatile
    }
    if "content-length" in direct.headers:
        assert int(proxied.headers["content-length"]) == len(proxied.content)
    assert wire.HEADER not in proxied.headers and wire.LENGTH_HEADER not in proxied.headers

    (exchange,) = sidecar.wait_for_exchanges(1)
    assert exchange.request.body is not None and exchange.request.body.raw() == content
    assert exchange.response is not None and exchange.response.body is not None
    assert exchange.response.body.raw() == proxied.content
    assert exchange.outcome == "complete"
    if direct.status_code == 200:
        (request,) = wire.decode(exchange.tap)
        assert all(o.reported == len(o.ids) > 0 for o in request.outputs.values())
    else:
        assert exchange.tap == []


def _metric(server: str, name: str) -> float:
    text = httpx.get(f"{server}/metrics", timeout=10).text
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith((f"{name}{{", f"{name} "))
    )


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_leaves_frees_the_engine(
    sidecar: RunningSidecar, vllm_server: str, stream: bool
) -> None:
    body = {
        "model": "smol",
        "messages": MESSAGES,
        "stream": stream,
        "max_tokens": 1500,
        "ignore_eos": True,
    }
    before = _metric(vllm_server, "vllm:generation_tokens_total")
    tokens = 0
    freed_after: list[float] = []
    # Once is a proof; a machine that is busy with other things may take a second try.
    while not freed_after or (freed_after[-1] >= 0.5 and len(freed_after) < 3):
        with httpx.Client(timeout=60) as client:
            if stream:
                url = f"{sidecar.url}/v1/chat/completions"
                with client.stream("POST", url, json=body) as response:
                    lines = response.iter_lines()
                    for _ in range(12):
                        next(lines)
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(f"{sidecar.url}/v1/chat/completions", json=body, timeout=1.5)
            left = time.monotonic()
        while _metric(vllm_server, "vllm:num_requests_running") > 0:
            assert time.monotonic() - left < 5, "the engine still works for a client that has left"
            time.sleep(0.02)
        freed_after.append(time.monotonic() - left)

        exchange = sidecar.wait_for_exchanges(len(freed_after))[-1]
        assert exchange.outcome == "cancelled"
        (request,) = wire.decode(exchange.tap)
        (output,) = request.outputs.values()
        assert len(output.ids) == len(output.logprobs) == len(output.versions) > 0
        assert output.finish == "abort"
        tokens += len(output.ids)
    # The engine's own counter says how many tokens were produced for these calls.
    assert _metric(vllm_server, "vllm:generation_tokens_total") - before == tokens
    assert freed_after[-1] < 0.5, f"seconds until the engine was free: {freed_after}"
