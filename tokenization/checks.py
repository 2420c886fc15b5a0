"""Checks that decide whether a call's captured tokens may be trained on.

Each check compares two independent accounts of the same tokens: the tap's events with the usage
that the server told the client, and the sampling parameters with what the trainer can reproduce.
All are pure; a call that fails one is kept and marked.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sidecar.traces.record import Outcome
from tokenization.tap.wire import EngineOutput, EngineRequest

VERSION = re.compile(r"v([0-9]{1,9})")
MAX_TEMPERATURE = 1e6

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "min_tokens": (None, 0),
    "logit_bias": (None, False, {}),
    "structured_outputs": (None, False, {}),
    "bad_words": (None, False, []),
    "allowed_token_ids": (None, False, []),
}
"""Sampling parameters that reshape the distribution, with the values that leave it alone."""


AGENTS_CHOICE = frozenset({"temperature", "sampling filter", "no usage"})
"""Checks that fail because of what the agent asked for; nothing is wrong with the capture."""


@dataclass(frozen=True)
class Failure:
    """A named check that failed, with the figures."""

    name: str
    detail: str


def version_number(label: str) -> int | None:
    """Return N for the weight version ``vN``, None for any other label."""
    match = VERSION.fullmatch(label)
    return int(match[1]) if match else None


def check_counts(
    requests: Sequence[EngineRequest],
    *,
    prompt_tokens: int | None,
    completion_tokens: int | None,
) -> tuple[Failure, ...]:
    """Compare the tap with the server's usage, which sums over all prompts and outputs.

    A count of None was not reported (streams without ``include_usage``, cancelled calls); then the
    tap's own end counts are the check (``check_output``).
    """
    failures = []
    prompts = sum(len(request.prompt_ids) for request in requests)
    outputs = sum(len(o.ids) for request in requests for o in request.outputs.values())
    if prompt_tokens is not None and prompts != prompt_tokens:
        failures.append(Failure("prompt count", f"tap {prompts}, usage {prompt_tokens}"))
    if completion_tokens is not None and outputs != completion_tokens:
        failures.append(Failure("output count", f"tap {outputs}, usage {completion_tokens}"))
    return tuple(failures)


def check_output(
    request: EngineRequest, output: EngineOutput, outcome: Outcome
) -> tuple[Failure, ...]:
    """Check one output by itself; ``outcome`` is how its HTTP exchange ended."""
    failures = [*_check_tap(request, output, outcome), *_check_logprobs(output)]
    failures += check_sampling(request.params)
    return tuple(failures)


def check_api_output(
    request: EngineRequest, output: EngineOutput, outcome: Outcome, *, counted: bool
) -> tuple[Failure, ...]:
    """Check one output of the API source; ``counted``: the server's usage says how many tokens.

    The reply itself has no second account of its tokens, so a complete one needs the usage. One
    that was cut short has no end to check.
    """
    failures = _check_logprobs(output)
    if outcome != "complete":
        return tuple(failures)
    failures = [*_check_end(request, output, outcome), *failures]
    if not counted:
        failures.append(
            Failure(
                "no usage",
                "nothing to check the token count against: the stream needs "
                "stream_options.include_usage, or vLLM --enable-force-include-usage",
            )
        )
    return tuple(failures)


def _check_tap(request: EngineRequest, output: EngineOutput, outcome: Outcome) -> list[Failure]:
    failures = _check_end(request, output, outcome)
    unknown = sorted({label for label in output.versions if version_number(label) is None})
    if unknown:
        failures.append(Failure("weight version", f"{unknown[0]!r} is not of the form vN"))
    return failures


def _check_end(request: EngineRequest, output: EngineOutput, outcome: Outcome) -> list[Failure]:
    failures = []
    if not request.prompt_ids:
        failures.append(Failure("no prompt tokens", "no prompt ids came"))
    if output.reported is None:
        failures.append(Failure("tap incomplete", "no end came"))
    elif output.reported != len(output.ids):
        failures.append(
            Failure("tap incomplete", f"{len(output.ids)} of {output.reported} tokens arrived")
        )
    expected = ("stop", "length", "abort") if outcome != "complete" else ("stop", "length")
    if output.reported is not None and output.finish not in expected:
        failures.append(Failure("finish", f"engine finished with {output.finish!r}"))
    return failures


def _check_logprobs(output: EngineOutput) -> list[Failure]:
    failures = []
    for what, count in (("logprob", len(output.logprobs)), ("version", len(output.versions))):
        if count != len(output.ids):
            failures.append(Failure(f"{what} count", f"{count} for {len(output.ids)} tokens"))
    bad = [k for k, logprob in enumerate(output.logprobs) if not math.isfinite(logprob)]
    if bad:
        failures.append(Failure("logprob not finite", f"{len(bad)} tokens, first at {bad[0]}"))
    return failures


def check_sampling(params: dict[str, Any]) -> list[Failure]:
    """Check that the trainer can reproduce the distribution the tokens were sampled from.

    It recomputes ``log_softmax(logits / temperature)``: the temperature must be known and
    positive, logprobs must be of the processed distribution, and nothing else may have reshaped it.
    """
    failures = []
    temperature = params.get("temperature")
    if (
        not isinstance(temperature, int | float)
        or isinstance(temperature, bool)
        or not 0 < temperature <= MAX_TEMPERATURE
    ):
        failures.append(
            Failure("temperature", f"{temperature!r} is not a positive number of usual size")
        )
    mode = params.get("logprobs_mode")
    if mode != "processed_logprobs":
        failures.append(Failure("logprobs mode", f"{mode!r} instead of 'processed_logprobs'"))
    missing = sorted(NEUTRAL.keys() - params.keys())
    if missing:
        failures.append(Failure("sampling parameters", f"not reported: {', '.join(missing)}"))
    shaped = [
        f"{name}={params[name]!r}"
        for name, neutral in NEUTRAL.items()
        if name in params and params[name] not in neutral
    ]
    if shaped:
        failures.append(
            Failure(
                "sampling filter",
                f"sampled under a filter the trainer can't reproduce: {', '.join(shaped)}",
            )
        )
    return failures
