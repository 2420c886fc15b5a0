"""The calls that the doctor sends: each protocol streamed, with a tool, and hung up on."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from sidecar.traces.record import Route

Kind = Literal["plain", "streamed", "tool", "cancelled"]
KINDS: tuple[Kind, ...] = ("plain", "streamed", "tool", "cancelled")

_TIMEOUT = aiohttp.ClientTimeout(total=120)
_LIST_TIMEOUT = aiohttp.ClientTimeout(total=10)
_ERROR_CHARACTERS = 300
_COUNTED_TOKENS = 2000
_QUESTION = "What is the weather in Paris? Use the tool."
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_FUNCTION = {"name": "weather", "description": "Weather of a city.", "parameters": _SCHEMA}

ROUTES: tuple[Route, ...] = ("chat", "completions", "responses", "messages")
_PATHS: dict[Route, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}


@dataclass(frozen=True)
class Probe:
    """One call. ``run`` is the run id it goes by, unique among all probes."""

    route: Route
    kind: Kind
    run: str


@dataclass(frozen=True)
class Answer:
    """What the caller saw; ``error`` is None when all was well. ``status`` is 0 for no reply.

    ``reached``: the sidecar took the call.
    """

    status: int
    error: str | None = None
    reached: bool = True


@dataclass(frozen=True)
class Model:
    """A model that the server lists. ``length``: its longest sequence in tokens, None: not said."""

    name: str
    length: int | None = None


def probes(tag: str) -> list[Probe]:
    """Return all probes. The legacy completions protocol has no tools."""
    return [
        Probe(route, kind, f"{tag}.{route}.{kind}")
        for route in ROUTES
        for kind in KINDS
        if (route, kind) != ("completions", "tool")
    ]


def request(probe: Probe, model: Model) -> tuple[str, dict[str, Any]]:
    """Return path and body of a probe."""
    limit = _many(model) if probe.kind == "cancelled" else 32
    text = "Count from one to a thousand." if probe.kind == "cancelled" else _QUESTION
    body: dict[str, Any] = {"model": model.name}
    match probe.route:
        case "completions":
            body |= {"prompt": text, "max_tokens": limit}
        case "responses":
            body |= {"input": text, "max_output_tokens": limit}
        case _:
            body |= {"messages": [{"role": "user", "content": text}], "max_tokens": limit}
    if probe.kind != "plain":
        body["stream"] = True
        if probe.route in ("chat", "completions"):
            body["stream_options"] = {"include_usage": True}
    if probe.kind == "tool":
        body["tools"] = [_tool(probe.route)]
    return _PATHS[probe.route], body


def _many(model: Model) -> int:
    """Return how many tokens to ask for in a call that must not end before it is hung up on."""
    # A server refuses to generate more than the prompt leaves room for.
    return _COUNTED_TOKENS if model.length is None else min(_COUNTED_TOKENS, model.length // 2)


def _tool(route: Route) -> dict[str, Any]:
    if route == "chat":
        return {"type": "function", "function": _FUNCTION}
    if route == "responses":
        return {"type": "function", **_FUNCTION}
    return {
        "name": _FUNCTION["name"],
        "description": _FUNCTION["description"],
        "input_schema": _SCHEMA,
    }


async def models(base: str, run: str, key: str | None) -> tuple[Answer, list[Model]]:
    """Ask for the models through the sidecar; never raises for what the path does wrong."""
    try:
        async with (
            aiohttp.ClientSession(timeout=_LIST_TIMEOUT) as session,
            session.get(f"{base}/r/{run}/v1/models", headers=_authorization(key)) as reply,
        ):
            text = await reply.text(errors="replace")
    except (aiohttp.ClientError, TimeoutError) as error:
        return _unanswered(error), []
    if reply.status != 200:
        return Answer(reply.status, _message(text)), []
    try:
        listed = [_listed(one) for one in json.loads(text)["data"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return Answer(reply.status, f"not a list of models: {_message(text)}"), []
    return Answer(reply.status, None if listed else "the list is empty"), listed


def _listed(entry: Any) -> Model:
    length = entry.get("max_model_len")
    return Model(str(entry["id"]), length if isinstance(length, int) else None)


async def send(base: str, probe: Probe, model: Model, key: Callable[[str], str | None]) -> Answer:
    """Send a probe through the sidecar at ``base``; never raises for what the path does wrong.

    ``key`` returns the API key for a run, None for no key.
    """
    path, body = request(probe, model)
    url = f"{base}/r/{probe.run}{path}"
    sent = _authorization(key(probe.run))
    if probe.route == "messages":
        sent["anthropic-version"] = "2023-06-01"
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT) as session,
            session.post(url, json=body, headers=sent) as reply,
        ):
            if reply.status != 200:
                return Answer(reply.status, _message(await reply.text(errors="replace")))
            if probe.kind == "plain":
                return _whole(reply.status, await reply.read())
            return await _stream(probe, reply)
    except (aiohttp.ClientError, TimeoutError) as error:
        return _unanswered(error)


def _authorization(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def _unanswered(error: Exception) -> Answer:
    """Say why a call got no reply."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
        reason = getattr(cause, "verify_message", None) or str(cause)
        return Answer(0, f"the sidecar's certificate is not trusted: {reason}", reached=False)
    reached = not isinstance(error, aiohttp.ClientConnectorError)
    return Answer(0, str(error) or type(error).__name__, reached)


def _whole(status: int, body: bytes) -> Answer:
    try:
        json.loads(body)
    except ValueError:
        return Answer(status, "the reply is not JSON")
    return Answer(status)


async def _stream(probe: Probe, reply: aiohttp.ClientResponse) -> Answer:
    if not reply.content_type.startswith("text/event-stream"):
        return Answer(reply.status, f"a stream was asked for, {reply.content_type} came")
    pieces = 0
    async for _ in reply.content.iter_any():
        pieces += 1
        if probe.kind == "cancelled" and pieces >= 3:
            reply.close()
            await asyncio.sleep(0)
            return Answer(reply.status)
    if probe.kind == "cancelled":
        return Answer(reply.status, "the reply ended before it could be hung up on")
    if pieces < 2:
        return Answer(reply.status, "the stream came in one piece: something on the way buffers it")
    return Answer(reply.status)


def _message(text: str) -> str:
    """The server's words, from an error of OpenAI's, Anthropic's or any other shape."""
    try:
        value = json.loads(text)
        error = value.get("error", value)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:_ERROR_CHARACTERS]
