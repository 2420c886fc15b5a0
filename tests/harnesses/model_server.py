"""A scripted model server: plays the model for real harnesses, and misbehaves on request.

It speaks chat completions, Responses and Messages, streamed and not. It is no model: what it says
comes from a script (by default one call of a shell tool that the request offers, then a closing
sentence), because the small real model of the other tests can't drive these harnesses' tool
protocols, and because faults have to come at a given byte. It holds raw sockets, so that it can
reset a connection and sees at once when the other side has gone.
"""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Protocol = Literal["chat", "responses", "messages"]

COMMAND = "echo said-$((6 * 7)); sleep 0.3"
"""It lasts a moment, as qwen-code may miss what a command prints that ends at once."""
OUTPUT = "said-42"
"""What ``COMMAND`` prints: a history that holds it proves that the tool was run."""
PREFACE = "I will run a command to find out."
CLOSING = "DONE: the tool has answered and this is the end of the work."

_SHELLS = ("bash", "shell", "exec_command", "run_shell_command", "terminal", "execute", "command")
_PATHS: dict[str, Protocol] = {
    "/chat/completions": "chat",
    "/responses": "responses",
    "/messages": "messages",
}
_REASONS = {200: "OK", 404: "Not Found", 426: "Upgrade Required", 429: "Too Many Requests"}


@dataclass
class Ask:
    """One model call as it reached the server. Times are monotonic seconds."""

    protocol: Protocol
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    at: float
    connection: int
    said: "Say | None" = None
    gone: float | None = None
    """When the client was seen to have hung up before its reply was complete."""
    begun: float | None = None
    """When the first piece of a streamed reply was sent."""

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def history(self) -> list[dict[str, Any]]:
        """Messages or input items."""
        found = self.body.get("input" if self.protocol == "responses" else "messages") or []
        return [{"role": "user", "content": found}] if isinstance(found, str) else found

    @property
    def tools(self) -> dict[str, dict[str, Any]]:
        """Name → JSON schema of the arguments. Of a namespace its functions, as ``space.name``."""
        found: dict[str, dict[str, Any]] = {}
        for tool in self.body.get("tools") or []:
            if tool.get("type") == "namespace":
                for inner in tool.get("tools") or []:
                    found[f"{tool['name']}.{inner['name']}"] = inner.get("parameters") or {}
                continue
            function = tool.get("function") or tool
            schema = function.get("parameters") or function.get("input_schema") or {}
            found[function.get("name", tool.get("type"))] = schema
        return found

    @property
    def results(self) -> int:
        """Number of tool results in the history."""
        count = 0
        for item in self.history:
            if item.get("role") == "tool" or item.get("type") == "function_call_output":
                count += 1
            elif isinstance(item.get("content"), list):
                count += sum(part.get("type") == "tool_result" for part in item["content"])
        return count

    def prompted(self, text: str) -> bool:
        """Whether a user said ``text``: not a tool, and not the model itself."""
        for item in self.history:
            content = item.get("content") if item.get("role") == "user" else None
            if isinstance(content, str):
                content = [{"text": content}]
            if any(text in str(part.get("text", "")) for part in content or []):
                return True
        return False

    def says(self, text: str) -> bool:
        """Whether ``text`` occurs anywhere in the request."""
        return text in json.dumps(self.body, ensure_ascii=False)


@dataclass
class Say:
    """What the model says: text, then tool calls (name, arguments).

    ``pause`` (seconds) comes after every word of a streamed reply. ``prompt_tokens`` is what the
    usage claims.
    """

    text: str = ""
    tools: Sequence[tuple[str, dict[str, Any]]] = ()
    pause: float = 0.0
    prompt_tokens: int = 100


@dataclass(frozen=True)
class Fault:
    """What happens instead of a proper reply: an error ``status``; ``reset`` before the headers;
    ``break``: the connection is reset in the middle of a streamed reply, ``share`` of its events
    sent."""

    kind: Literal["status", "reset", "break"]
    status: int = 500
    share: float = 0.4


Script = Callable[[Ask], Say]


