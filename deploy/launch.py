"""``ridealong run``: starts any program so that its model calls go through a running sidecar.

The program keeps the terminal, its signals and its exit status. Nothing is registered anywhere: the
run exists from its first call on.
"""

import contextlib
import ctypes
import http.client
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deploy.errors import UserError
from sidecar.access.keys import RunKeys, is_run, load_secret, not_a_run
from sidecar.call import new_id
from sidecar.config import SidecarConfig

Mode = Literal["base-url", "proxy"]

_PR_SET_PDEATHSIG = 1
_SI_KERNEL = 0x80
_HEALTH_SECONDS = 5.0
_PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
# With one of these in NO_PROXY an agent goes to a local model server past the proxy.
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "127.0.0.0/8", "::1", "[::1]", "0.0.0.0", "*"})
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Ways:
    """What a sidecar says of the ways into it."""

    base_url: str
    proxy: str | None
    """``host:port``; None: it is no proxy."""
    ca_bundle: str | None


def run(config: SidecarConfig, command: list[str], run: str | None, mode: Mode) -> int:
    """Run a program to its end; return its exit status, 128 + n if signal n ended it.

    Raises:
        UserError: no sidecar answers at ``config.admin``, or not in this mode; the run id is none.
    """
    if not command:
        raise UserError("give the program to start: ridealong run -- COMMAND")
    if run is not None and not is_run(run):
        raise UserError(f"--run: {not_a_run(run)}")
    run = run or f"run-{new_id()}"
    ways = ask(config.admin)
    key = None
    if config.require_key:
        key = RunKeys(load_secret(Path(config.key_file).expanduser())).issue(run)
    changes = (
        base_url_environment(ways.base_url, run, key, os.environ)
        if mode == "base-url"
        else proxy_environment(ways, run, key, os.environ)
    )
    print(f"ridealong run: {run}", file=sys.stderr, flush=True)
    return _spawn(command, {**os.environ, **changes})


def ask(admin: str) -> Ways:
    """Ask a sidecar for the ways into it.

    Raises:
        UserError: none answers at the address.
    """
    url = f"http://{admin}/healthz"
    try:
        # Not through a proxy that the environment names.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=_HEALTH_SECONDS) as reply:
            answer: dict[str, Any] = json.load(reply)
            ways = answer["ways"]
            return Ways(ways["base_url"], ways.get("proxy"), ways.get("ca_bundle"))
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        raise UserError(
            f"no sidecar answers at http://{admin}: start `ridealong sidecar`, or name "
            "its admin address with --set sidecar.admin=HOST:PORT"
        ) from None


def base_url_environment(
    base_url: str, run: str, key: str | None, now: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that make a program take the sidecar for the model server.

    ``key``: the run's, where the sidecar asks for one; it takes the place of API keys.
    """
    root = f"{base_url}/r/{run}"
    openai, anthropic = f"{root}/v1", root
    keys = {"OPENAI_API_KEY": key, "ANTHROPIC_API_KEY": key} if key else {}
    return _always(run) | {
        **keys,
        "OPENAI_BASE_URL": openai,
        "OPENAI_API_BASE": openai,
        "ANTHROPIC_BASE_URL": anthropic,
        "ANTHROPIC_API_BASE": anthropic,
        # A proxy that is there for other reasons is not asked for the sidecar.
        **_both_cases("no_proxy", ",".join([*_no_proxy(now), "127.0.0.1", "localhost", "::1"])),
    }


def proxy_environment(
    ways: Ways, run: str, key: str | None, now: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that make a program send everything through the sidecar.

    Raises:
        UserError: the sidecar is no proxy.
    """
    if ways.proxy is None or ways.ca_bundle is None:
        raise UserError("the sidecar is no proxy: start it with --set sidecar.proxy=127.0.0.1:8789")
    proxy = f"http://{run}:{key or '-'}@{ways.proxy}"
    bundle = ways.ca_bundle
    variables = {
        **_always(run),
        **_both_cases("http_proxy", proxy),
        **_both_cases("https_proxy", proxy),
        **_both_cases("all_proxy", proxy),
        **_both_cases("no_proxy", ",".join(_no_proxy(now))),
        "NODE_USE_ENV_PROXY": "1",
    }
    for name in (
        "SSL_CERT_FILE",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "NODE_EXTRA_CA_CERTS",
        "GIT_SSL_CAINFO",
        "CARGO_HTTP_CAINFO",
        "PIP_CERT",
        "AWS_CA_BUNDLE",
        "CODEX_CA_CERTIFICATE",
    ):
        variables[name] = bundle
    return variables


def _always(run: str) -> dict[str, str]:
    return {
        "RIDEALONG_RUN": run,
        # Claude Code else begins its prompt with a line that changes from call to call.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }


def _both_cases(name: str, value: str) -> dict[str, str]:
    return {name: value, name.upper(): value}


def _no_proxy(now: Mapping[str, str]) -> list[str]:
    """Return the hosts that go past a proxy already, except this machine."""
    entries = f"{now.get('no_proxy', '')},{now.get('NO_PROXY', '')}".split(",")
    kept = [entry.strip() for entry in entries if entry.strip().lower() not in ("", *_LOOPBACK)]
    return list(dict.fromkeys(kept))


def _spawn(command: list[str], environment: dict[str, str]) -> int:
    """Run a program, pass signals on to it, and return its exit status."""
    parent = os.getpid()
    waited_for = {signal.SIGCHLD, *_PASSED_ON}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        # Its process group and terminal stay ours: job control works as without us.
        child = subprocess.Popen(
            command,
            env=environment,
            preexec_fn=in_child,  # noqa: PLW1509  There are no threads here.
        )
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        print(f"ridealong run: {command[0]}: {error.strerror}", file=sys.stderr)
        # As shells do, POSIX.1-2017, 2.8.2.
        return 127 if isinstance(error, FileNotFoundError) else 126
    while child.poll() is None:
        info = signal.sigwaitinfo(waited_for)
        # What a terminal sends (Ctrl-C), it sends to the program as well.
        if info.si_signo != signal.SIGCHLD and info.si_code != _SI_KERNEL:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(info.si_signo)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode
