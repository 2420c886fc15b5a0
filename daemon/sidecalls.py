"""Which calls a harness makes beside its agent's work: titles, summaries, probes. Pure.

A side call is a sound model call, and its tokens are the model's, but what it says is not what the
run's reward is about. What tells it is looked at in this order: the path, what the harness's own
headers say, the shape of the request, and only last the words of known harnesses, which change with
their versions (see docs/harnesses.md for the versions they were seen in).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from daemon.config import SideCall as Kind
from daemon.protocols.conversation import Request

_TURN_METADATA = "x-codex-turn-metadata"
_CODEX_SUBAGENTS: dict[str, Kind] = {"compact": "compaction", "memory_consolidation": "memory"}
_CODEX_KINDS: dict[str, Kind] = {"compaction": "compaction", "memory": "memory"}

_SYSTEM = ("system", "developer")
# Of system prompts. The tools say nothing here: Claude Code keeps them for its summaries, and
# qwen-code's memory extraction is an agent with tools of its own.
_IN_SYSTEM: tuple[tuple[str, Kind], ...] = (
    ("memory extraction subagent", "memory"),
    ("context summarization assistant", "compaction"),
    ("context summarization agent", "compaction"),
    ("You are the component that summarizes", "compaction"),
    ("You are a title generator", "title"),
    ("one-line Git commit message", "commit_message"),
)
# Of what the user said last.
_IN_LAST: tuple[tuple[str, Kind], ...] = (
    ("CRITICAL: Respond with TEXT ONLY", "compaction"),
    ("The messages above are a conversation to summarize", "compaction"),
    ("produce the <state_snapshot>", "compaction"),
    ("You are performing a CONTEXT CHECKPOINT COMPACTION", "compaction"),
)


class _TurnMetadata(msgspec.Struct):
    request_kind: str | None = None


_read_metadata = msgspec.json.Decoder(_TurnMetadata).decode


def kind(
    path: str, headers: Iterable[tuple[str, str]], request: Request | None = None
) -> Kind | None:
    """Return which side call a request is, None for a turn of an agent.

    ``path`` may have a query; ``request`` is None where the body is not known.
    """
    if path.partition("?")[0].endswith("/count_tokens"):
        return "count_tokens"
    if told := _told({name.lower(): value for name, value in headers}):
        return told
    if request is None:
        return None
    return _by_shape(request) or _by_words(request)


@dataclass(frozen=True)
class Turn:
    """A call of a run, as ``without_tools`` sees it. ``chain``: digests of its history after each
    item (``daemon.retries.chain``); empty where the history is not known."""

    call: str
    tools: int
    chain: Sequence[str]


def without_tools(turns: Sequence[Turn]) -> frozenset[str]:
    """Return the calls of a run that were offered no tools while its agent has some.

    One that goes on from another call, or that another goes on from, belongs to the agent: many
    give their last answer without tools.
    """
    if not any(turn.tools for turn in turns):
        return frozenset()
    ends = {turn.chain[-1] for turn in turns if turn.chain}
    passed = {digest for turn in turns for digest in turn.chain[:-1]}
    return frozenset(
        turn.call
        for turn in turns
        if not turn.tools
        and turn.chain
        and turn.chain[-1] not in passed
        and ends.isdisjoint(turn.chain[:-1])
    )


def _told(headers: dict[str, str]) -> Kind | None:
    if known := _CODEX_SUBAGENTS.get(headers.get("x-openai-subagent", "")):
        return known
    if metadata := headers.get(_TURN_METADATA):
        try:
            return _CODEX_KINDS.get(_read_metadata(metadata).request_kind or "")
        except (msgspec.DecodeError, RecursionError):
            return None
    return None


def _by_shape(request: Request) -> Kind | None:
    if request.tools:
        return None
    if request.response_format is not None and _asks_for_title(request.response_format):
        return "title"
    turns = [message for message in request.messages if message.role not in _SYSTEM]
    if request.max_tokens == 1 and len(turns) == 1 and turns[0].text.strip() == "quota":
        return "quota_probe"
    return None


def _by_words(request: Request) -> Kind | None:
    system = "\n".join(message.text for message in request.messages if message.role in _SYSTEM)
    if found := _find(system, _IN_SYSTEM):
        return found
    asked = [message for message in request.messages if message.role == "user"]
    return _find(asked[-1].text, _IN_LAST) if asked else None


def _find(text: str, marks: Iterable[tuple[str, Kind]]) -> Kind | None:
    return next((found for mark, found in marks if mark in text), None)


def _asks_for_title(form: object) -> bool:
    """Whether a structured-output field holds a JSON schema with ``title`` as its one property."""
    if not isinstance(form, dict):
        return False
    properties = form.get("properties")
    if isinstance(properties, dict):
        return list(properties) == ["title"]
    return any(_asks_for_title(form.get(name)) for name in ("json_schema", "schema", "format"))
