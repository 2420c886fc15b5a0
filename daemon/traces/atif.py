"""Conversations as trajectories of the Agent Trajectory Interchange Format, version 1.4.

Specification: Harbor, RFC 0001 (https://harborframework.com/docs/trajectory-format).
"""

import math
import re
from datetime import UTC
from typing import Any

from daemon.protocols import conversation as protocol
from daemon.protocols import shape
from daemon.protocols.conversation import (
    Image,
    Message,
    Other,
    Reasoning,
    Text,
    ToolCall,
    ToolResult,
)
from daemon.protocols.shape import ProtocolError
from daemon.traces.plain import moment
from daemon.traces.turns import Conversation, Turn
from tokenization.calls import version_spans

SCHEMA_VERSION = "ATIF-v1.4"

_UNKNOWN = "unknown"
_VERSION = re.compile(r"[/ ]v?([0-9][\w.+-]*)")


def trajectory(conversation: Conversation) -> dict[str, Any]:
    """Return a conversation as a trajectory.

    Token ids and log-probs stand with the steps of recorded calls whose checks passed, and nowhere
    else. What version 1.4 has no place for stands as a text in square brackets (images), or under
    ``unparsed`` (tool arguments that are no JSON object).
    """
    last = conversation.last
    assert last.said is not None
    steps: list[dict[str, Any]] = []
    for prompt in last.said.request.prompts or ():
        text = prompt if isinstance(prompt, str) else f"[{len(prompt)} token ids]"
        _add(steps, "user", message=text)
    position = -_leading_items(conversation.messages)
    count = len(conversation.messages)
    for number, message in enumerate(conversation.messages, 1):
        turn = last if number == count else conversation.earlier.get(position)
        choice = conversation.choice if number == count else None
        _take(steps, message, turn, choice)
        position += len(tuple(protocol.items(message)))
    calls = [*conversation.earlier.values(), last]
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": last.run,
        "agent": _agent(last),
        "steps": steps,
        "final_metrics": _totals(steps),
        "extra": {
            "agent": last.caller.agent,
            "calls": [turn.exchange.id for turn in calls],
            "recorded_by": "ridealong",
        },
    }


def _leading_items(messages: tuple[Message, ...]) -> int:
    """Items of the system prompts at the start, which the dialogue leaves out."""
    count = 0
    for message in messages:
        if message.role not in ("system", "developer"):
            break
        count += len(tuple(protocol.items(message)))
    return count


def _take(
    steps: list[dict[str, Any]], message: Message, turn: Turn | None, choice: int | None
) -> None:
    results = [part for part in message.parts if isinstance(part, ToolResult)]
    if results:
        if not steps or steps[-1]["source"] == "user":
            _add(steps, "system")
        observation = steps[-1].setdefault("observation", {"results": []})
        observation["results"] += [_result(result) for result in results]
    if message.role == "assistant":
        _take_reply(steps, message, turn, choice)
        return
    text = _text(message)
    if text or not results:
        source = "system" if message.role in ("system", "developer") else "user"
        _add(steps, source, message=text)


def _take_reply(
    steps: list[dict[str, Any]], message: Message, turn: Turn | None, choice: int | None
) -> None:
    # Some protocols say in several messages what is one turn.
    same_turn = bool(steps) and steps[-1]["source"] == "agent" and "observation" not in steps[-1]
    step = steps[-1] if same_turn else _add(steps, "agent")
    step["message"] = "\n".join(filter(None, (step["message"], _text(message))))
    reasoning = "\n".join(p.text for p in message.parts if isinstance(p, Reasoning) and p.text)
    if reasoning:
        before = step.get("reasoning_content")
        step["reasoning_content"] = f"{before}\n{reasoning}" if before else reasoning
    if calls := [_call(part) for part in message.parts if isinstance(part, ToolCall)]:
        step["tool_calls"] = [*step.get("tool_calls", ()), *calls]
    if turn is not None and "metrics" not in step:
        if ended := moment(turn.exchange.ended, UTC):
            step["timestamp"] = ended.isoformat()
        step["model_name"] = turn.model
        step["metrics"] = _metrics(turn, choice)


def _add(steps: list[dict[str, Any]], source: str, message: str = "") -> dict[str, Any]:
    steps.append({"step_id": len(steps) + 1, "source": source, "message": message})
    return steps[-1]


def _text(message: Message) -> str:
    return "\n".join(filter(None, map(_said, message.parts)))


def _said(part: Any) -> str:
    match part:
        case Text():
            return part.text
        case Image():
            return f"[image {part.ref or part.sha256}]"
        case Other():
            return f"[{part.kind}]"
    return ""


def _call(part: ToolCall) -> dict[str, Any]:
    try:
        arguments = shape.decode(part.arguments)
    except ProtocolError:
        arguments = None
    if not isinstance(arguments, dict):
        arguments = {"unparsed": part.arguments} if part.arguments else {}
    return {"tool_call_id": part.id, "function_name": part.name, "arguments": arguments}


def _result(result: ToolResult) -> dict[str, Any]:
    content = "\n".join(filter(None, map(_said, result.content)))
    return {"source_call_id": result.call_id, "content": content}


def _metrics(turn: Turn, choice: int | None) -> dict[str, Any]:
    assert turn.said is not None
    found: dict[str, Any] = {"extra": {"call": turn.exchange.id}}
    if usage := turn.said.usage:
        counts = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        }
        found |= {name: count for name, count in counts.items() if count is not None}
        if usage.reasoning_tokens is not None:
            found["extra"]["reasoning_tokens"] = usage.reasoning_tokens
    calls = [entry.call for entry in turn.entries() if entry.check == "passed" and entry.call]
    call = next((c for c in calls if choice is None or c.output_index == choice), None)
    if call is not None and (choice is not None or len(calls) == 1):
        found["prompt_token_ids"] = call.prompt_ids.tolist()
        found["completion_token_ids"] = call.output_ids.tolist()
        found["logprobs"] = [None if math.isnan(p) else p for p in call.logprobs.tolist()]
        found["extra"]["token_source"] = call.token_source
        found["extra"]["weight_versions"] = [
            {"from_token": start, "version": f"v{version}"}
            for start, version in version_spans(call.versions)
        ]
    return found


def _totals(steps: list[dict[str, Any]]) -> dict[str, Any]:
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    totals: dict[str, Any] = {"total_steps": len(steps)}
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
        if counts := [found[name] for found in metrics if name in found]:
            totals[f"total_{name}"] = sum(counts)
    return totals


def _agent(turn: Turn) -> dict[str, Any]:
    headers = {name.lower(): value for name, value in turn.exchange.request.headers}
    version = _VERSION.search(headers.get("user-agent", ""))
    return {
        "name": turn.caller.harness or _UNKNOWN,
        "version": version[1] if version else _UNKNOWN,
        "model_name": turn.model,
    }
