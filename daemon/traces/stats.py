"""What a folder of shards holds, in numbers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from daemon.traces import find
from daemon.traces.turns import read_turn
from sidecar.traces.record import Exchange, RecordsLost, SidecarStarted
from sidecar.traces.shards import read_tail


@dataclass
class Stats:
    """Counts over shards; ``raw_bytes`` are the bodies' and the token tap's."""

    shards: int = 0
    stored_bytes: int = 0
    raw_bytes: int = 0
    runs: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    """``<route> <outcome>`` → exchanges."""
    token_sources: Counter[str] = field(default_factory=Counter)
    """Model calls by where their tokens came from."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    checks_failed: Counter[str] = field(default_factory=Counter)
    records_lost: Counter[str] = field(default_factory=Counter)
    torn: list[str] = field(default_factory=list)
    """Shards that end in an incomplete frame: being written, or cut off by a crash."""
    damaged: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return all counts as JSON values."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {
            name: dict(value) if isinstance(value, Counter) else value
            for name, value in values.items()
        }


def collect(paths: Sequence[Path]) -> Stats:
    """Count what shards hold.

    Raises:
        UserError: a path is missing or can't be read.
    """
    stats = Stats()
    for shard in find.shards(paths):
        stats.shards += 1
        stats.stored_bytes += shard.stat().st_size
        if read_tail(shard).torn:
            stats.torn.append(shard.name)
    runs: set[str] = set()
    for shard, located in find.records(paths):
        match located.record:
            case Exchange() as exchange:
                stats.calls[f"{exchange.route} {exchange.outcome}"] += 1
                stats.raw_bytes += _size(exchange)
                if exchange.route != "other":
                    runs.add(_count_tokens(stats, exchange))
            case RecordsLost() as lost:
                stats.records_lost[lost.reason] += lost.count
            case SidecarStarted():
                pass
            case None:
                stats.damaged.append(find.damage(shard, located))
    stats.runs = len(runs)
    return stats


def _count_tokens(stats: Stats, exchange: Exchange) -> str:
    turn = read_turn(exchange)
    entries = turn.entries()
    calls = [entry.call for entry in entries if entry.call]
    stats.token_sources[calls[0].token_source if calls else "none"] += 1
    stats.prompt_tokens += sum(len(call.prompt_ids) for call in calls if call.output_index == 0)
    stats.completion_tokens += sum(len(call.output_ids) for call in calls)
    stats.checks_failed.update(f.name for e in entries if e.check == "failed" for f in e.failures)
    return turn.run


def _size(exchange: Exchange) -> int:
    bodies = [exchange.request.body, exchange.response.body if exchange.response else None]
    return sum(len(body.raw()) for body in bodies if body) + sum(map(len, exchange.tap))


def lines(stats: Stats) -> list[str]:
    """Return the counts as text."""
    ratio = f", {stats.raw_bytes / stats.stored_bytes:.1f} times" if stats.stored_bytes else ""
    found = [
        f"{stats.shards} shards, {_mib(stats.stored_bytes)} for {_mib(stats.raw_bytes)} raw{ratio}",
        f"{stats.calls.total()} exchanges of {stats.runs} runs; "
        f"{stats.prompt_tokens} prompt and {stats.completion_tokens} sampled tokens recorded",
    ]
    for title, counts in (
        ("exchanges", stats.calls),
        ("tokens of model calls", stats.token_sources),
        ("failed checks", stats.checks_failed),
        ("records lost", stats.records_lost),
    ):
        if counts:
            found.append(f"{title}:")
            found += [f"  {count:8d}  {name}" for name, count in counts.most_common()]
    found += [f"incomplete at its end: {name}" for name in stats.torn]
    found += [f"damaged: {what}" for what in stats.damaged]
    return found


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.2f} MiB"
