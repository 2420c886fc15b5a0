"""Runs every case directly and through three sidecars, one for each token source."""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.conformance import compare, records
from tests.conformance.bodies import PROTOCOLS
from tests.conformance.cases import all_cases
from tests.conformance.client import Received, execute
from tests.conformance.script import Case
from tests.conformance.upstream import Run, Upstream
from tests.sidecar.running import RunningSidecar

THROUGH = ("tap", "api", "none")
"""The ways through a sidecar, by its ``token_source``."""
WAYS = ("direct", *THROUGH)
_AT_ONCE = 12
_HEAVY_AT_ONCE = 2
_NOTICE_SECONDS = 5.0


@dataclass
class Result:
    """What came of one case."""

    case: Case
    differences: dict[str, list[str]] = field(default_factory=dict)
    """By way through: what differs and should not."""
    known: bool = False
    """It differs in the way that ``compare.KNOWN`` says."""
    notice: dict[str, float] = field(default_factory=dict)
    """By way: seconds until the upstream saw that the client had left."""
    expected: dict[str, list[records.Expected]] = field(default_factory=dict)


@dataclass(repr=False)
class Report:
    """All results of a run of the suite."""

    results: dict[str, Result]
    seconds: float
    sidecar_errors: dict[str, str]
    """By way: what the sidecar logged as warning or error."""

    @property
    def differing(self) -> list[Result]:
        return [result for result in self.results.values() if any(result.differences.values())]

    def summary(self) -> str:
        """One line."""
        known = sum(result.known for result in self.results.values())
        compared = sum(len(result.differences) for result in self.results.values())
        differences = sum(len(d) for r in self.results.values() for d in r.differences.values())
        return (
            f"{len(self.results)} cases ({compared} comparisons, by token source "
            f"{', '.join(THROUGH)}), {differences} differences, {known} cases with a known one; "
            f"{self.seconds:.0f} s"
        )

    def notices(self) -> str:
        """One line on how long the upstream takes to see that a client has left."""
        parts = []
        for way in WAYS:
            times = [r.notice[way] for r in self.results.values() if way in r.notice]
            if times:
                middle, most = statistics.median(times) * 1000, max(times) * 1000
                parts.append(f"{way}: median {middle:.1f} ms, most {most:.1f} ms of {len(times)}")
        return "until the upstream sees that the client has left: " + "; ".join(parts)

    def table(self) -> str:
        """Kinds by protocol: number of cases, ``+k``: of those known to differ, ``!d`` wrong."""
        columns: list[tuple[str, str]] = [
            (p, form) for p in PROTOCOLS for form in ("streamed", "whole")
        ]
        columns.append(("other", "whole"))
        cells: dict[tuple[str, str, str], Counter[str]] = {}
        for result in self.results.values():
            case = result.case
            key = (case.kind, case.protocol, "streamed" if case.stream else "whole")
            cell = cells.setdefault(key, Counter())
            wrong = any(result.differences.values())
            cell["DIFF" if wrong else "known" if result.known else "same"] += 1
        kinds = list(dict.fromkeys(kind for kind, _, _ in cells))
        width = max(len(kind) for kind in kinds)
        lines = [f"{'':{width}}  " + " ".join(f"{p[:9]:>9}" for p, _ in columns)]
        lines.append(f"{'':{width}}  " + " ".join(f"{form:>9}" for _, form in columns))
        for kind in kinds:
            row = [" ".join(cells.get((kind, *column), {})) or "-" for column in columns]
            lines.append(f"{kind:{width}}  " + " ".join(f"{text:>9}" for text in row))
        return "\n".join(lines)


def run(directory: Path, cases: Iterable[Case] | None = None) -> Report:
    """Run cases (default: all); ``directory`` is for the sidecars' traces."""
    return asyncio.run(_Suite(directory, all_cases() if cases is None else cases).run())


