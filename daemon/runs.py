"""Whose call an exchange is: the run it belongs to and the agent inside the run.

Precedence of the run: the run's own URL prefix, the ``x-ridealong-session`` header, the session id
that the harness itself sends, the peer's host. Only the first two are told to Ridealong; the
others are what unmodified harnesses happen to send, so they are prefixed with their origin.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from sidecar.record import Exchange

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


@dataclass(frozen=True)
class RunKey:
    """``told``: Ridealong was given this name, so it names one run for ever. Otherwise a key that
    comes back after its run has ended names a new run."""

    name: str
    told: bool


def run_key(exchange: Exchange) -> RunKey:
    """Return the key of the run an exchange belongs to."""
    session = exchange.session
    if named := session.run or session.session:
        return RunKey(named, told=True)
    if named := _first(exchange.request.headers, SESSION_HEADERS):
        return RunKey(f"session:{named}", told=False)
    return RunKey(f"peer:{session.peer.rpartition(':')[0] or 'unknown'}", told=False)


def agent_id(exchange: Exchange) -> str:
    """Return the harness's agent or thread id, empty when it sends none."""
    return _first(exchange.request.headers, AGENT_HEADERS)


def _first(headers: Iterable[tuple[str, str]], names: Iterable[str]) -> str:
    values = {name.lower(): value for name, value in headers}
    return next((values[name] for name in names if values.get(name)), "")
