"""The proxies that are measured: how each is started, and how a call is sent to it."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sidecar.config import TokenSource
from tests.bench.load import Target

ROOT = Path(__file__).parents[2]
AGENT_LIGHTNING = "1.0.2"
_CACHE = ROOT / ".bench"  # Ignored by git.
_START_SECONDS = 60.0
_FORK_SECONDS = 0.2  # nginx listens first and starts its worker then.
_KEY = "bench"


class Missing(Exception):
    """A contender can't be run here; the message says what to do."""


@dataclass
class Running:
    """A contender that runs. ``pids``: its processes; none for direct access."""

    name: str
    target: Target
    streams: bool = True
    fresh: Callable[["Running"], None] = lambda running: None
    """Called before every measurement: begins a new run, rollout or whatever its word for it."""


@dataclass(frozen=True)
class Contender:
    """``command(port, upstream, folder)`` runs it; the folder is its own and empty."""

    name: str
    command: Callable[[int, str, Path], list[str]]
    streams: bool = True
    fresh: Callable[[Running], None] = field(default=lambda running: None)
    set_up: Callable[[Running, str], None] = field(default=lambda running, upstream: None)
    """Called once it listens, with the upstream's URL."""


def _nginx(port: int, upstream: str, folder: Path) -> list[str]:
    program = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if program is None:
        raise Missing("nginx is left out: there is none (Debian, Ubuntu: apt-get install nginx)")
    address = upstream.removeprefix("http://")
    paths = "\n".join(
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(f"""
daemon off;
{"user root;" if os.geteuid() == 0 else ""}
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr error;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  {paths}
  keepalive_requests 1000000;
  client_max_body_size 0;
  client_body_buffer_size 1m;
  upstream stub {{ server {address}; keepalive 512; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=1024;
    location / {{
      proxy_pass http://stub;
      proxy_http_version 1.1;
      proxy_set_header connection "";
      proxy_buffering off;
      proxy_read_timeout 1h;
    }}
  }}
}}
""")
    return [program, "-e", "stderr", "-p", str(folder), "-c", str(folder / "nginx.conf")]


def _peer(name: str) -> Callable[[int, str, Path], list[str]]:
    return lambda port, upstream, folder: [
        sys.executable,
        "-m",
        "tests.bench.peers",
        name,
        str(port),
        upstream,
    ]


def _sidecar(source: TokenSource) -> Callable[[int, str, Path], list[str]]:
    def command(port: int, upstream: str, folder: Path) -> list[str]:
        config = folder / "ridealong.toml"
        config.write_text(
            f'[sidecar]\nupstream = "{upstream}"\nlisten = "127.0.0.1:{port}"\n'
            f'admin = "127.0.0.1:0"\ntraces = "{folder}/traces"\ntoken_source = "{source}"\n'
        )
        return [sys.executable, "-m", "deploy", "sidecar", "--config", str(config)]

    return command


def _agent_lightning(port: int, upstream: str, folder: Path) -> list[str]:
    home = _CACHE / f"agent-lightning-{AGENT_LIGHTNING}"
    server = home / "bin" / "agl-server"
    if not server.exists():
        uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
        if uv is None:
            raise Missing("Agent Lightning is left out: it is installed with uv (pip install uv)")
        print(f"installing Agent Lightning {AGENT_LIGHTNING} into {home}", file=sys.stderr)
        python = str(home / "bin" / "python")
        package = f"agentlightning=={AGENT_LIGHTNING}"
        for command in (
            [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(home)],
            [uv, "pip", "install", "--quiet", "--python", python, package],
        ):
            if subprocess.run(command, check=False).returncode:
                raise Missing("Agent Lightning is left out: it could not be installed from PyPI")
    return [
        str(server),
        "host=127.0.0.1",
        f"port={port}",
        f"key={_KEY}",
        "default_proxy.model_name=m",
        f"hydra.run.dir={folder}",
        "hydra.output_subdir=null",
    ]


def _api(running: Running, method: str, path: str, body: Any = None) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{running.target.port}{path}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"authorization": f"Bearer {_KEY}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        data = reply.read()
    return json.loads(data) if data else None


def _register_model(running: Running, upstream: str) -> None:
    _api(running, "POST", "/api/models", [{"model": "m", "endpoint": f"{upstream}/v1"}])
    running.target.headers = [("authorization", f"Bearer {_KEY}")]


def _next_rollout(running: Running) -> None:
    """Begin a rollout and delete the one before, as their trainer does when it has read it."""
    before = running.target.path.split("/")
    if "rollout" in before:
        _api(running, "DELETE", f"/api/rollouts/{before[before.index('rollout') + 1]}")
    (rollout,) = _api(running, "POST", "/api/rollouts", [{"input": {}}])
    running.target.path = (
        f"/proxy/rollout/{rollout['rollout_id']}/attempt/0/mode/train/openai/v1/chat/completions"
    )


def _next_run(running: Running) -> None:
    running.target.path = f"/r/run-{time.monotonic_ns()}/v1/chat/completions"


DIRECT = "direct"
NGINX = Contender("nginx", _nginx)
AIOHTTP = Contender("plain aiohttp proxy", _peer("aiohttp"))
MITMPROXY = Contender("bare mitmproxy", _peer("mitmproxy"))
SIDECAR_NO_TOKENS = Contender("sidecar, no tokens", _sidecar("none"), fresh=_next_run)
SIDECAR_TAP = Contender("sidecar, token tap", _sidecar("tap"), fresh=_next_run)
SIDECAR_API = Contender("sidecar, API tokens", _sidecar("api"), fresh=_next_run)
AGENT_LIGHTNING_GATEWAY = Contender(
    f"Agent Lightning {AGENT_LIGHTNING}",
    _agent_lightning,
    streams=False,
    fresh=_next_rollout,
    set_up=_register_model,
)
SIDECARS = [SIDECAR_NO_TOKENS, SIDECAR_TAP, SIDECAR_API]
ALL = [NGINX, AIOHTTP, MITMPROXY, *SIDECARS, AGENT_LIGHTNING_GATEWAY]


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def started(contender: Contender, upstream: Target, folder: Path) -> Iterator[Running]:
    """Run a contender until the end of the block, in a new folder.

    Raises:
        Missing: it can't be run here.
        RuntimeError: it did not start.
    """
    folder.mkdir()
    port, url = free_port(), f"http://127.0.0.1:{upstream.port}"
    with process(contender.command(port, url, folder), port, folder) as pids:
        target = Target(port, pids=pids, upstream_pids=upstream.pids, upstream_port=upstream.port)
        running = Running(contender.name, target, contender.streams, contender.fresh)
        contender.set_up(running, url)
        yield running


@contextlib.contextmanager
def process(command: list[str], port: int, folder: Path) -> Iterator[list[int]]:
    """Run a server until the end of the block; yield the ids of its processes once it listens.

    What it prints goes to ``log`` in the folder.

    Raises:
        RuntimeError: it did not start.
    """
    log = folder / "log"
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if child.poll() is not None or time.monotonic() > deadline:
                    tail = log.read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"{command} did not start: {tail}") from None
                time.sleep(0.05)
        time.sleep(_FORK_SECONDS)
        whole = psutil.Process(child.pid)
        yield [child.pid, *(process.pid for process in whole.children(recursive=True))]
    finally:
        child.terminate()
        try:
            child.wait(15)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
