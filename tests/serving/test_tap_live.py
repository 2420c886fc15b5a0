"""The token tap in the real server: what it captures, and that the agent can't tell."""

import json
import math
import re
import secrets
import time
from typing import Any

import httpx
import pytest

from tests.serving import protocols
from tests.serving.protocols import CHAT, COMPLETIONS, MESSAGES, Protocol
from tests.serving.tapped import cut, tapped_post
from tokenization.tap import wire

pytestmark = pytest.mark.vllm

COUNTING = "Write the numbers from 1 to 500, separated by commas, and nothing else."
EVERY_PROTOCOL = pytest.mark.parametrize("protocol", protocols.ALL, ids=lambda p: p.name)
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def check_complete(output: wire.EngineOutput, version: str) -> None:
    assert output.reported == len(output.ids) == len(output.logprobs) == len(output.versions)
    assert set(output.versions) == {version}
    assert all(math.isfinite(p) and p <= 0 for p in output.logprobs)


@pytest.fixture
def version(vllm_server: str) -> str:
    return str(httpx.get(vllm_server + "/ridealong/engine").json()["version"])


@EVERY_PROTOCOL
@STREAM
def test_captures_every_token(
    vllm_server: str, version: str, protocol: Protocol, stream: bool
) -> None:
    reply = tapped_post(
        vllm_server, protocol.path, protocol.body(24, stream, temperature=0.9, top_p=0.95)
    )
    (request,) = reply.requests()
    output = reply.output()
    check_complete(output, version)
    assert (len(request.prompt_ids), len(output.ids)) == protocol.token_counts(reply.body, stream)
    assert output.finish in ("stop", "length")
    assert request.params["temperature"] == 0.9
    assert request.params["top_p"] == 0.95
    assert request.params["logprobs_mode"] == "processed_logprobs"
    pulled = httpx.get(vllm_server + wire.PULL_PATH + reply.nonce)
    assert pulled.text.splitlines() == reply.lines


@pytest.mark.parametrize("protocol", [CHAT, COMPLETIONS], ids=lambda p: p.name)
@STREAM
def test_several_choices(vllm_server: str, version: str, protocol: Protocol, stream: bool) -> None:
    reply = tapped_post(vllm_server, protocol.path, protocol.body(8, stream, n=2, seed=3))
    (request,) = reply.requests()
    assert request.params["n"] == 2
    assert sorted(request.outputs) == [0, 1]
    for output in request.outputs.values():
        check_complete(output, version)
    counts = protocol.token_counts(reply.body, stream)
    assert counts[1] == sum(len(o.ids) for o in request.outputs.values())


@STREAM
def test_several_prompts_in_one_call(vllm_server: str, version: str, stream: bool) -> None:
    body = COMPLETIONS.body(6, stream, prompt=["One two three", "Red green"], n=2)
    requests = tapped_post(vllm_server, COMPLETIONS.path, body).requests()
    assert [len(r.outputs) for r in requests] == [2, 2]
    assert requests[0].prompt_ids != requests[1].prompt_ids
    for request in requests:
        for output in request.outputs.values():
            check_complete(output, version)


@STREAM
def test_stop_string_inside_the_text(vllm_server: str, version: str, stream: bool) -> None:
    body = CHAT.body(60, stream, stop=["e"], temperature=0)
    reply = tapped_post(vllm_server, CHAT.path, body)
    output = reply.output()
    check_complete(output, version)
    assert output.finish == "stop"
    assert len(output.ids) == CHAT.token_counts(reply.body, stream)[1] < 60


@STREAM
def test_logprobs_are_those_that_vllm_reports(vllm_server: str, stream: bool) -> None:
    body = CHAT.body(16, stream, temperature=0.7, top_k=20, seed=5, logprobs=True, top_logprobs=3)
    reply = tapped_post(vllm_server, CHAT.path, body)
    documents = protocols.sse_documents(reply.body) if stream else [json.loads(reply.body)]
    reported = [
        entry["logprob"]
        for document in documents
        for choice in document["choices"]
        for entry in (choice.get("logprobs") or {}).get("content") or []
    ]
    assert reply.output().logprobs == pytest.approx(reported, abs=1e-6)


@STREAM
def test_tool_call_under_a_parser(vllm_server: str, version: str, stream: bool) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    body = CHAT.body(60, stream, tools=[tool], tool_choice="required", temperature=1.0, seed=1)
    reply = tapped_post(vllm_server, CHAT.path, body)
    (request,) = reply.requests()
    check_complete(reply.output(), version)
    assert request.params["structured_outputs"] is True
    assert len(reply.output().ids) == CHAT.token_counts(reply.body, stream)[1]


@EVERY_PROTOCOL
@STREAM
def test_agent_gets_the_same_bytes(vllm_server: str, protocol: Protocol, stream: bool) -> None:
    extra: dict[str, Any] = {} if protocol.name == "messages" else {"seed": 11}
    temperature = 0.0 if protocol.name == "messages" else 1.0
    body = protocol.body(16, stream, temperature=temperature, **extra)

    def pair() -> tuple[bytes, bytes]:
        plain = httpx.post(vllm_server + protocol.path, json=body, timeout=120)
        assert not [name for name in plain.headers if "ridealong" in name]
        tapped = tapped_post(vllm_server, protocol.path, body)
        assert tapped.status == plain.status_code == 200
        assert tapped.headers["content-type"] == plain.headers["content-type"]
        assert tapped.lines
        return normal(plain.content), normal(tapped.body)

    plain, tapped = pair()
    if stream and plain != tapped:
        # vLLM joins two tokens into one event when its handler lags behind the engine.
        plain, tapped = pair()
    assert tapped == plain


