"""Real programs of the loop, started as a user starts them."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.supervisor import free_port
from sidecar.traces import record
from sidecar.traces.reader import read_records

RIDEALONG = [sys.executable, "-m", "deploy"]


@dataclass
class RunningSidecar:
    """A sidecar process, where agents reach it, and what it has written."""

    url: str
    admin: str
    traces: Path
    log: Path
    process: subprocess.Popen[bytes]

    def exchanges(self) -> list[record.Exchange]:
        """Every model call in the shards, in the order written."""
        found = []
        for shard in sorted(self.traces.glob("*.jsonl.zst")):
            for located in read_records(shard):
                assert located.error is None, located.error
                if isinstance(located.record, record.Exchange):
                    found.append(located.record)
        return [exchange for exchange in found if exchange.route != "other"]

    def wait_for_exchanges(self, count: int, seconds: float = 5.0) -> list[record.Exchange]:
        deadline = time.monotonic() + seconds
        while len(found := self.exchanges()) < count and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(found) == count, f"{len(found)} exchanges in the shards, expected {count}"
        return found


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    pytest.fail(f"{url} did not answer:\n{log.read_text(errors='replace')[-3000:]}")


@contextmanager
def running_sidecar(
    upstream: str, directory: Path, traces: Path | None = None
) -> Iterator[RunningSidecar]:
    directory.mkdir(parents=True, exist_ok=True)
    port, admin_port = free_port(), free_port()
    traces = traces or directory / "traces"
    log = directory / "sidecar.log"
    argv = [*RIDEALONG, "sidecar", "--upstream", upstream, "--traces", str(traces)]
    argv += ["--listen", f"127.0.0.1:{port}", "--admin", f"127.0.0.1:{admin_port}"]
    with log.open("ab") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT)
    try:
        admin = f"http://127.0.0.1:{admin_port}"
        wait_for(f"{admin}/metrics", process, log)
        yield RunningSidecar(f"http://127.0.0.1:{port}", admin, traces, log, process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(40)


@pytest.fixture
def sidecar(vllm_server: str, tmp_path: Path) -> Iterator[RunningSidecar]:
    """A sidecar of its own in front of the real server."""
    with running_sidecar(vllm_server, tmp_path) as running:
        yield running


def ridealong(*arguments: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [*RIDEALONG, *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        check=False,
    )


@pytest.fixture
def occupied_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]
