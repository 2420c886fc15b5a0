"""Calls as lines of a table."""

from typing import Any

from rich.table import Table
from rich.text import Text

from daemon.traces.plain import moment, visible
from daemon.traces.turns import Turn


def row(turn: Turn) -> dict[str, Any]:
    """Return a call in a few values; counts are None where nothing tells them."""
    exchange = turn.exchange
    calls = [entry.call for entry in turn.entries() if entry.call]
    usage = turn.said.usage if turn.said else None
    prompt = usage.prompt_tokens if usage else None
    completion = usage.completion_tokens if usage else None
    if calls:
        prompt = sum(len(call.prompt_ids) for call in calls if call.output_index == 0)
        completion = sum(len(call.output_ids) for call in calls)
    return {
        "id": exchange.id,
        "started": exchange.started,
        "seconds": round(exchange.ended - exchange.started, 3),
        "run": turn.run,
        "harness": turn.caller.harness,
        "agent": turn.caller.agent,
        "route": exchange.route,
        "stream": bool(turn.said and turn.said.request.stream),
        "model": turn.model,
        "status": exchange.response.status if exchange.response else None,
        "outcome": exchange.outcome,
        "token_source": calls[0].token_source if calls else "none",
        "prompt_tokens": prompt,
        "completion_tokens": completion,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the rows as a table."""
    found = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("call", "started", "run", "agent", "route", "model", "result", "tokens", "s"):
        found.add_column(name, overflow="fold", no_wrap=name in ("call", "started"))
    for one in rows:
        source, started = one["token_source"], moment(one["started"])
        cells = (
            one["id"],
            started.strftime("%m-%d %H:%M:%S") if started else "?",
            one["run"],
            one["agent"] or one["harness"],
            one["route"] + (" sse" if one["stream"] else ""),
            one["model"],
            _result(one),
            f"{_count(one['prompt_tokens'])}+{_count(one['completion_tokens'])} {source}",
            f"{one['seconds']:.1f}",
        )
        # As text: brackets in a plain string would be taken for styles.
        found.add_row(*(Text(visible(cell or "")) for cell in cells))
    return found


def _result(one: dict[str, Any]) -> str:
    status = "-" if one["status"] is None else str(one["status"])
    return status if one["outcome"] == "complete" else f"{status} {one['outcome']}"


def _count(number: int | None) -> str:
    return "?" if number is None else str(number)
