"""A model call with its exact tokens: one sampled output of one recorded exchange."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sidecar.bodies import coding
from sidecar.traces.record import Exchange, Outcome
from tokenization import apisource, checks
from tokenization.checks import Failure
from tokenization.tap import wire

Item = tuple[str, ...]
"""One step of a dialogue: ``(role, text)``, ``("call", name, arguments)``, ``("result", text)``."""

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

TokenSource = Literal["engine", "api"]
"""``engine``: the token tap; ``api``: a stock vLLM's reply (``tokenization.apisource``)."""

UNREADABLE = "unreadable tap"
"""Name of the failure of an exchange whose tap can't be decoded."""
NO_VERSION = "tokens from the API: weight version unknown"
"""Why a sound call of the ``api`` source is not trained."""


@dataclass(frozen=True)
class Usage:
    """Token counts the server reported for an exchange; None where it reported none."""

    prompt_tokens: int | None
    completion_tokens: int | None


@dataclass(frozen=True)
class Dialogue:
    """What a request said, independent of spelling.

    ``context`` is a digest of the system prompt and the tools; ``items`` leaves both out.
    ``reasoned``: a former reply in it carries reasoning.
    """

    context: str
    items: tuple[Item, ...]
    reasoned: bool = False


@dataclass(frozen=True)
class Reply:
    """What the model said in one choice. ``finish`` is the finish reason the client saw."""

    items: tuple[Item, ...]
    reasoned: bool = False
    finish: str | None = None


@dataclass(frozen=True)
class Call:
    """One sampled output with the prompt it was sampled from.

    ``prompt_ids`` int32 (P,); ``output_ids`` int32, ``logprobs`` float32 (natural log) and
    ``versions`` int32 (the N of ``vN``, -1 if unknown), all (T,). ``token_source`` says where the
    tokens come from; ``failures`` what the checks found, empty for a sound call.
    """

    id: str
    exchange: str
    agent: str
    """The harness's agent or thread id; empty when it names none."""
    started: float
    ended: float
    outcome: Outcome
    request_index: int
    output_index: int
    prompt_ids: IntArray
    output_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    finish: str | None
    params: Mapping[str, Any]
    token_source: TokenSource = "engine"
    failures: tuple[Failure, ...] = ()
    dialogue: Dialogue | None = None
    reply: Reply | None = None

    @property
    def end(self) -> int:
        """Number of prompt and output tokens."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def temperature(self) -> float:
        return float(self.params["temperature"])

    @property
    def left_out(self) -> str | None:
        """Why this call can't be trained, or None when it can.

        A cancelled call is not trained: the reward graded a run that never saw its end.
        """
        if self.failures:
            return f"check failed: {self.failures[0].name}"
        if self.outcome != "complete":
            return self.outcome
        if not len(self.output_ids):
            return "no output tokens"
        if self.token_source == "api":
            return NO_VERSION
        return None


@dataclass(frozen=True)
class Reading:
    """What one exchange gave: its calls, and the checks that failed for it as a whole."""

    calls: tuple[Call, ...]
    failures: tuple[Failure, ...] = ()


def read(
    exchange: Exchange,
    *,
    agent: str = "",
    usage: Usage | None = None,
    dialogue: Dialogue | None = None,
    replies: Mapping[int, Reply] | None = None,
) -> Reading:
    """Build the calls of an exchange from its token tap and check them.

    An exchange gives one call per engine request and output (several prompts, ``n > 1``). Without
    tap lines, or when they contradict each other or hold no output, it gives none and the
    reading's ``failures`` say why.
    """
    if not exchange.tap:
        return Reading((), (checks.Failure("no engine tokens", "the reply came without a tap"),))
    source: TokenSource = "api" if exchange.tap_source == "api" else "engine"
    try:
        requests = _decode(exchange)
    except (wire.TapError, apisource.ApiTokensError) as error:
        return Reading((), (checks.Failure(UNREADABLE, str(error)),))
    counted = usage is not None and usage.completion_tokens is not None
    shared = checks.check_counts(
        requests,
        prompt_tokens=usage.prompt_tokens if usage else None,
        completion_tokens=usage.completion_tokens if usage else None,
    )
    pairs = [(request, output) for request in requests for output in request.outputs.values()]
    calls = []
    for request, output in pairs:
        alone = len(pairs) == 1
        if source == "engine":
            found = checks.check_output(request, output, exchange.outcome)
        else:
            found = checks.check_api_output(request, output, exchange.outcome, counted=counted)
        failures = (*found, *shared)
        versions = [checks.version_number(v) for v in output.versions]
        calls.append(
            Call(
                id=exchange.id if alone else f"{exchange.id}.{request.index}.{output.index}",
                exchange=exchange.id,
                agent=agent,
                started=exchange.started,
                ended=exchange.ended,
                outcome=exchange.outcome,
                request_index=request.index,
                output_index=output.index,
                prompt_ids=np.asarray(request.prompt_ids, dtype=np.int32),
                output_ids=np.asarray(output.ids, dtype=np.int32),
                logprobs=np.asarray(output.logprobs, dtype=np.float32),
                versions=np.asarray([-1 if v is None else v for v in versions], dtype=np.int32),
                finish=output.finish,
                params=request.params,
                token_source=source,
                failures=failures,
                dialogue=dialogue,
                reply=(replies or {}).get(output.index),
            )
        )
    if not calls:
        return Reading((), (*shared, checks.Failure("no engine tokens", "the tap has no output")))
    return Reading(tuple(calls))


def _decode(exchange: Exchange) -> list[wire.EngineRequest]:
    if exchange.tap_source != "api":
        return wire.decode(exchange.tap)
    asked = exchange.request
    encoding = ",".join(v for name, v in asked.headers if name.lower() == "content-encoding")
    try:
        said = json.loads(coding.decode(asked.body.raw() if asked.body else b"", encoding))
    except (ValueError, RecursionError) as error:
        raise apisource.ApiTokensError(f"the request can't be read: {error}") from error
    return apisource.decode(exchange.tap, said if isinstance(said, dict) else {})


def version_spans(versions: IntArray) -> list[tuple[int, int]]:
    """Run-length form of per-token versions: (first token position, version number)."""
    if not len(versions):
        return []
    starts = np.flatnonzero(np.diff(versions, prepend=versions[0] - 1))
    return [(int(start), int(versions[start])) for start in starts]