class _Suite:
    def __init__(self, directory: Path, cases: Iterable[Case]) -> None:
        self._directory = directory
        self._results = {case.id: Result(case) for case in cases}
        self._upstream = Upstream()
        self._ports: dict[str, int] = {}

    async def run(self) -> Report:
        began = time.monotonic()
        await self._upstream.start(list(WAYS))
        self._ports["direct"] = self._upstream.ports["direct"]
        sidecars: dict[str, RunningSidecar] = {}
        errors: dict[str, str] = {}
        try:
            starts = [asyncio.to_thread(self._start, way) for way in THROUGH]
            started = await asyncio.gather(*starts, return_exceptions=True)
            for way, sidecar in zip(THROUGH, started, strict=True):
                if isinstance(sidecar, RunningSidecar):
                    sidecars[way] = sidecar
            for failure in started:
                if isinstance(failure, BaseException):
                    raise failure
            self._ports |= {way: sidecar.port for way, sidecar in sidecars.items()}
            cases = [result.case for result in self._results.values()]
            ordinary = [c for c in cases if not (c.refused or c.heavy or c.leaves)]
            # Apart from the others, so that what is measured of them is not the others' load.
            await self._all([c for c in cases if c.leaves and not c.refused], 2)
            await self._all(ordinary, _AT_ONCE)
            await self._all([c for c in cases if c.heavy], _HEAVY_AT_ONCE)
            self._upstream.stop()
            await self._all([c for c in cases if c.refused], _AT_ONCE)
        finally:
            for way, sidecar in sidecars.items():
                errors[way] = (await asyncio.to_thread(sidecar.stop, timeout=60))[1]
        for way in THROUGH:
            recorded = await asyncio.to_thread(records.read, self._directory / way)
            for result in self._results.values():
                if way not in result.differences:
                    continue
                result.differences[way] += records.differences(
                    result.case, result.expected[way], recorded.get(result.case.id, [])
                )
        return Report(self._results, time.monotonic() - began, errors)

    def _start(self, way: str) -> RunningSidecar:
        upstream = f"http://127.0.0.1:{self._upstream.ports[way]}"
        return RunningSidecar(upstream, self._directory / way, token_source=way)

    async def _all(self, cases: list[Case], at_once: int) -> None:
        limit = asyncio.Semaphore(at_once)

        async def one(case: Case) -> None:
            async with limit:
                await self._case(self._results[case.id])

        await asyncio.gather(*(one(case) for case in cases))

    async def _case(self, result: Result) -> None:
        direct = await self._execute(result, "direct")
        for way in _ways(result.case):
            seen = await self._execute(result, way)
            known = compare.known(result.case, way)
            wanted = known.through(direct) if known is not None else direct
            found = compare.differences(wanted, seen)
            if known is not None and wanted == direct:
                found.append("is listed as a known difference, but could not differ")
            if direct.end == "timeout":
                found.append("the direct run itself timed out: the case is wrong")
            result.known = result.known or known is not None
            result.differences[way] = found

    async def _execute(self, result: Result, way: str) -> compare.Seen:
        case = result.case
        run = Run(case, way)
        self._upstream.runs[way, case.id] = run
        received = await execute(run, self._ports[way], way != "direct")
        if case.leaves:
            await self._notice(result, run, received)
        if way != "direct":
            result.expected[way] = records.expected(run, received, self._ports[way])
        del self._upstream.runs[way, case.id]
        return compare.seen(run, received, self._upstream.ports[way])

    async def _notice(self, result: Result, run: Run, received: Received) -> None:
        deadline = time.monotonic() + (_NOTICE_SECONDS if run.arrivals else 0)
        while time.monotonic() < deadline:
            for arrival in run.arrivals:
                if arrival.left_at is not None and received.left_at is not None:
                    result.notice[run.way] = arrival.left_at - received.left_at
                    return
                if arrival.finished:
                    return
            await asyncio.sleep(0.005)


def _ways(case: Case) -> list[str]:
    """Return the ways that make a difference for a case.

    ``api`` is ``none`` for other protocols. Without tokens nothing is held back or cut, whatever
    the protocol; what is large goes without ``none`` for the time it takes.
    """
    ways = ["tap"]
    if case.protocol in ("chat", "completions"):
        ways.append("api")
    if case.protocol in ("chat", "other") and not case.heavy:
        ways.append("none")
    return ways
