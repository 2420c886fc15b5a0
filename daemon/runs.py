"""Whose call an exchange is: the run it belongs to, and harness, session and agent inside the run.

Precedence of the run: the run's own URL prefix, the ``x-ridealong-session`` header, the session id
that the harness itself sends, the peer's host. Only the first two are told to Ridealong; the
others are what unmodified harnesses happen to send, so they are prefixed with their origin.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from sidecar.traces.record import Exchange

SESSION_HEADERS = (
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-parent-session-id",
    "x-session-id",
    "x-session-affinity",
    "x-affinity",
    "x-litellm-session-id",
)
"""Session ids of Claude Code, Codex, pi, opencode (children first: they belong to the parent's
run), Mistral Vibe and OpenHands, in order of precedence."""

AGENT_HEADERS = ("x-claude-code-agent-id", "thread-id", "x-session-id")
"""Ids of an agent or thread inside a session: Claude Code's subagents, Codex, opencode."""

PARENT_HEADERS = (
    "x-claude-code-parent-agent-id",
    "x-codex-parent-thread-id",
    "x-parent-session-id",
)
"""Ids of the agent that a subagent works for: Claude Code (subagents of subagents), Codex,
opencode."""

WINDOW_HEADER = "x-codex-window-id"
"""Codex's thread id with a number that each compaction of the history raises."""

_SESSION = "session:"
_PEER = "peer:"

_HARNESSES = (
    ("claude-cli/", "claude-code"),
    ("codex", "codex"),
    ("qwencode/", "qwen-code"),
    ("agents/python", "openai-agents"),
    ("openai/python", "openai-python"),
    ("asyncopenai/python", "openai-python"),
    ("openai/js", "openai-node"),
    ("anthropic/python", "anthropic-python"),
    ("asyncanthropic/python", "anthropic-python"),
    ("anthropic/js", "anthropic-node"),
)
"""How a ``User-Agent`` begins, lower case, and whose it is. Harnesses built on an SDK without a
name of their own go by the SDK."""

_OLD_USER_ID = re.compile(r"_session_([0-9a-fA-F-]{36})$")


@dataclass(frozen=True)
class RunKey:
    """``told``: Ridealong was given this name, so it names one run for ever. Otherwise a key that
    comes back after its run has ended names a new run."""

    name: str
    told: bool


@dataclass(frozen=True)
class Caller:
    """Who called, as far as the harness says so itself; empty where it does not.

    ``agent`` is its agent or thread id. ``parent`` is not empty for a subagent alone: the agent it
    works for, or the session where the parent has no id. ``window`` changes when the agent's
    history was compacted.
    """

    harness: str
    session: str
    agent: str
    parent: str
    window: str


def run_key(exchange: Exchange, caller: Caller | None = None) -> RunKey:
    """Return the key of the run an exchange belongs to; ``caller`` saves finding it again."""
    session = exchange.session
    if named := session.run or session.session:
        return RunKey(named, told=True)
    if named := (caller or read_caller(exchange)).session:
        return RunKey(f"{_SESSION}{named}", told=False)
    return RunKey(f"{_PEER}{session.peer.rpartition(':')[0] or 'unknown'}", told=False)


def is_given(run: str) -> bool:
    """Say whether a run's name is one that somebody gave, not one made of what was seen."""
    return not run.startswith((_SESSION, _PEER))


def agent_id(exchange: Exchange) -> str:
    """Return the harness's agent or thread id, empty when it sends none."""
    return _first(_by_name(exchange.request.headers), AGENT_HEADERS)


def read_caller(exchange: Exchange, body: bytes | None = None) -> Caller:
    """Return what the harness says of itself.

    ``body`` is the request's body without content codings, by default what the record holds. It is
    looked into only when no header names a session: a cache key may be shared by several sessions.
    """
    headers = _by_name(exchange.request.headers)
    session = _first(headers, SESSION_HEADERS)
    if not session:
        session = _session_in(_body(exchange) if body is None else body)
    agent, parent = _first(headers, AGENT_HEADERS), _first(headers, PARENT_HEADERS)
    if not parent and headers.get("x-claude-code-agent-id"):
        # The agent that the user talks to has no id here.
        parent = session
    return Caller(
        harness=_harness(headers),
        session=session,
        agent=agent,
        parent=parent,
        window=headers.get(WINDOW_HEADER, ""),
    )


def _harness(headers: Mapping[str, str]) -> str:
    user_agent = headers.get("user-agent", "").lower()
    return next((name for start, name in _HARNESSES if user_agent.startswith(start)), "")


def _body(exchange: Exchange) -> bytes:
    try:
        return exchange.request.body.raw() if exchange.request.body else b""
    except ValueError:
        return b""


class _Metadata(msgspec.Struct):
    user_id: str | None = None


class _Ids(msgspec.Struct):
    """The fields of a request that may tell a session apart."""

    metadata: _Metadata | None = None
    prompt_cache_key: str | None = None


class _UserId(msgspec.Struct):
    session_id: str | None = None


_read_ids = msgspec.json.Decoder(_Ids).decode
_read_user_id = msgspec.json.Decoder(_UserId).decode


def _session_in(body: bytes) -> str:
    """The session id in a request's body: Claude Code's ``metadata.user_id``, else a cache key."""
    if b'"user_id"' not in body and b'"prompt_cache_key"' not in body:
        return ""
    try:
        ids = _read_ids(body)
    except (msgspec.DecodeError, RecursionError):
        return ""
    user_id = (ids.metadata.user_id if ids.metadata else None) or ""
    if older := _OLD_USER_ID.search(user_id):
        return older[1]
    try:
        told = _read_user_id(user_id).session_id if user_id.startswith("{") else None
    except (msgspec.DecodeError, RecursionError):
        told = None
    return told or ids.prompt_cache_key or ""


def _by_name(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers}


def _first(values: Mapping[str, str], names: Iterable[str]) -> str:
    return next((values[name] for name in names if values.get(name)), "")
