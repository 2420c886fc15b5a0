"""One recorded exchange → its calls, checked, or the reason why it has none."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from daemon import runs
from daemon.protocols import chat
from sidecar.record import Exchange
from tokenization import calls
from tokenization.calls import Call, Dialogue, Reply, Usage
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


def read(exchange: Exchange) -> list[Entry]:
    """Read an exchange; always gives at least one entry, so that none is lost from the counts."""
    if reason := _unusable(exchange):
        errors = (Failure("upstream", exchange.error),) if exchange.error else ()
        return [Entry(exchange.id, None, "unchecked", reason, errors)]
    usage: Usage | None = None
    dialogue: Dialogue | None = None
    replies: Mapping[int, Reply] = {}
    try:
        said = _parse(exchange)
        usage, dialogue, replies = said.usage, said.dialogue, said.replies
    except chat.ProtocolError as error:
        # A body that was cut short tells nothing, and the tap's own counts remain as the check.
        if exchange.outcome == "complete":
            return [_failed(exchange, (Failure("protocol", str(error)),))]
    reading = calls.read(
        exchange, agent=runs.agent_id(exchange), usage=usage, dialogue=dialogue, replies=replies
    )
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
    if exchange.route != "chat":
        return f"the {exchange.route} protocol is not read"
    if exchange.response is None:
        return exchange.outcome if exchange.outcome != "complete" else "no response"
    if exchange.response.status != 200:
        return f"HTTP {exchange.response.status}"
    return None


def _parse(exchange: Exchange) -> chat.ChatExchange:
    response = exchange.response
    headers = {name.lower(): value for name, value in response.headers} if response else {}
    return chat.parse(
        exchange.request.body.raw() if exchange.request.body else b"",
        response.body.raw() if response and response.body else None,
        event_stream=headers.get("content-type", "").startswith("text/event-stream"),
    )
