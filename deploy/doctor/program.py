"""Runs the probes against the running sidecar and prints what they show."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import aiohttp

from deploy.config import Config
from deploy.doctor import findings, probes
from deploy.doctor.findings import Finding
from deploy.doctor.probes import Answer, Model
from deploy.errors import UserError
from deploy.launch import ask
from sidecar.traces.reader import RecordReader
from sidecar.traces.record import Exchange
from sidecar.traces.shards import SUFFIX

_TIMEOUT = aiohttp.ClientTimeout(total=10)
_RECORD_SECONDS = 10.0


def run(config: Config, model: str | None, api_key: str | None) -> int:
    """Probe every protocol through the sidecar; 0 when all that is offered works.

    ``model``: the model to ask for; by default the first one that the model server lists.
    ``api_key``: the key for the model server.

    Raises:
        UserError: the sidecar can't be reached, or there is no model to ask for.
    """
    return asyncio.run(_run(config, ask(config.sidecar.admin).base_url, model, api_key))


async def _run(config: Config, base: str, model: str | None, api_key: str | None) -> int:
    sidecar = config.sidecar
    traces = Path(sidecar.traces)
    key = _keys(config, api_key)
    ready = await _get(f"http://{sidecar.admin}/readyz")
    for reason in ready.get("reasons", []):
        print(f"sidecar: not ready: {reason}")
    tag = f"doctor-{os.getpid()}-{int(time.time())}"
    asked = await _model(base, f"{tag}.models", key, model, traces)
    health = await _get(f"http://{sidecar.admin}/healthz")
    upstream = health.get("upstream", sidecar.upstream)
    print(f"sidecar {base} -> {upstream}, model {asked.name}, traces in {sidecar.traces}\n")
    since = time.time()
    results = [(probe, await probes.send(base, probe, asked, key)) for probe in probes.probes(tag)]
    records = await _records(traces, since, {probe.run: answer for probe, answer in results})
    found = [
        findings.judge(probe, answer, exchange := records.get(probe.run), _checks(exchange))
        for probe, answer in results
    ]
    _print(found)
    return 0 if all(finding.ok for finding in found) else 1


def _keys(config: Config, api_key: str | None) -> Callable[[str], str | None]:
    if not config.sidecar.require_key:
        return lambda run: api_key
    from sidecar.access.keys import RunKeys, load_secret

    return RunKeys(load_secret(Path(config.sidecar.key_file).expanduser())).issue


async def _get(url: str) -> dict[str, Any]:
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT) as session,
            session.get(url) as reply,
        ):
            answer = await reply.json(content_type=None)
            return answer if isinstance(answer, dict) else {}
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return {}


async def _model(
    base: str, run: str, key: Callable[[str], str | None], name: str | None, traces: Path
) -> Model:
    """Return the model of this name, or the first one that is listed.

    Raises:
        UserError: no name, and no list.
    """
    since = time.time()
    answer, listed = await probes.models(base, run, key(run))
    if name is not None:
        return next((model for model in listed if model.name == name), Model(name))
    if not listed:
        records = await _records(traces, since, {run: answer})
        raise UserError(findings.unlisted(answer, records.get(run)))
    return listed[0]


async def _records(
    traces: Path, since: float, answers: Mapping[str, Answer]
) -> dict[str, Exchange]:
    """Return run → record; waits for those of calls that were answered, or should have been."""
    wanted = {run for run, got in answers.items() if got.reached and got.status in (0, 200)}
    deadline = time.monotonic() + _RECORD_SECONDS
    while True:
        found = await asyncio.to_thread(_read, traces, since, answers.keys())
        if wanted <= found.keys() or time.monotonic() >= deadline:
            return found
        await asyncio.sleep(0.2)


def _read(traces: Path, since: float, runs: Set[str]) -> dict[str, Exchange]:
    found = {}
    for shard in sorted(traces.glob(f"*{SUFFIX}")):
        if shard.stat().st_mtime < since - 1:
            continue
        for _, located in RecordReader(shard).frames():
            for one in located:
                record = one.record
                if isinstance(record, Exchange) and record.session.run in runs:
                    found[str(record.session.run)] = record
    return found


def _checks(exchange: Exchange | None) -> list[str] | None:
    """Names of the checks that a call's tokens fail; None where the daemon is not installed."""
    if exchange is None or not exchange.tap:
        return None
    try:
        from daemon.exchange import read
    except ModuleNotFoundError:
        return None
    return [failure.name for entry in read(exchange) for failure in entry.failures]


def _print(found: Sequence[Finding]) -> None:
    width = max(len(f"{f.probe.route} {f.probe.kind}") for f in found)
    for finding in found:
        mark = "ok " if finding.ok else "NO "
        name = f"{finding.probe.route} {finding.probe.kind}"
        tokens = "" if finding.tokens == "-" else f"tokens: {finding.tokens}"
        print(f"{mark} {name:{width}}  {finding.problem or tokens}")
        if finding.fix:
            print(f"    {'':{width}}  -> {finding.fix}")
    print()
    for route, source in findings.usable(found).items():
        print(f"{route}: {_SENTENCES[source]}")


_SENTENCES = {
    "tap": "exact tokens from the engine's token tap",
    "api": "tokens from vLLM's API, without weight versions",
    "none": "recorded without tokens: nothing of it can be trained",
    "-": "not usable through this path",
}
