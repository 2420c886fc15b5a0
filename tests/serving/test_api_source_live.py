"""The ``api`` token source with the real server, its tap not asked: the agent can't tell, and the
tokens are those that the tap sees.
"""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from daemon import exchange
from sidecar.traces.record import Exchange
from tests.serving.protocols import CHAT, COMPLETIONS, QUESTION, Protocol
from tests.serving.tapped import tapped_post
from tests.sidecar.running import RunningSidecar
from tests.sidecar.test_records import call_of

pytestmark = pytest.mark.vllm

# What differs from one reply to the next, whoever asks. Request ids are set by the client.
_CHANGES = re.compile(rb'"created":\d+|"id":"(?:chatcmpl-tool|call)[^"]*"')
_INDEX = re.compile(rb'"choices":\[\{"index":(\d+)')
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
TOOLS = {
    "messages": [{"role": "user", "content": "What is 2 + 3? Use the tool."}],
    "tools": [ADD],
    "tool_choice": "required",
}
CASES: list[tuple[str, Protocol, dict[str, Any]]] = [
    ("greedy", CHAT, {"temperature": 0}),
    ("greedy", COMPLETIONS, {"temperature": 0}),
    ("seeded", CHAT, {"temperature": 0.9, "seed": 7}),
    ("seeded", COMPLETIONS, {"temperature": 0.9, "seed": 7}),
    ("choices", CHAT, {"temperature": 0.9, "seed": 3, "n": 2}),
    ("choices", COMPLETIONS, {"temperature": 0.9, "seed": 3, "n": 2, "prompt": [QUESTION, "Red"]}),
    ("own logprobs", CHAT, {"temperature": 0, "logprobs": True, "top_logprobs": 2}),
    ("own logprobs", COMPLETIONS, {"temperature": 0, "logprobs": 2}),
    ("own ids", CHAT, {"temperature": 0, "return_token_ids": True}),
    ("null", CHAT, {"temperature": 0, "logprobs": None, "top_logprobs": None}),
    ("stop", CHAT, {"temperature": 0, "stop": [" of"]}),
    ("tool", CHAT, {"temperature": 0} | TOOLS),
]


@pytest.fixture(scope="module")
def sidecar(vllm_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSidecar]:
    folder = tmp_path_factory.mktemp("sidecar") / "traces"
    running = RunningSidecar(vllm_server, folder, token_source="api")
    yield running
    running.stop()


def _ask(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url + path, json=body, headers={"x-request-id": "same"}, timeout=120)


def _plain(reply: httpx.Response) -> list[bytes]:
    """Return the reply, its events by choice: several choices come in any order."""

    def choice(event: bytes) -> int:
        found = _INDEX.search(event)
        return int(found[1]) if found else len(events)

    events = _CHANGES.sub(b"", reply.content).split(b"\n\n")
    return sorted(events, key=choice)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("name", "protocol", "params"), CASES, ids=lambda value: str(value)[:12])
def test_the_agent_gets_the_bytes_of_a_plain_vllm(
    vllm_server: str,
    sidecar: RunningSidecar,
    name: str,
    protocol: Protocol,
    params: dict[str, Any],
    stream: bool,
) -> None:
    body = protocol.body(10, stream, **params)
    for attempt in range(4):
        direct = _ask(vllm_server, protocol.path, body)
        run = f"{name}-{protocol.name}-{stream}-{attempt}".replace(" ", "-")
        through = _ask(f"{sidecar.url}/r/{run}", protocol.path, body)
        assert direct.status_code == through.status_code == 200
        # vLLM puts several tokens in one event, now and then, when the machine is busy.
        if _plain(direct) == _plain(through):
            break
    assert _plain(through) == _plain(direct)
    if not stream:
        assert through.headers["content-length"] == str(len(through.content))
    _check_tokens(call_of(sidecar, run), vllm_server, protocol, body)


def _check_tokens(call: Exchange, url: str, protocol: Protocol, body: dict[str, Any]) -> None:
    """The call's tokens pass the checks and are those that the tap reports for such a request."""
    assert call.tap_source == "api"
    entries = exchange.read(call)
    tapped = tapped_post(url, protocol.path, body).requests()
    outputs = [(r, o) for r in tapped for o in r.outputs.values()]
    assert len(entries) == len(outputs)
    found = {(e.call.request_index, e.call.output_index): e.call for e in entries if e.call}
    for request, output in outputs:
        read = found[request.index, output.index]
        assert read.failures == ()
        assert read.prompt_ids.tolist() == request.prompt_ids
        assert read.output_ids.tolist() == output.ids
        assert np.allclose(read.logprobs, output.logprobs, atol=1e-3)


@pytest.mark.parametrize(
    "params", [{"top_logprobs": 3}, {"logprobs": "maybe"}, {"n": 0}, {"messages": 1}], ids=str
)
def test_what_vllm_refuses_it_refuses(
    vllm_server: str, sidecar: RunningSidecar, params: dict[str, Any]
) -> None:
    body = CHAT.body(4, False, **params)
    direct, through = _ask(vllm_server, CHAT.path, body), _ask(sidecar.url, CHAT.path, body)
    assert direct.status_code == through.status_code >= 400
    assert through.content == direct.content


def test_a_cancelled_stream_keeps_what_came(vllm_server: str, sidecar: RunningSidecar) -> None:
    body = CHAT.body(400, True, temperature=0, ignore_eos=True)
    with httpx.stream("POST", f"{sidecar.url}/r/cut{CHAT.path}", json=body, timeout=120) as reply:
        for k, line in enumerate(reply.iter_lines()):
            if k > 20:
                break
            assert '"token_ids":[' not in line
    call = call_of(sidecar, "cut")
    (entry,) = exchange.read(call)
    assert entry.call is not None and entry.left_out == "cancelled"
    assert len(entry.call.output_ids) == len(entry.call.logprobs) > 3
    whole = tapped_post(vllm_server, CHAT.path, body | {"max_tokens": 40}).output().ids
    assert whole[: len(entry.call.output_ids)] == entry.call.output_ids.tolist()[:40]
