"""Starts the programs of one machine, keeps them running, and ends them all.

Used by ``ridealong up`` and ``ridealong demo``; a GPU box uses systemd instead, with the same
contract: a program is ready when its health URL answers, any program may be killed and is started
again alone, and a listening socket can outlive the program that serves it (``LISTEN_FDS``, as in
sd_listen_fds(3)), so that clients wait instead of being refused while it restarts.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from deploy.errors import UserError

READY_POLL_SECONDS = 0.25
STOP_SECONDS = 20.0
RESTART_WINDOW_SECONDS = 120.0
RESTARTS_PER_WINDOW = 5
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

# Puts an inherited socket on fd 3 and says so to the program that replaces this process.
_SOCKET_LAUNCHER = (
    "import os,sys;"
    "fd=int(sys.argv[1]);"
    "os.dup2(fd,3) if fd!=3 else os.set_inheritable(3,True);"
    "os.environ.update(LISTEN_FDS='1',LISTEN_PID=str(os.getpid()));"
    "os.execvp(sys.argv[2],sys.argv[2:])"
)


@dataclass
class Program:
    """One supervised program and how often it was restarted."""

    name: str
    argv: list[str]
    log: Path
    env: dict[str, str]
    listener: socket.socket | None = None
    process: asyncio.subprocess.Process | None = None
    watcher: asyncio.Task[None] | None = None
    restarts: int = 0
    failure: str | None = None
    deaths: deque[float] = field(default_factory=deque)


def _die_with_parent(parent: int) -> Callable[[], None]:
    """Return a hook that makes the child end with us, even when we are killed outright."""

    def hook() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    return hook


class Supervisor:
    """Runs programs until ``stop``; a program that dies is started again.

    ``on_event`` gets one line for everything a person would want to know.
    """

    def __init__(self, directory: Path, on_event: Callable[[str], None] = print) -> None:
        self._directory = directory
        self._on_event = on_event
        self._programs: dict[str, Program] = {}
        self._stopping = False

    @property
    def programs(self) -> dict[str, Program]:
        return self._programs

    async def start(
        self,
        name: str,
        argv: list[str],
        ready_url: str | None = None,
        listener: socket.socket | None = None,
        env: dict[str, str] | None = None,
        ready_seconds: float = 600.0,
    ) -> Program:
        """Start ``argv`` and wait until ``ready_url`` answers with a 2xx status.

        Raises:
            UserError: the program ended, or was not ready within ``ready_seconds``; the message
                names its log file and holds its last line.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        program = Program(
            name, argv, self._directory / f"{name}.log", {**os.environ, **(env or {})}, listener
        )
        self._programs[name] = program
        await self._spawn(program)
        program.watcher = asyncio.create_task(self._watch(program), name=f"watch {name}")
        if ready_url is not None:
            await self._wait_ready(program, ready_url, ready_seconds)
        return program

    async def _spawn(self, program: Program) -> None:
        argv = program.argv
        pass_fds: tuple[int, ...] = ()
        if program.listener is not None:
            fd = program.listener.fileno()
            argv, pass_fds = [sys.executable, "-S", "-c", _SOCKET_LAUNCHER, str(fd), *argv], (fd,)
        with program.log.open("ab") as log:
            program.process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=program.env,
                pass_fds=pass_fds,
                # A group of its own: Ctrl-C reaches us alone, and we end everything in order.
                start_new_session=True,
                preexec_fn=_die_with_parent(os.getpid()),
            )

    async def _watch(self, program: Program) -> None:
        while True:
            assert program.process is not None
            code = await program.process.wait()
            if self._stopping:
                return
            now = time.monotonic()
            program.deaths.append(now)
            while program.deaths and now - program.deaths[0] > RESTART_WINDOW_SECONDS:
                program.deaths.popleft()
            # A configuration error (exit status 2) will not get better by trying again.
            if code == 2 or len(program.deaths) > RESTARTS_PER_WINDOW:
                program.failure = f"exit status {code}"
                self._on_event(
                    f"{program.name} ended with {program.failure} and is not started again:"
                    f" {self._last_line(program)}; see {program.log}"
                )
                return
            self._on_event(f"{program.name} ended ({_describe(code)}); starting it again")
            await asyncio.sleep(min(5.0, 0.1 * 2 ** (len(program.deaths) - 1)))
            if self._stopping:
                return
            program.restarts += 1
            await self._spawn(program)

    async def _wait_ready(self, program: Program, url: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                if program.failure is not None:
                    raise UserError(
                        f"{program.name} did not start ({program.failure}):"
                        f" {self._last_line(program)}; see {program.log}"
                    )
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(url) as response:
                        if response.ok:
                            return
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{program.name} was not ready after {seconds:.0f} s:"
                        f" {self._last_line(program)}; see {program.log}"
                    )
                await asyncio.sleep(READY_POLL_SECONDS)

    def _last_line(self, program: Program) -> str:
        with contextlib.suppress(OSError), program.log.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 4096))
            lines = [line for line in log.read().decode("utf-8", "replace").splitlines() if line]
            if lines:
                return lines[-1]
        return "no output"

    async def stop(self) -> None:
        """End all programs, last started first; those that don't within their time are killed."""
        self._stopping = True
        for program in reversed(self._programs.values()):
            if program.watcher is not None:
                program.watcher.cancel()
            process = program.process
            if process is None or process.returncode is not None:
                continue
            _signal_group(process.pid, signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            except TimeoutError:
                self._on_event(f"{program.name} did not end within {STOP_SECONDS:.0f} s: killed")
            # Also what the program left behind in its group.
            _signal_group(process.pid, signal.SIGKILL)
            await process.wait()


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def listening_socket(address: str) -> socket.socket:
    """Return a socket that listens on ``host:port`` (port 0: any free one).

    Raises:
        UserError: the address is taken or can't be bound.
    """
    host, _, port = address.rpartition(":")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, int(port)))
    except OSError as error:
        listener.close()
        raise UserError(
            f"can't listen on {address}: {error.strerror}; stop what uses it or choose another port"
        ) from None
    listener.listen(1024)
    return listener


def free_port() -> int:
    """Return a port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
