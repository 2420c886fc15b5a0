"""Reads the tokens that a stock vLLM gave through its API (``sidecar.tokens.apitokens``).

They are the engine's own ids and log-probs, but the reply does not tell everything that the token
tap does: neither the weight version of a token, nor which log-probs they are (before or after the
temperature), nor the defaults that the server filled in for parameters the request left open.
"""

import math
from typing import Annotated, Any

import msgspec

from tokenization.tap.wire import UNKNOWN_VERSION, EngineOutput, EngineRequest

UNKNOWN_MODE = "unknown"

# vLLM writes this for minus infinity and where it has no log-prob.
_NO_LOGPROB = -9999.0
_FINISH = {"tool_calls": "stop", "function_call": "stop"}


class ApiTokensError(ValueError):
    """The lines of a call contradict each other or can't be read."""


_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Logprob = Annotated[float, msgspec.Meta(ge=-3e38, le=1e-3)]


class _Token(msgspec.Struct):
    logprob: _Logprob | None = _NO_LOGPROB


class _Logprobs(msgspec.Struct):
    """Of chat completions (``content``) or of legacy completions."""

    content: list[_Token] | None = None
    token_logprobs: list[_Logprob | None] | None = None

    def values(self) -> list[float | None]:
        if self.content is not None:
            return [token.logprob for token in self.content]
        return self.token_logprobs or []


class _Choice(msgspec.Struct):
    index: _Count
    finish_reason: str | None = None
    prompt_token_ids: list[_Count] | None = None
    token_ids: list[_Count] | None = None
    logprobs: _Logprobs | None = None


class _Event(msgspec.Struct):
    """One line: an event of a stream, or a whole reply."""

    id: str = ""
    prompt_token_ids: list[_Count] | None = None
    choices: list[_Choice] = []
    error: str | None = None


_decoder = msgspec.json.Decoder(_Event)


def decode(lines: list[str], asked: dict[str, Any]) -> list[EngineRequest]:
    """Put the lines of one call together; ``asked`` is the request's body.

    Several prompts of one completions call become several requests, as the engine sees them. Log-
    probs that are missing or infinite become NaN. ``reported`` counts what came when a finish
    reason says that it is all. ``params`` has what the request itself says.

    Raises:
        ApiTokensError: a line is not of the right shape, a prompt differs from event to event, or
            the sidecar could not read all of the reply.
    """
    choices = asked.get("n") if isinstance(asked.get("n"), int) else 1
    requests: dict[int, EngineRequest] = {}
    for text in lines:
        event = _event(text)
        for choice in event.choices:
            number, index = divmod(choice.index, max(1, choices or 1))
            request = requests.get(number)
            if request is None:
                request = EngineRequest(number, event.id, [], _params(asked))
                requests[number] = request
            _take_prompt(request, choice.prompt_token_ids or event.prompt_token_ids)
            _take(request.outputs.setdefault(index, EngineOutput(index)), choice)
    return [requests[number] for number in sorted(requests)]


def _event(text: str) -> _Event:
    try:
        event = _decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ApiTokensError(f"unreadable line {text[:80]!r}: {error}") from error
    if event.error is not None:
        raise ApiTokensError(event.error)
    return event


def _take_prompt(request: EngineRequest, ids: list[int] | None) -> None:
    if not ids:
        return
    if request.prompt_ids and request.prompt_ids != ids:
        raise ApiTokensError(f"two different prompts of request {request.index}")
    request.prompt_ids = ids


def _take(output: EngineOutput, choice: _Choice) -> None:
    ids = choice.token_ids or []
    output.ids += ids
    output.versions += [UNKNOWN_VERSION] * len(ids)
    output.logprobs += map(_logprob, choice.logprobs.values() if choice.logprobs else [])
    if choice.finish_reason is not None:
        output.finish = _FINISH.get(choice.finish_reason, choice.finish_reason)
        output.reported = len(output.ids)


def _logprob(value: float | None) -> float:
    return math.nan if value is None or value <= _NO_LOGPROB else value


def _params(asked: dict[str, Any]) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens")
    said = {name: asked[name] for name in names if asked.get(name) is not None}
    return said | {"logprobs_mode": UNKNOWN_MODE}
