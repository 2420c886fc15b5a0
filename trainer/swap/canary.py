"""The canary: does the engine, right after a swap, compute what the trainer computes?

A weight transfer can succeed and still leave the engine wrong (a tied head that stays old, a layer
skipped by a name mapping). Only the engine's own log-probs show it.
"""

import math
from dataclasses import dataclass
from typing import Any

from trainer.batch import Canary


@dataclass(frozen=True)
class CanaryDifference:
    """Absolute differences between trainer and engine log-probs, in nats."""

    mean: float
    max: float

    def within(self, tolerance: float) -> bool:
        """Whether the mean is at most ``tolerance``; a NaN never is."""
        return self.mean <= tolerance


def request(canary: Canary, model: str) -> dict[str, Any]:
    """Return the ``/v1/completions`` body that makes the engine score the canary's tokens.

    Prompt log-probs are at temperature 1 and are never served from the prefix cache.
    """
    return {
        "model": model,
        "prompt": canary.token_ids,
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
    }


def compare(canary: Canary, reply: dict[str, Any]) -> CanaryDifference:
    """Compare the engine's reply to ``request`` with the trainer's log-probs.

    Raises:
        ValueError: the reply does not hold one log-prob per token.
    """
    try:
        positions = reply["choices"][0]["prompt_logprobs"][1:]
        served = [
            position[str(token)]["logprob"]
            for position, token in zip(positions, canary.token_ids[1:], strict=True)
        ]
        differences = [
            abs(engine - trainer) for engine, trainer in zip(served, canary.logprobs, strict=True)
        ]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"no log-probs for the canary's tokens: {error!r}") from error
    if any(map(math.isnan, differences)):
        return CanaryDifference(math.nan, math.nan)
    return CanaryDifference(sum(differences) / len(differences), max(differences))
