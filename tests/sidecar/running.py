"""A real sidecar process, and what it wrote."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from sidecar.config import SidecarConfig
from sidecar.record import Exchange, Record, decode
from sidecar.shards import read_frames

_PROGRAM = """
import os, sys, msgspec
if len(sys.argv) > 2:
    os.dup2(int(sys.argv[2]), 3)
from sidecar.config import SidecarConfig
from sidecar.program import run
sys.exit(run(msgspec.json.decode(sys.argv[1], type=SidecarConfig)))
"""
_READY = re.compile(r"http://127\.0\.0\.1:(\d+) -> .* health at http://127\.0\.0\.1:(\d+)/")


class RunningSidecar:
    """Starts on construction; ``port`` is the agent's, ``admin`` the admin port."""

    def __init__(
        self,
        upstream: str,
        traces: Path,
        *,
        listening: socket.socket | None = None,
        env: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.traces = traces
        config = SidecarConfig(
            upstream=upstream,
            traces=str(traces),
            **{"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"} | options,
        )
        argv = [sys.executable, "-c", _PROGRAM, msgspec.json.encode(config).decode()]
        environment = os.environ | (env or {})
        if listening is not None:
            environment |= {"LISTEN_FDS": "1"}
            argv.append(str(listening.fileno()))
        self.process = subprocess.Popen(
            argv,
            env=environment,
            pass_fds=[listening.fileno()] if listening is not None else [],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = _READY.search(line)
        if match is None:
            raise RuntimeError(f"the sidecar did not start: {line}{self.process.communicate()[1]}")
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
        _, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, errors

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def records(traces: Path) -> list[Record]:
    """Read every record of a folder of shards; damaged frames fail the test."""
    found: list[Record] = []
    for path in sorted(traces.glob("*.jsonl.zst")):
        for frame in read_frames(path):
            assert frame.error is None, f"{path}: {frame.error}"
            found += [decode(line) for line in frame.lines]
    return found
