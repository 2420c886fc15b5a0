"""What the sidecar costs beside other proxies, in one run on one upstream.

    python -m tests.bench.proxies [--quick] [--json FILE]

Measured are direct access, nginx, a plain aiohttp proxy, bare mitmproxy, the sidecar with each of
its sources of tokens and with none, and Agent Lightning's gateway on what it can do: calls that are
not streamed.
Every measurement is repeated, and each round goes through all of them, so that what else the
machine does falls on all alike. Takes up to 15 minutes, ``--quick`` up to 3.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from tests.bench import clocks, contenders, report
from tests.bench.contenders import Contender, Missing, Running
from tests.bench.load import Calls, Plan, Result, Streams, Target
from tests.bench.report import Figures

SIZES = ((64, 64), (4096, 256), (32768, 512))
"""Tokens of prompt and output."""
LEVELS = ((1, 20), (16, 20), (64, 20), (256, 80))
"""Streams, and milliseconds from one token to the next."""


class Scale(msgspec.Struct, frozen=True):
    """How much is measured."""

    rounds: int = 3
    calls: tuple[int, ...] = (600, 300, 100)
    """For each of ``SIZES``."""
    levels: tuple[tuple[int, int], ...] = LEVELS
    seconds: float = 1.5
    """How long streams are measured, and then first bytes beside them."""
    memory_streams: int = 256
    soak_calls: int = 1000
    """In each of ``soak_parts``."""
    soak_parts: int = 20


QUICK = Scale(
    rounds=1,
    calls=(200, 100, 40),
    levels=LEVELS[:3],
    seconds=1.0,
    memory_streams=64,
    soak_calls=200,
    soak_parts=6,
)


def run(scale: Scale, figures: Figures) -> None:
    """Measure everything.

    Raises:
        RuntimeError: a program did not start, or a load generator failed.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        upstream = stack.enter_context(_stub(folder / "stub"))
        with _started(contenders.ALL, upstream, folder / "a", figures.left_out) as running:
            _measure_memory(running, scale, figures)
            direct = Running(contenders.DIRECT, Target(upstream.port, upstream_pids=upstream.pids))
            for number in range(scale.rounds):
                _say(f"round {number + 1} of {scale.rounds}")
                turn = number % (len(running) + 1)
                everyone = [direct, *running]
                _measure_round(everyone[turn:] + everyone[:turn], scale, figures)
        # In new processes: memory that earlier peaks have left free would hide a leak.
        again = [one for one in contenders.ALL if one.name in figures.idle_bytes]
        with _started(again, upstream, folder / "b", figures.left_out) as running:
            _soak(running, scale, figures)


def measure(one: Running, plan: Plan) -> Result:
    """Carry out a plan in a load generator of its own.

    Raises:
        RuntimeError: the load generator failed; it has said why.
    """
    one.fresh(one)
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.load"],
        input=msgspec.json.encode(plan),
        stdout=subprocess.PIPE,
        cwd=contenders.ROOT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the load generator failed on {one.name}: {plan}")
    return msgspec.json.decode(done.stdout, type=Result)


def _measure_memory(running: list[Running], scale: Scale, figures: Figures) -> None:
    _say("memory of streams")
    for one in running:
        figures.idle_bytes[one.name] = clocks.resident_bytes(one.target.pids)
        if one.streams:
            plan = Streams(one.target, 4096, scale.memory_streams, step_ms=200, seconds=1.0)
            figures.add(one.name, report.MEMORY, measure(one, plan))


def _measure_round(running: list[Running], scale: Scale, figures: Figures) -> None:
    for (prompt, output), count in zip(SIZES, scale.calls, strict=True):
        for one in running:
            plan: Plan = Calls(one.target, prompt, output, count, warm=count // 4)
            figures.add(one.name, report.calls(prompt), measure(one, plan))
    for streams, step_ms in scale.levels:
        for one in running:
            if one.streams:
                plan = Streams(one.target, 64, streams, step_ms, scale.seconds, scale.seconds)
                figures.add(one.name, report.streams(streams), measure(one, plan))


def _soak(running: list[Running], scale: Scale, figures: Figures) -> None:
    _say(f"memory after {scale.soak_calls * scale.soak_parts} calls")
    figures.soak_calls = scale.soak_calls
    for one in running:
        measure(one, Calls(one.target, 64, 64, 100, chunks=8 * one.streams))
        figures.soak[one.name] = [clocks.resident_bytes(one.target.pids)]
    for _ in range(scale.soak_parts):
        for one in running:
            plan = Calls(one.target, 64, 64, scale.soak_calls, chunks=8 * one.streams)
            figures.soak[one.name].append(measure(one, plan).memory_during)


@contextmanager
def _stub(folder: Path) -> Iterator[Target]:
    folder.mkdir()
    port = contenders.free_port()
    command = [sys.executable, "-m", "tests.bench.stub", str(port)]
    with contenders.process(command, port, folder) as pids:
        yield Target(port, pids=pids)


@contextmanager
def _started(
    chosen: list[Contender], upstream: Target, folder: Path, left_out: list[str]
) -> Iterator[list[Running]]:
    """Run contenders until the end of the block; say which can't be run."""
    folder.mkdir()
    running = []
    with ExitStack() as stack:
        for number, contender in enumerate(chosen):
            try:
                one = contenders.started(contender, upstream, folder / str(number))
                running.append(stack.enter_context(one))
            except Missing as missing:
                left_out.append(str(missing))
                _say(str(missing))
        yield running


def _say(what: str) -> None:
    print(f"bench: {what}", file=sys.stderr, flush=True)


def main() -> int:
    """Command line. What was measured is reported even if something failed then."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="less of everything: 3 minutes")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    figures, status = Figures(), 0
    try:
        run(QUICK if arguments.quick else Scale(), figures)
    except RuntimeError as error:
        _say(f"broken off: {error}")
        status = 1
    print(report.text(figures))
    if arguments.json:
        arguments.json.write_text(report.as_json(figures) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
