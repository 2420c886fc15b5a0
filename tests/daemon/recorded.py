"""Makes recorded exchanges and shards in the formats of the sidecar and the engine's token tap."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sidecar.traces import record
from sidecar.traces.record import Body, Exchange, Outcome, Request, Response, Session
from sidecar.traces.shards import SUFFIX, ShardEncoder

PARAMS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "n": 1,
    "seed": None,
    "max_tokens": 64,
    "min_tokens": 0,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "logit_bias": False,
    "bad_words": False,
    "allowed_token_ids": False,
    "structured_outputs": False,
    "logprobs_mode": "processed_logprobs",
}


def tap_lines(
    prompt: Sequence[int],
    outputs: Sequence[Sequence[int]],
    *,
    versions: Sequence[str] = ("v0",),
    params: dict[str, Any] | None = None,
    request: int = 0,
    finish: str = "stop",
) -> list[str]:
    """Tap lines of one engine request; the last of ``versions`` covers the remaining tokens."""
    events: list[dict[str, Any]] = [
        {
            "e": "prompt",
            "r": request,
            "id": "chatcmpl-1",
            "ids": list(prompt),
            "params": {**PARAMS, **(params or {})},
        }
    ]
    for index, ids in enumerate(outputs):
        for k, token in enumerate(ids):
            version = versions[min(k, len(versions) - 1)]
            lp = [-0.5 - 0.001 * token]
            events.append(
                {"e": "tok", "r": request, "i": index, "ids": [token], "lp": lp, "v": version}
            )
        events.append({"e": "end", "r": request, "i": index, "n": len(ids), "finish": finish})
    return [json.dumps(event) for event in events]


def exchange(
    call: str,
    *,
    run: str | None = "run-1",
    prompt: Sequence[int] = (1, 2, 3),
    outputs: Sequence[Sequence[int]] = ((4, 5),),
    messages: list[dict[str, Any]] | None = None,
    reply: str = "ok",
    started: float = 1000.0,
    outcome: Outcome = "complete",
    status: int = 200,
    tap: list[str] | None = None,
    versions: Sequence[str] = ("v0",),
    params: dict[str, Any] | None = None,
    usage: dict[str, int] | None = None,
    route: record.Route = "chat",
    headers: list[tuple[str, str]] | None = None,
    session: str | None = None,
    tools: list[Any] | None = None,
) -> Exchange:
    """A chat-completions exchange; ``usage`` and ``tap`` default to the true ones."""
    sampled = sum(len(ids) for ids in outputs)
    request: dict[str, Any] = {
        "model": "m",
        "messages": messages or [{"role": "user", "content": "hi"}],
    }
    if tools:
        request["tools"] = tools
    response = {
        "choices": [
            {
                "index": k,
                "message": {"role": "assistant", "content": reply},
                "finish_reason": "stop",
            }
            for k in range(len(outputs))
        ],
        "usage": usage or {"prompt_tokens": len(prompt), "completion_tokens": sampled},
    }
    return Exchange(
        id=call,
        route=route,
        session=Session(run=run, session=session, peer="127.0.0.1:5000"),
        upstream="http://127.0.0.1:8000",
        request=Request(
            "POST",
            "/v1/chat/completions",
            headers or [],
            Body.of(json.dumps(request).encode()),
        ),
        started=started,
        ended=started + 0.5,
        outcome=outcome,
        response=Response(
            status,
            [("Content-Type", "application/json")],
            Body.of(json.dumps(response).encode()),
        ),
        tap=tap_lines(prompt, outputs, versions=versions, params=params) if tap is None else tap,
        tap_source="inline",
    )


def append(path: Path, frames: Sequence[Sequence[record.Record]]) -> Path:
    """Append frames of records to a shard, named ``<path>.jsonl.zst``."""
    shard = path.with_name(path.name + SUFFIX)
    encoder = ShardEncoder()
    with shard.open("ab") as file:
        for records in frames:
            file.write(encoder.frame([record.encode(r) for r in records]))
    return shard
