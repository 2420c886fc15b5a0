"""One recorded exchange → its calls, checked, or the reason why it has none."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from daemon import runs
from daemon.protocols import conversation
from daemon.protocols import read as protocols
from daemon.protocols.conversation import Said, ServerError
from daemon.protocols.shape import ProtocolError
from sidecar.traces.record import Exchange
from tokenization import calls
from tokenization.calls import Call, Dialogue, Reading, Reply, Usage
from tokenization.checks import Failure

Check = Literal["passed", "failed", "unchecked"]


@dataclass(frozen=True)
class Entry:
    """One line of the daemon's call table.

    ``call`` is None when no tokens were captured. ``left_out`` says in a few words why the call
    can't be trained, None when it can; ``failures`` has the figures.
    """

    id: str
    call: Call | None
    check: Check
    left_out: str | None
    failures: tuple[Failure, ...] = ()


def read(exchange: Exchange, said: Said | None = None) -> list[Entry]:
    """Read an exchange; always gives at least one entry, so that none is lost from the counts.

    ``said`` saves reading again what it said.
    """
    if reason := _unusable(exchange):
        errors = (Failure("upstream", exchange.error),) if exchange.error else ()
        return [Entry(exchange.id, None, "unchecked", reason, errors)]
    usage: Usage | None = None
    dialogue: Dialogue | None = None
    replies: Mapping[int, Reply] = {}
    error: ServerError | None = None
    try:
        said = said or protocols.read(exchange)
        usage, error = _usage(said), said.error
        dialogue, replies = conversation.dialogue(said.request), _replies(said)
    except ProtocolError as problem:
        # A body that was cut short tells nothing, and the tap's own counts remain as the check.
        if exchange.outcome == "complete":
            return [_failed(exchange, (Failure("protocol", str(problem)),))]
    reading = calls.read(
        exchange, agent=runs.agent_id(exchange), usage=usage, dialogue=dialogue, replies=replies
    )
    if error is not None:
        reading = _broken(reading, error)
    if reading.calls:
        return [
            Entry(
                id=call.id,
                call=call,
                check="failed" if call.failures else "passed",
                left_out=call.left_out,
                failures=call.failures,
            )
            for call in reading.calls
        ]
    readable = all(failure.name != calls.UNREADABLE for failure in reading.failures)
    if exchange.outcome != "complete" and readable:
        return [Entry(exchange.id, None, "unchecked", exchange.outcome)]
    return [_failed(exchange, reading.failures)]


def unreadable(exchange: Exchange, error: Exception) -> Entry:
    """The entry of an exchange that ``read`` failed on in an unforeseen way."""
    return _failed(exchange, (Failure("unreadable exchange", repr(error)),))


def _failed(exchange: Exchange, failures: tuple[Failure, ...]) -> Entry:
    return Entry(exchange.id, None, "failed", f"check failed: {failures[0].name}", failures)


def _unusable(exchange: Exchange) -> str | None:
    if exchange.route == "other":
        return "not a model call"
    if exchange.response is None:
        return exchange.outcome if exchange.outcome != "complete" else "no response"
    if exchange.response.status != 200:
        return f"HTTP {exchange.response.status}"
    return None


def _usage(said: Said) -> Usage | None:
    """The counts to check against; a stream that broke off had not counted all of its output."""
    if said.usage is None:
        return None
    return Usage(said.usage.prompt_tokens, said.usage.completion_tokens if said.complete else None)


def _replies(said: Said) -> Mapping[int, Reply]:
    """The replies by the engine's output index, which begins anew with each of several prompts."""
    several = said.request.prompts is not None and len(said.request.prompts) > 1
    return {} if several else conversation.replies(said)


def _broken(reading: Reading, error: ServerError) -> Reading:
    """Mark the calls of a reply in which the server reported an error."""
    failure = Failure("server error", error.message)
    marked = (replace(call, failures=(*call.failures, failure)) for call in reading.calls)
    return Reading(tuple(marked), (failure, *reading.failures))
