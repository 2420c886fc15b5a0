"""The tables of the proxy benchmark, and whether its targets are met. Pure."""

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.bench import contenders
from tests.bench.load import Result

MEMORY = "memory"
CHUNK_TARGET = 1.25
"""The sidecar's CPU per chunk, over bare mitmproxy's."""
CALL_TARGET = 0.5
"""The sidecar's CPU per call, over Agent Lightning's."""
FLAT_BYTES = 100.0
"""Growth per call that counts as flat: 1 MB in 10,000 calls."""
_BUSY = 0.8
_OURS = [contender.name for contender in contenders.SIDECARS]
_MEMORY_UNIT = 1e6


def calls(prompt: int) -> str:
    """Return the key of the calls with ``prompt`` tokens."""
    return f"calls {prompt}"


def streams(count: int) -> str:
    """Return the key of ``count`` streams."""
    return f"streams {count}"


@dataclass
class Figures:
    """What a run has measured."""

    results: dict[str, dict[str, list[Result]]] = field(default_factory=dict)
    """By contender, by what was measured, one for every round."""
    idle_bytes: dict[str, int] = field(default_factory=dict)
    """Memory after the start."""
    soak_calls: int = 0
    soak: dict[str, list[int]] = field(default_factory=dict)
    """Memory at the start of the soak and after every ``soak_calls`` calls."""
    left_out: list[str] = field(default_factory=list)

    def add(self, name: str, key: str, result: Result) -> None:
        """Add what one measurement gave."""
        self.results.setdefault(name, {}).setdefault(key, []).append(result)

    def get(self, name: str, key: str) -> list[Result]:
        """Return the rounds of one measurement; none if it was not made."""
        return self.results.get(name, {}).get(key, [])

    def keys(self, kind: str) -> list[str]:
        """Return what was measured of a kind (``calls``, ``streams``), in order."""
        known = dict.fromkeys(key for row in self.results.values() for key in row)
        return sorted((key for key in known if key.startswith(f"{kind} ")), key=_number)


@dataclass(frozen=True)
class Target:
    """One target: ``value`` is to be at most ``limit``."""

    what: str
    value: float | None
    """None: it was not measured."""
    limit: float

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return "met" if self.value <= self.limit else "NOT MET"


def microseconds(result: Result) -> float:
    """Return the CPU time per call or chunk."""
    return result.cpu / result.units * 1e6


def ratio(figures: Figures, name: str, base: str, key: str) -> float | None:
    """Return the median over the rounds of one contender's CPU time over another's."""
    rounds = zip(figures.get(name, key), figures.get(base, key), strict=False)
    ratios = [microseconds(a) / microseconds(b) for a, b in rounds]
    return statistics.median(ratios) if ratios else None


