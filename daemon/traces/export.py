"""Writes conversations for other programs."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from daemon.traces import atif, openai
from daemon.traces.turns import Turn, conversations

Format = Literal["jsonl", "openai", "atif"]


@dataclass
class Exported:
    """``left_out``: reason → conversations that could not be written."""

    written: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


def documents(
    turns: Iterable[Turn], form: Format, redact: Callable[[str], str], report: Exported
) -> Iterator[dict[str, Any]]:
    """Yield the JSON documents of an export, and count them in ``report``.

    ``jsonl`` has one per call, ``openai`` and ``atif`` one per conversation. ``redact`` is applied
    to every text in them; what it changes loses its token ids, which would tell the text again.
    """
    if form == "jsonl":
        for turn in turns:
            if turn.said is None:
                report.left_out[f"can't be read: {turn.problem}"] += 1
                continue
            report.written += 1
            yield _redacted(_call(turn), redact)
        return
    for one in conversations(turns):
        try:
            document = openai.example(one) if form == "openai" else atif.trajectory(one)
        except openai.NotExpressible as reason:
            report.left_out[str(reason)] += 1
            continue
        report.written += 1
        yield _redacted(document, redact)


def _call(turn: Turn) -> dict[str, Any]:
    exchange = turn.exchange
    return {
        "id": exchange.id,
        "run": turn.run,
        "harness": turn.caller.harness,
        "agent": turn.caller.agent,
        "started": exchange.started,
        "ended": exchange.ended,
        "outcome": exchange.outcome,
        "status": exchange.response.status if exchange.response else None,
        **msgspec.to_builtins(turn.said),
    }


def _redacted(document: dict[str, Any], redact: Callable[[str], str]) -> dict[str, Any]:
    changed = False

    def walk(value: Any) -> Any:
        nonlocal changed
        if isinstance(value, str):
            clean = redact(value)
            changed = changed or clean != value
            return clean
        if isinstance(value, dict):
            return {key: walk(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [walk(one) for one in value]
        return value

    clean: dict[str, Any] = walk(document)
    if changed:
        for step in clean.get("steps", ()):
            for name in ("prompt_token_ids", "completion_token_ids", "logprobs"):
                step.get("metrics", {}).pop(name, None)
    return clean
