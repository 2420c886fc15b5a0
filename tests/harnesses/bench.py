"""Runs a harness in a scenario through a real sidecar and says what everybody saw of it."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemon.ingest import Ingester
from daemon.state import State
from sidecar.traces.record import Exchange
from tests.harnesses.clients import Client, Place
from tests.harnesses.model_server import Ask, Fault, ModelServer, Script
from tests.harnesses.relay import Relay
from tests.sidecar.running import records

PROMPT = "Please run one command and tell me what it says."
LIMIT_S = 120.0
_READY = re.compile(r"http://127\.0\.0\.1:(\d+) -> ")


@dataclass(frozen=True)
class Ran:
    """What became of one run of a harness.

    ``asks`` is what reached the model server, ``exchanges`` what the sidecar recorded of it in
    order of start, ``others`` its auxiliary exchanges, ``calls`` the daemon's rows.
    """

    run: str
    status: int
    output: str
    asks: list[Ask]
    exchanges: list[Exchange]
    others: list[Exchange]
    calls: list[dict[str, Any]]


@dataclass(frozen=True)
class Interrupted:
    """A run that was ended by SIGINT; seconds from the signal, and from the harness's hanging up,
    to the upstream seeing it."""

    ran: Ran
    after_signal: float
    in_sidecar: float


class Bench:
    """A model server, a sidecar in front of it, and a daemon's state behind its shards."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._traces = folder / "traces"
        self.server = ModelServer()
        self._sidecar, port = _start_sidecar(self.server.url, folder)
        self._relay = Relay(port)
        self._root = f"http://127.0.0.1:{port}"
        self._state = State(folder / "daemon.db")
        self._ingester = Ingester(self._traces, self._state)
        self._runs = 0

    def close(self) -> None:
        self._sidecar.send_signal(signal.SIGTERM)
        self._sidecar.wait(30)
        self._relay.close()
        self.server.close()
        self._state.close()

    def run(
        self,
        client: Client,
        *,
        script: Script | None = None,
        faults: Sequence[Fault | None] = (),
        prompt: str = PROMPT,
        limit: float = LIMIT_S,
    ) -> Ran:
        """Run a harness until it ends; one that takes longer than ``limit`` seconds is ended."""
        self.server.play(script or client.script, faults)
        with self._started(client, prompt, self._root) as (run, process, output):
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = -1
        return self._look(run, status, output.read_text(errors="replace"))

    def interrupt(self, client: Client, script: Script) -> Interrupted:
        """Run a harness, send it SIGINT while the first reply goes on, as Ctrl-C does."""
        self.server.play(script)
        root = f"http://127.0.0.1:{self._relay.port}"
        with self._started(client, PROMPT, root) as (run, process, output):
            asks = self.server.asks
            until(lambda: bool(asks) and asks[0].said is not None, "a call")
            if asks[0].stream:
                until(lambda: asks[0].begun is not None, "the begin of a reply")
            time.sleep(0.7)
            assert asks[0].gone is None and process.poll() is None, "it ended by itself"
            before = len(self._relay.hung_up)
            sent = time.monotonic()
            os.killpg(process.pid, signal.SIGINT)
            until(lambda: asks[0].gone is not None, "the upstream's end", 20)
            process.wait(30)
        gone, hung_up = asks[0].gone, self._relay.hung_up[before]
        assert gone is not None
        ran = self._look(run, process.returncode, output.read_text(errors="replace"))
        return Interrupted(ran, gone - sent, gone - hung_up)

    def finish(self, run: str) -> Ran:
        """Look at a run that was started with ``place`` and has ended."""
        return self._look(run, 0, "")

    @contextmanager
    def place(
        self, client: Client, root: str | None = None, prompt: str = PROMPT
    ) -> Iterator[tuple[str, Place]]:
        """A new run with a home and a working folder of its own; gives its id."""
        self._runs += 1
        run = f"{re.sub('[^a-z0-9]+', '-', client.name.lower())}-{self._runs}"
        with tempfile.TemporaryDirectory(prefix="harness-", ignore_cleanup_errors=True) as home:
            (Path(home) / "work").mkdir()
            yield run, Place(f"{root or self._root}/r/{run}", Path(home), prompt)

    @contextmanager
    def _started(
        self, client: Client, prompt: str, root: str
    ) -> Iterator[tuple[str, "subprocess.Popen[bytes]", Path]]:
        with self.place(client, root, prompt) as (run, place):
            output = self._folder / f"{run}.log"
            with output.open("wb") as file:
                process = subprocess.Popen(
                    # A shell in the background hands SIGINT down as ignored, and Python keeps it.
                    ["env", "--default-signal=INT", *client.argv(place)],
                    env=client.env(place),
                    cwd=place.home / "work",
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            try:
                yield run, process, output
            finally:
                end_group(process)

    def _look(self, run: str, status: int, output: str) -> Ran:
        asks = list(self.server.asks)

        def recorded() -> list[Exchange]:
            found = [r for r in records(self._traces) if isinstance(r, Exchange)]
            return sorted((e for e in found if e.session.run == run), key=lambda e: e.started)

        until(
            lambda: sum(e.route != "other" for e in recorded()) >= len(asks),
            f"the records of {len(asks)} calls",
            15,
        )
        asyncio.run(self._ingester.catch_up())
        mine = recorded()
        return Ran(
            run=run,
            status=status,
            output=output,
            asks=asks,
            exchanges=[e for e in mine if e.route != "other"],
            others=[e for e in mine if e.route == "other"],
            calls=self._state.rows("SELECT * FROM calls WHERE run = ? ORDER BY started", run),
        )


def end_group(process: "subprocess.Popen[Any]") -> None:
    """End a process started in a session of its own, and what it left behind."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _start_sidecar(upstream: str, folder: Path) -> tuple["subprocess.Popen[str]", int]:
    command = [sys.executable, "-m", "deploy", "sidecar", "--upstream", upstream]
    command += ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    command += ["--traces", str(folder / "traces")]
    log = (folder / "sidecar.log").open("w")
    with closing(log):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    if (match := _READY.search(line)) is None:
        process.kill()
        raise RuntimeError(f"the sidecar did not start: {(folder / 'sidecar.log').read_text()}")
    return process, int(match[1])


def until(happened: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait; fails the test when it takes too long."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s"
        time.sleep(0.01)