def slope(figures: Figures, name: str) -> float | None:
    """Return the growth of memory over the last half of the soak, in bytes per call: the median of
    the slopes between all pairs of points (Theil and Sen), which a single jump does not decide.
    """
    points = figures.soak.get(name, [])
    half = points[len(points) // 2 :]
    slopes = [
        (half[b] - half[a]) / ((b - a) * figures.soak_calls)
        for a in range(len(half))
        for b in range(a + 1, len(half))
    ]
    return statistics.median(slopes) if slopes else None


def quantile(values: Iterable[float], share: float) -> float | None:
    """Return the value that ``share`` of the values don't exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


def targets(figures: Figures) -> list[Target]:
    """Return the targets and what came of them."""
    found = []
    for name in _OURS:
        for kind, base, limit in (
            ("streams", contenders.MITMPROXY.name, CHUNK_TARGET),
            ("calls", contenders.AGENT_LIGHTNING_GATEWAY.name, CALL_TARGET),
        ):
            for key in figures.keys(kind):
                value = ratio(figures, name, base, key)
                found.append(Target(f"{name}: CPU / {base}, {key}", value, limit))
        found.append(Target(f"{name}: bytes kept per call", slope(figures, name), FLAT_BYTES))
    return found


def text(figures: Figures) -> str:
    """Return the report for people."""
    parts = [
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end. "
        "Trust the CPU times and the ratios:\neach is the median of the rounds (least to most). "
        "Times on the wall depend on what else runs here.",
        _table(
            "CPU of the proxy in microseconds per call that is not streamed, by prompt tokens",
            figures,
            figures.keys("calls"),
            _spread(microseconds),
        ),
        _table(
            "CPU of the proxy in microseconds per streamed chunk, by streams",
            figures,
            figures.keys("streams"),
            _spread(microseconds),
        ),
        _added(figures, "calls", "latencies", "Milliseconds that a call takes longer than direct"),
        _added(
            figures,
            "streams",
            "first_bytes",
            "Milliseconds that the first byte comes later, with streams beside it",
        ),
        _added(figures, "streams", "latencies", "Milliseconds that a chunk comes later"),
        _memory(figures),
        _targets(figures),
        _generator(figures),
        *figures.left_out,
    ]
    return "\n\n".join(parts)


def as_json(figures: Figures) -> str:
    """Return everything but the single latencies, for programs."""
    rows = {
        name: {key: [_summary(result) for result in rounds] for key, rounds in row.items()}
        for name, row in figures.results.items()
    }
    return json.dumps(
        {
            "machine": {
                "cores": os.cpu_count(),
                "kernel": platform.release(),
                "python": platform.python_version(),
            },
            "results": rows,
            "idle_bytes": figures.idle_bytes,
            "soak": {"calls_per_part": figures.soak_calls, "bytes": figures.soak},
            "targets": [
                asdict(target) | {"verdict": target.verdict} for target in targets(figures)
            ],
            "left_out": figures.left_out,
        },
        indent=2,
    )


def _summary(result: Result) -> dict[str, Any]:
    summary = asdict(result)
    for name in ("latencies", "first_bytes"):
        values = summary.pop(name)
        summary[name] = {
            "count": len(values),
            "p50": quantile(values, 0.5),
            "p99": quantile(values, 0.99),
        }
    return summary


Cell = Callable[[Figures, str, str], str]


def _table(title: str, figures: Figures, keys: list[str], cell: Cell) -> str:
    width = 24
    lines = [title, " " * 24 + "".join(f"{_number(key):>{width}}" for key in keys)]
    for name in figures.results:
        if any(figures.get(name, key) for key in keys) and name != contenders.DIRECT:
            cells = "".join(f"{cell(figures, name, key):>{width}}" for key in keys)
            lines.append(f"{name:24}{cells}")
    return "\n".join(lines)


def _spread(value: Callable[[Result], float]) -> Cell:
    def cell(figures: Figures, name: str, key: str) -> str:
        values = [value(result) for result in figures.get(name, key)]
        if not values:
            return "-"
        return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})"

    return cell


def _added(figures: Figures, kind: str, what: str, title: str) -> str:
    def pooled(name: str, key: str, share: float) -> float | None:
        values = [v for result in figures.get(name, key) for v in getattr(result, what)]
        return quantile(values, share)

    def cell(figures: Figures, name: str, key: str) -> str:
        cells = []
        for share in (0.5, 0.99):
            mine, direct = pooled(name, key, share), pooled(contenders.DIRECT, key, share)
            cells.append("-" if mine is None or direct is None else f"{(mine - direct) * 1e3:.2f}")
        return " / ".join(cells)

    return _table(f"{title} (p50 / p99)", figures, figures.keys(kind), cell)


def _memory(figures: Figures) -> str:
    total = figures.soak_calls * (max(map(len, figures.soak.values()), default=1) - 1)
    lines = [
        f"Memory: idle, per open stream with a prompt of 4096 tokens, and over {total} calls",
        f"{'':24}{'idle MB':>10}{'kB/stream':>12}{'soak start':>12}{'half way':>12}{'end MB':>12}"
        f"{'bytes/call':>12}",
    ]
    for name, idle in figures.idle_bytes.items():
        row = f"{name:24}{idle / _MEMORY_UNIT:>10.1f}"
        held = figures.get(name, MEMORY)
        if held:
            row += f"{(held[0].memory_during - held[0].memory_before) / held[0].open / 1e3:>12.0f}"
        else:
            row += f"{'-':>12}"
        points = figures.soak.get(name)
        if points:
            for point in (points[0], points[len(points) // 2], points[-1]):
                row += f"{point / _MEMORY_UNIT:>12.1f}"
            row += f"{slope(figures, name) or 0:>12.0f}"
        lines.append(row)
    return "\n".join(lines)


def _targets(figures: Figures) -> str:
    lines = ["Targets"]
    for target in targets(figures):
        value = "" if target.value is None else f"{target.value:.2f}"
        lines.append(f"{target.what:62}{value:>8} <= {target.limit:<6g} {target.verdict}")
    return "\n".join(lines)


def _generator(figures: Figures) -> str:
    every = [
        (f"{name}, {key}", result)
        for name, row in figures.results.items()
        for key, rounds in row.items()
        for result in rounds
    ]
    generator = max(result.generator_busy for _, result in every)
    upstream = max(result.upstream_busy for _, result in every)
    waited = statistics.median(result.generator_waited for _, result in every)
    lines = [
        f"The load generator used at most {generator:.0%} of a core, the upstream {upstream:.0%}; "
        f"the generator waited for a core {waited:.0%} of the time (median)."
    ]
    lines += [
        f"SATURATED in {where}: generator {result.generator_busy:.0%}, upstream "
        f"{result.upstream_busy:.0%} of a core"
        for where, result in every
        if max(result.generator_busy, result.upstream_busy) > _BUSY
    ]
    return "\n".join(lines)


def _number(key: str) -> int:
    return int(key.rpartition(" ")[2])