def normal(body: bytes) -> bytes:
    """Replace what differs from call to call by nature: ids and times."""
    body = re.sub(rb"\b(chatcmpl|cmpl|resp|msg|call|fc|rs)([-_])[0-9a-f]{6,}", rb"\1\2ID", body)
    body = re.sub(rb'"(id|item_id)":"[0-9a-f]{16}"', rb'"\1":"ID"', body)
    return re.sub(rb'"(created|created_at|completed_at)":[0-9.]+', rb'"\1":0', body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "nobody", "messages": MESSAGES}),
        ("/v1/chat/completions", {"model": "smol"}),
        ("/v1/messages/count_tokens", {"model": "smol", "messages": MESSAGES}),
        ("/v1/nowhere", {}),
    ],
)
def test_replies_without_the_engine_are_untouched(
    vllm_server: str, path: str, body: dict[str, Any]
) -> None:
    reply = tapped_post(vllm_server, path, body)
    plain = httpx.post(vllm_server + path, json=body)
    assert reply.status == plain.status_code
    assert wire.LENGTH_HEADER not in reply.headers
    assert reply.body == plain.content
    assert reply.lines == []


@pytest.mark.parametrize("nonce", ["short", "has space in it", "x" * 65])
def test_bad_nonce_is_no_tap(vllm_server: str, nonce: str) -> None:
    body = CHAT.body(2, stream=True)
    reply = httpx.post(vllm_server + CHAT.path, json=body, headers={wire.HEADER: nonce}, timeout=60)
    assert reply.status_code == 200
    assert b"\n: " not in reply.content
    assert not reply.content.startswith(b": ")


LONG_ANSWER: dict[str, dict[str, Any]] = {
    "chat": {"ignore_eos": True},
    "completions": {"ignore_eos": True},
    "responses": {"input": COUNTING, "temperature": 0},
    "messages": {"messages": [{"role": "user", "content": COUNTING}], "temperature": 0},
}


@EVERY_PROTOCOL
def test_cancelled_stream(vllm_server: str, version: str, protocol: Protocol) -> None:
    nonce = secrets.token_hex(8)
    body = protocol.body(1500, True) | LONG_ANSWER[protocol.name]
    received = b""
    with httpx.stream(
        "POST", vllm_server + protocol.path, json=body, headers={wire.HEADER: nonce}, timeout=60
    ) as reply:
        for chunk in reply.iter_raw():
            received += chunk
            if received.count(b'"e":"tok"') >= 5:
                break
    inline = wire.decode(cut(received[: received.rindex(b"\n") + 1], nonce)[1])
    check_aborted(vllm_server, version, nonce, at_least=len(inline[0].outputs[0].ids))


@EVERY_PROTOCOL
def test_cancelled_whole_reply(vllm_server: str, version: str, protocol: Protocol) -> None:
    nonce = secrets.token_hex(8)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            vllm_server + protocol.path,
            json=protocol.body(1500, False) | LONG_ANSWER[protocol.name],
            headers={wire.HEADER: nonce},
            timeout=1.0,
        )
    check_aborted(vllm_server, version, nonce, at_least=1)


def check_aborted(url: str, version: str, nonce: str, at_least: int) -> None:
    closed = time.monotonic()
    with httpx.Client() as client:
        while True:
            asked = time.monotonic()
            if not running(client, url):
                break
            assert asked - closed < 0.5, "the engine went on after the client had gone"
        pulled = client.get(url + wire.PULL_PATH + nonce)
    assert pulled.headers["content-type"].startswith("application/jsonl")
    (request,) = wire.decode(pulled.text.splitlines())
    (output,) = request.outputs.values()
    check_complete(output, version)
    assert output.finish == "abort"
    assert len(output.ids) >= at_least


def running(client: httpx.Client, url: str) -> float:
    metrics = client.get(url + "/metrics").text
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith("vllm:num_requests_running")
    )


def test_unknown_nonce(vllm_server: str) -> None:
    assert httpx.get(vllm_server + wire.PULL_PATH + "0123456789abcdef").status_code == 404


def test_engine_says_what_serves(vllm_server: str, version: str) -> None:
    engine = httpx.get(vllm_server + "/ridealong/engine").json()
    assert engine["tap"] == 1
    assert engine["tap_failures"] == 0
    assert engine["model"] == "smol"
    assert engine["max_model_len"] == 2048
    assert engine["logprobs_mode"] == "processed_logprobs"
    weights = httpx.get(vllm_server + "/weight_info").json()
    assert weights == {"weight_version": version}


def test_prefix_cache_reset_is_reported(vllm_server: str) -> None:
    prompt = COMPLETIONS.body(1, False, prompt="word " * 300)
    tapped_post(vllm_server, COMPLETIONS.path, prompt)
    assert tapped_post(vllm_server, COMPLETIONS.path, prompt).output().cached
    assert httpx.post(vllm_server + "/ridealong/reset_prefix_cache").json() == {"reset": True}
    assert tapped_post(vllm_server, COMPLETIONS.path, prompt).output().cached == 0
