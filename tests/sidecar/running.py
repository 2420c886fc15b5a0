"""A real sidecar process, and what it wrote."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from sidecar.config import SidecarConfig
from sidecar.traces.reader import read_records
from sidecar.traces.record import Exchange, Record

_PROGRAM = """
import os, sys, msgspec
if len(sys.argv) > 2:
    os.dup2(int(sys.argv[2]), 3)
from sidecar.config import SidecarConfig
from sidecar.program import run
sys.exit(run(msgspec.json.decode(sys.argv[1], type=SidecarConfig)))
"""
_READY = re.compile(r"https?://[0-9.]+:(\d+) -> .* health at http://127\.0\.0\.1:(\d+)/")


class RunningSidecar:
    """Starts on construction; ``port`` is the agent's, ``admin`` the admin port."""

    def __init__(
        self,
        upstream: str,
        traces: Path,
        *,
        listening: socket.socket | None = None,
        env: dict[str, str] | None = None,
        config_file: Path | None = None,
        prefix: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.traces = traces
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        config = SidecarConfig(
            upstream=upstream,
            traces=str(traces),
            **{
                "listen": "127.0.0.1:0",
                "admin": "127.0.0.1:0",
                "key_file": str(traces.with_name("run-keys.secret")),
            }
            | options,
        )
        argv = [sys.executable, "-c", _PROGRAM, msgspec.json.encode(config).decode()]
        if config_file is not None:
            argv = [sys.executable, "-m", "deploy", "sidecar", "--config", str(config_file)]
        environment = os.environ | (env or {})
        if listening is not None:
            environment |= {"LISTEN_FDS": "1"}
            argv.append(str(listening.fileno()))
        self.process = subprocess.Popen(
            [*prefix, *argv],
            env=environment,
            pass_fds=[listening.fileno()] if listening is not None else [],
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = _READY.search(line)
        if match is None:
            raise RuntimeError(f"the sidecar did not start: {line}{self.errors()}")
        self.port, self.admin = int(match[1]), int(match[2])
        self.url = f"http://127.0.0.1:{self.port}"

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/healthz", timeout=5) as reply:
            answer: dict[str, Any] = json.load(reply)
            return answer

    def metric(self, sample: str) -> float:
        """Return the value of a sample of /metrics, given with its labels; 0 if it is absent."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin}/metrics", timeout=5) as reply:
            for line in reply.read().decode().splitlines():
                if line.startswith(f"{sample} "):
                    return float(line.rsplit(" ", 1)[1])
        return 0.0

    def calls(self, at_least: int, seconds: float = 5.0) -> list[Exchange]:
        """Return the exchanges in the shards as soon as there are so many."""
        deadline = time.monotonic() + seconds
        while True:
            found = [r for r in records(self.traces) if isinstance(r, Exchange)]
            if len(found) >= at_least:
                return found
            assert time.monotonic() < deadline, f"{len(found)} of {at_least} exchanges recorded"
            time.sleep(0.01)

    def stop(self, *, timeout: float = 20.0) -> tuple[int, str]:
        """SIGTERM; return the exit status and what was written to stderr."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=timeout)
        return self.process.returncode, "".join(self.errors())

    def errors(self) -> list[str]:
        """Return the lines written to stderr so far."""
        size = os.fstat(self._stderr.fileno()).st_size
        return os.pread(self._stderr.fileno(), size, 0).decode().splitlines(keepends=True)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def records(traces: Path) -> list[Record]:
    """Read every record of a folder of shards; damaged frames fail the test."""
    found: list[Record] = []
    for path in sorted(traces.glob("*.jsonl.zst")):
        for located in read_records(path):
            assert located.record is not None, f"{path}: {located.error}"
            found.append(located.record)
    return found
