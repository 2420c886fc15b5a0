"""What the probes' records say, and what to do about it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deploy.doctor.probes import Answer, Kind, Probe
from sidecar.traces.record import Exchange

_NOT_OFFERED = (404, 405, 501)


@dataclass(frozen=True)
class Finding:
    """One probe's result. ``ok``: the path does all it should. ``tokens``: where they came from."""

    probe: Probe
    ok: bool
    tokens: str
    problem: str | None = None
    fix: str | None = None


def judge(
    probe: Probe, answer: Answer, exchange: Exchange | None, checks: Sequence[str] | None
) -> Finding:
    """Say what a probe showed.

    ``exchange`` is its record, None if there is none; ``checks`` are the checks its tokens failed,
    None where they could not be made.
    """
    if answer.status in _NOT_OFFERED:
        return Finding(probe, True, "-", "the model server does not offer it")
    if answer.error is not None:
        failure = _failure(answer, exchange)
        return Finding(probe, False, "-", failure, _advice(probe.kind, answer, failure))
    if exchange is None:
        return Finding(
            probe,
            False,
            "-",
            "no record of the call was written",
            "look at the sidecar's /healthz: the traces folder may be another one, or not writable",
        )
    source = {"inline": "tap", "pulled": "tap", "api": "api"}.get(exchange.tap_source, "none")
    problem, fix = _fault(probe, exchange, source, checks or ())
    return Finding(probe, problem is None, source, problem, fix)


def _fault(
    probe: Probe, exchange: Exchange, source: str, failed: Sequence[str]
) -> tuple[str | None, str | None]:
    """What is wrong with a record, and what to do about it."""
    expected = "cancelled" if probe.kind == "cancelled" else "complete"
    if exchange.outcome != expected:
        return f"recorded as {exchange.outcome} instead of {expected}", exchange.error
    if source == "none":
        return "no tokens were captured", _source_advice(probe)
    if failed:
        return (
            f"the tokens fail a check: {', '.join(failed)}",
            "something between sidecar and engine changes or buffers replies: connect them "
            "directly",
        )
    return None, None


def unlisted(answer: Answer, exchange: Exchange | None) -> str:
    """Say why there is no list of models to choose from, and what to do about it, in one line."""
    problem = _failure(answer, exchange)
    advice = _advice("plain", answer, problem)
    return (
        f"/v1/models lists no models: {problem}: "
        f"{advice or 'correct sidecar.upstream, or name a model with --model'}"
    )


def _failure(answer: Answer, exchange: Exchange | None) -> str:
    """What went wrong. Why the model server gave no reply, only the record says."""
    if answer.status:
        return f"HTTP {answer.status}: {answer.error}"
    if exchange is not None and exchange.outcome == "upstream_error" and exchange.error:
        return f"the sidecar's request to {exchange.upstream} failed: {exchange.error}"
    return str(answer.error)


def _advice(kind: Kind, answer: Answer, problem: str) -> str | None:
    if kind == "tool" and answer.status == 400:
        return (
            "start the model server with tool calls on: `ridealong serve` with "
            "serve.tool_call_parser, or vLLM's --enable-auto-tool-choice --tool-call-parser"
        )
    if answer.status in (401, 403):
        if "run key" in problem:
            return "name the sidecar's configuration with --config: the doctor makes its own keys"
        return "give the API key with --api-key, or let the upstream's credentials be replaced"
    if answer.status == 0:
        return _silence(answer, problem)
    return None


def _silence(answer: Answer, problem: str) -> str:
    """What to do where no reply came."""
    authority = "SSL_CERT_FILE=FILE in the environment, a PEM file that holds its authority"
    if not answer.reached:
        if "certificate" in problem:
            return f"start the doctor with {authority}"
        return "the sidecar's admin port answers, the address that agents connect to does not"
    if "certificate verify failed" in problem.lower():
        return f"its certificate is not trusted: start the sidecar with {authority}"
    return "start the model server, or correct sidecar.upstream"


def _source_advice(probe: Probe) -> str:
    if probe.route in ("responses", "messages"):
        return "only the token tap gives this protocol's tokens: start vLLM with `ridealong serve`"
    return (
        "start vLLM with `ridealong serve`; if it runs, a router in between drops what it adds: "
        "connect the sidecar to the engine"
    )


def usable(findings: Sequence[Finding]) -> Mapping[str, str]:
    """Return route → the token source that works for all of its probes, ``none`` or ``-``."""
    found: dict[str, str] = {}
    for finding in findings:
        before = found.get(finding.probe.route)
        # One probe without tokens spoils the protocol for training.
        ranks = {"none": 0, "api": 1, "tap": 2, "-": 3}
        if before is None or ranks[finding.tokens] < ranks[before]:
            found[finding.probe.route] = finding.tokens
    return found
