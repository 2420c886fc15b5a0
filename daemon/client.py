"""Talks to a running daemon: for the command line, rollout controllers and graders."""

import asyncio
import json
import math
from http.client import HTTPException
from typing import Any
from urllib import error, request
from urllib.parse import quote

from deploy.errors import UserError

TIMEOUT_SECONDS = 30.0


class DaemonUnreachable(UserError):
    """No daemon answers. Every request of this client may be repeated until one does."""


class DaemonClient:
    """Blocking client. Every request is idempotent.

    Methods raise ``DaemonUnreachable``, and ``UserError`` with the daemon's own words when it
    refuses a request.
    """

    def __init__(self, url: str = "http://127.0.0.1:8790") -> None:
        self._url = url.rstrip("/")
        # The daemon is on this machine; a proxy from the environment can't reach it.
        self._opener = request.build_opener(request.ProxyHandler({}))

    def status(self) -> dict[str, Any]:
        return self._call("GET", "/v1/status")

    def steps(self) -> dict[str, Any]:
        return self._call("GET", "/v1/steps")

    def run(self, run: str) -> dict[str, Any]:
        return self._call("GET", f"/v1/runs/{quote(run, safe='')}")

    def register_run(
        self,
        run: str,
        *,
        group: str | None = None,
        group_size: int | None = None,
        task: str = "",
        rewards: list[str] | None = None,
    ) -> dict[str, Any]:
        """Announce a run before its first call; ``rewards`` names those it must wait for."""
        body = {
            "run": run,
            "group": group,
            "group_size": group_size,
            "task": task,
            "rewards": rewards or [],
        }
        return self._call("POST", "/v1/runs", body)

    def end_run(self, run: str, status: str = "completed") -> dict[str, Any]:
        """``status``: completed, agent_failure or infrastructure_failure."""
        return self._call("POST", f"/v1/runs/{quote(run, safe='')}/end", {"status": status})

    def reward(
        self,
        *,
        value: float,
        run: str | None = None,
        call: str | None = None,
        name: str = "reward",
        key: str | None = None,
    ) -> dict[str, Any]:
        """Give a run or a call a reward."""
        if not math.isfinite(value):
            raise UserError(f"the value has to be a finite number, not {value}")
        body = {"value": value, "run": run, "call": call, "name": name, "key": key}
        return self._call("POST", "/v1/rewards", body)

    def _call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        message = request.Request(
            self._url + path,
            data=data,
            method=method,
            headers={"Content-Type": "application/json"},
        )
        try:
            with self._opener.open(message, timeout=TIMEOUT_SECONDS) as response:
                return json.load(response)
        except error.HTTPError as refusal:
            raise UserError(f"the daemon refused: {_reason(refusal)}") from None
        except (OSError, ValueError, HTTPException) as failure:
            raise DaemonUnreachable(
                f"no daemon answers at {self._url} ({failure}); start it with `ridealong daemon` "
                "or name its URL with --daemon"
            ) from None


class AsyncDaemonClient:
    """The same requests for asyncio programs, each in a worker thread."""

    def __init__(self, url: str = "http://127.0.0.1:8790") -> None:
        self._client = DaemonClient(url)

    async def status(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._client.status)

    async def steps(self) -> dict[str, Any]:
        return await asyncio.to_thread(self._client.steps)

    async def run(self, run: str) -> dict[str, Any]:
        return await asyncio.to_thread(self._client.run, run)

    async def register_run(self, run: str, **fields: Any) -> dict[str, Any]:
        return await asyncio.to_thread(self._client.register_run, run, **fields)

    async def end_run(self, run: str, status: str = "completed") -> dict[str, Any]:
        return await asyncio.to_thread(self._client.end_run, run, status)

    async def reward(self, **fields: Any) -> dict[str, Any]:
        return await asyncio.to_thread(self._client.reward, **fields)


def _reason(refusal: error.HTTPError) -> str:
    text = refusal.read().decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {refusal.code} {text[:200]}"


def format_status(status: dict[str, Any]) -> str:
    """Return the status as lines for a terminal."""
    lines = [f"daemon    {status['status']}, serving {status['live_version'] or 'nothing yet'}"]
    lines += [f"  problem {problem}" for problem in status["problems"]]
    trainer, step = status["trainer"], status["step"]
    doing = f"{trainer['stage']}{': ' + trainer['detail'] if trainer['detail'] else ''}"
    lines.append(f"training  {doing}" + (f" (step {step['number']})" if step else ""))
    checks = status["checks"]
    lines.append(f"calls     {_counts(status['calls'])}")
    lines.append(f"checks    {checks['calls']} calls checked, {checks['failed']} failed")
    lines += [f"  {name}: {count}" for name, count in checks["failures"].items()]
    for label, what in (
        ("harnesses", "harnesses"),
        ("aside    ", "side_calls"),
        ("retries  ", "retries"),
    ):
        if status[what]:
            lines.append(f"{label} {_counts(status[what])}")
    if status["left_out"]:
        lines.append("not trained, and why")
        lines += [f"  {count:6d}  {reason}" for reason, count in status["left_out"].items()]
    lines.append(f"samples   {_counts(status['samples'])}")
    lines.append(f"runs      {_counts(status['runs'])}")
    lines.append(f"groups    {_counts(status['groups'])}")
    lines += [f"  {group}: {reason}" for group, reason in status["waiting"].items()]
    if status["versions"]:
        lines.append("version   status    reward   rollouts  samples  stale  kl        pause s")
        lines += [_version(version) for version in status["versions"]]
    return "\n".join(lines)


def _counts(counts: dict[str, int]) -> str:
    return (
        ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in counts.items()) or "none"
    )


def _version(version: dict[str, Any]) -> str:
    def cell(key: str, form: str, width: int) -> str:
        value = version.get(key)
        return ("-" if value is None else format(value, form)).ljust(width)

    return (
        f"{version['version']:<9} {version['status']:<9} {cell('reward_mean', '.3f', 8)} "
        f"{cell('rollouts', '.0f', 9)} {cell('samples', '.0f', 8)} "
        f"{cell('staleness_max', '.0f', 6)} {cell('kl_rollout_trainer', '.2e', 9)} "
        f"{cell('swap_pause_s', '.3f', 7)}"
    ).rstrip()