def tool_round_trip(ask: Ask) -> Say:
    """The default script: one call of a shell tool, then the closing sentence."""
    if ask.results:
        return Say(CLOSING)
    if (name := shell_of(ask.tools)) is None:
        return Say(titled(ask) or CLOSING)
    return Say(PREFACE, [(name, arguments(ask.tools[name], COMMAND))])


def titled(ask: Ask) -> str | None:
    """A reply to a request for a title in JSON; None when it is no such request."""
    wanted = json.dumps([ask.body.get(key) for key in ("output_config", "response_format", "text")])
    return '{"title": "Say hello"}' if "json_schema" in wanted and "title" in wanted else None


def shell_of(tools: dict[str, dict[str, Any]]) -> str | None:
    """The name of the tool that runs shell commands."""
    by_name = {name.lower(): name for name in tools}
    return next((by_name[shell] for shell in _SHELLS if shell in by_name), None)


def arguments(schema: dict[str, Any], command: str) -> dict[str, Any]:
    """Arguments that fit a tool's schema: ``command`` where it takes one, fillers elsewhere."""
    made: dict[str, Any] = {}
    properties = schema.get("properties") or {}
    for name in schema.get("required") or list(properties)[:1]:
        kind = properties.get(name, {}).get("type")
        if name in ("command", "cmd", "script"):
            made[name] = ["bash", "-lc", command] if kind == "array" else command
        else:
            made[name] = {"boolean": False, "integer": 1, "number": 1, "array": []}.get(kind, "x")
    return made


@dataclass
class ModelServer:
    """Serves in a thread of its own; ``url`` is its root. Not for two scenarios at once."""

    asks: list[Ask] = field(default_factory=list)
    """The model calls since ``play``."""
    others: list[str] = field(default_factory=list)
    """Method and path of everything else."""

    def __post_init__(self) -> None:
        self._script: Script = tool_round_trip
        self._faults: list[Fault | None] = []
        self._connections = 0
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()

    def play(self, script: Script = tool_round_trip, faults: Sequence[Fault | None] = ()) -> None:
        """Begin a scenario: forget the calls so far; ``faults`` befall the next calls in turn."""
        self._script, self._faults = script, list(faults)
        self.asks, self.others = [], []

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._socket.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(asyncio.start_server(self._serve, sock=self._socket))
        self._ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        number = self._connections
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._exchange(reader, writer, number):
                pass
        writer.close()

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> bool:
        """One request and its reply; returns whether the connection goes on."""
        method, path, headers, raw = await _read_request(reader)
        protocol = _PATHS.get(path.partition("?")[0].removeprefix("/v1"))
        if method != "POST" or protocol is None:
            self.others.append(f"{method} {path}")
            await _send(writer, *_other(method, path, headers))
            return True
        ask = Ask(protocol, path, headers, json.loads(raw), time.monotonic(), number)
        self.asks.append(ask)
        fault = self._faults.pop(0) if self._faults else None
        if fault is not None and fault.kind == "reset":
            _reset(writer)
            return False
        if fault is not None and fault.kind == "status":
            kind = "rate_limit_error" if fault.status == 429 else "api_error"
            body = {"type": "error", "error": {"type": kind, "message": "scripted fault"}}
            await _send(writer, fault.status, body)
            return True
        ask.said = self._script(ask)
        answer = asyncio.create_task(self._answer(ask, writer, fault))
        watch = asyncio.create_task(_hung_up(reader))
        await asyncio.wait({answer, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done() or answer.exception() is not None:
            ask.gone = time.monotonic()
            answer.cancel()
        watch.cancel()
        await asyncio.wait({answer, watch})
        return ask.gone is None and answer.result()

    async def _answer(self, ask: Ask, writer: asyncio.StreamWriter, fault: Fault | None) -> bool:
        assert ask.said is not None
        if not ask.stream:
            # The silence of a slow model: words that nobody sees yet.
            await asyncio.sleep(ask.said.pause * len(ask.said.text.split(" ")))
            await _send(writer, 200, _WHOLE[ask.protocol](ask.said, ask.body))
            return True
        events = list(_STREAMED[ask.protocol](ask.said, ask.body))
        end = len(events) if fault is None else max(1, int(len(events) * fault.share))
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        ask.begun = time.monotonic()
        for event in events[:end]:
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            await asyncio.sleep(ask.said.pause)
        if fault is not None:
            await asyncio.sleep(0.2)  # What was sent must have been read: a reset overtakes data.
            _reset(writer)
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ", 2)
    pairs = (line.partition(":") for line in head[1:] if line)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int((await reader.readline()).split(b";")[0], 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readline()
        return method, path, headers, body
    return method, path, headers, await reader.readexactly(int(headers.get("content-length", 0)))


async def _hung_up(reader: asyncio.StreamReader) -> None:
    """Return when the other side has closed the connection or reset it."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(65536):
            pass


def _reset(writer: asyncio.StreamWriter) -> None:
    linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


def _other(method: str, path: str, headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
    if "upgrade" in headers:
        return 426, {"error": {"message": "no WebSocket here"}}
    if "/count_tokens" in path:
        return 200, {"input_tokens": 100}
    if path.partition("?")[0].endswith("/models"):
        model = {"id": "test-model", "object": "model", "created": 0, "owned_by": "test"}
        return 200, {"object": "list", "data": [model]}
    return (200 if method == "HEAD" else 404), {}


async def _send(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    text = json.dumps(body).encode()
    writer.write(
        f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(text)}\r\n\r\n".encode()
    )
    writer.write(text)
    await writer.drain()


def _words(text: str) -> list[str]:
    words = text.split(" ")
    return [word if k == 0 else f" {word}" for k, word in enumerate(words)] if text else []


def _event(payload: dict[str, Any], named: bool) -> bytes:
    name = f"event: {payload['type']}\n" if named else ""
    return f"{name}data: {json.dumps(payload)}\n\n".encode()


def _tokens(say: Say) -> tuple[int, int]:
    return say.prompt_tokens, len(say.text.split(" ")) + 10 * len(say.tools)


# OpenAI chat completions


def _chat_calls(say: Say) -> list[dict[str, Any]]:
    return [
        {
            "index": k,
            "id": f"call_{_fresh()}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(values)},
        }
        for k, (name, values) in enumerate(say.tools)
    ]


def _chat_usage(say: Say) -> dict[str, int]:
    prompt, completion = _tokens(say)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _chat_whole(say: Say, body: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": say.text}
    if calls := _chat_calls(say):
        message["tool_calls"] = [{k: v for k, v in c.items() if k != "index"} for c in calls]
    finish = "tool_calls" if say.tools else "stop"
    return {
        "id": f"chatcmpl-{_fresh()}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.get("model"),
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": _chat_usage(say),
    }


def _chat_stream(say: Say, body: dict[str, Any]) -> Iterator[bytes]:
    frame = {
        "id": f"chatcmpl-{_fresh()}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": body.get("model"),
    }

    def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return _event({**frame, "choices": [choice]}, named=False)

    yield chunk({"role": "assistant", "content": ""})
    for word in _words(say.text):
        yield chunk({"content": word})
    for call in _chat_calls(say):
        yield chunk({"tool_calls": [{**call, "function": {**call["function"], "arguments": ""}}]})
        text = call["function"]["arguments"]
        for piece in (text[: len(text) // 2], text[len(text) // 2 :]):
            delta = {"index": call["index"], "function": {"arguments": piece}}
            yield chunk({"tool_calls": [delta]})
    yield chunk({}, "tool_calls" if say.tools else "stop")
    if (body.get("stream_options") or {}).get("include_usage"):
        yield _event({**frame, "choices": [], "usage": _chat_usage(say)}, named=False)
    yield b"data: [DONE]\n\n"


# OpenAI Responses


def _response_items(say: Say) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if say.text:
        part = {"type": "output_text", "text": say.text, "annotations": []}
        items.append(
            {
                "id": f"msg_{_fresh()}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [part],
            }
        )
    for name, values in say.tools:
        space, _, short = name.rpartition(".")
        call = {
            "id": f"fc_{_fresh()}",
            "type": "function_call",
            "call_id": f"call_{_fresh()}",
            "name": short,
            "arguments": json.dumps(values),
            "status": "completed",
        }
        items.append(call | ({"namespace": space} if space else {}))
    return items


def _response(say: Say, body: dict[str, Any]) -> dict[str, Any]:
    prompt, completion = _tokens(say)
    return {
        "id": f"resp_{_fresh()}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "completed",
        "model": body.get("model"),
        "output": _response_items(say),
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        },
    }


def _responses_stream(say: Say, body: dict[str, Any]) -> Iterator[bytes]:
    whole = _response(say, body)
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    for number, event in enumerate(_responses_events(whole, begun)):
        yield _event({**event, "sequence_number": number}, named=True)


def _responses_events(whole: dict[str, Any], begun: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(whole["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            empty = {**item, "status": "in_progress", "content": []}
            part = item["content"][0]
            spot = {**at, "content_index": 0}
            yield {"type": "response.output_item.added", "output_index": index, "item": empty}
            blank = {**part, "text": ""}
            yield {"type": "response.content_part.added", **spot, "part": blank}
            for word in _words(part["text"]):
                yield {"type": "response.output_text.delta", **spot, "delta": word, "logprobs": []}
            text = part["text"]
            yield {"type": "response.output_text.done", **spot, "text": text, "logprobs": []}
            yield {"type": "response.content_part.done", **spot, "part": part}
        else:
            empty = {**item, "status": "in_progress", "arguments": ""}
            yield {"type": "response.output_item.added", "output_index": index, "item": empty}
            kind = "response.function_call_arguments"
            yield {"type": f"{kind}.delta", **at, "delta": item["arguments"]}
            yield {"type": f"{kind}.done", **at, "arguments": item["arguments"]}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": "response.completed", "response": whole}


# Anthropic Messages


def _blocks(say: Say) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": say.text}] if say.text else []
    for name, values in say.tools:
        blocks.append(
            {"type": "tool_use", "id": f"toolu_{_fresh()}", "name": name, "input": values}
        )
    return blocks


def _message(say: Say, body: dict[str, Any]) -> dict[str, Any]:
    prompt, completion = _tokens(say)
    return {
        "id": f"msg_{_fresh()}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model"),
        "content": _blocks(say),
        "stop_reason": "tool_use" if say.tools else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": prompt, "output_tokens": completion},
    }


def _messages_stream(say: Say, body: dict[str, Any]) -> Iterator[bytes]:
    for event in _messages_events(_message(say, body)):
        yield _event(event, named=True)


def _messages_events(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    usage = whole["usage"]
    begun = {**whole, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
    yield {"type": "message_start", "message": begun}
    yield {"type": "ping"}
    for index, block in enumerate(whole["content"]):
        start = {"type": "content_block_start", "index": index}
        delta = {"type": "content_block_delta", "index": index}
        if block["type"] == "text":
            yield {**start, "content_block": {"type": "text", "text": ""}}
            for word in _words(block["text"]):
                yield {**delta, "delta": {"type": "text_delta", "text": word}}
        else:
            yield {**start, "content_block": {**block, "input": {}}}
            text = json.dumps(block["input"])
            for piece in (text[: len(text) // 2], text[len(text) // 2 :]):
                yield {**delta, "delta": {"type": "input_json_delta", "partial_json": piece}}
        yield {"type": "content_block_stop", "index": index}
    delta = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield {
        "type": "message_delta",
        "delta": delta,
        "usage": {"output_tokens": usage["output_tokens"]},
    }
    yield {"type": "message_stop"}


_count = iter(range(1, 1 << 62))


def _fresh() -> str:
    return f"{next(_count):024x}"


_WHOLE = {"chat": _chat_whole, "responses": _response, "messages": _message}
_STREAMED = {"chat": _chat_stream, "responses": _responses_stream, "messages": _messages_stream}
