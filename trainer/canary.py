"""The canary: a fixed text whose log-probabilities tell one version of the weights from another."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deploy.errors import UserError
from trainer.batch import Canary
from trainer.plan import Row

LENGTH = 48
TEXT = (
    "A canary is a small bird that miners took underground: it noticed bad air before they did. "
    "In software, a canary is a small test that runs first. 1 + 1 = 2, and 12 * 12 = 144; the "
    'quick brown fox jumps over the lazy dog. {"name": "canary", "alive": true}\n'
    "def check(x):\n    return x is not None\n"
)


class Scorer(Protocol):
    def logprobs(self, rows: Sequence[Row]) -> list[npt.NDArray[np.float32]]: ...


def canary_tokens(model: Path) -> list[int]:
    """Return the first tokens of the canary text under the model's tokenizer, without specials.

    Raises:
        UserError: the folder's tokenizer can't be used.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    except Exception as error:
        raise UserError(f"the tokenizer in {model} can't be used: {error}") from None
    if len(ids) < 2:
        raise UserError(f"the tokenizer in {model} makes no tokens from plain text")
    return [int(token) for token in ids[:LENGTH]]


def score(engine: Scorer, token_ids: list[int]) -> Canary:
    """Return the canary with its log-probabilities under the engine's present weights."""
    length = len(token_ids) - 1
    row = Row(
        sample_id="canary",
        rollout=0,
        token_ids=np.asarray(token_ids, dtype=np.int64),
        prompt_length=1,
        loss_mask=np.ones(length, dtype=np.bool_),
        rollout_logprobs=np.zeros(length, dtype=np.float32),
        versions=np.zeros(length, dtype=np.int32),
        temperature=1.0,
        advantages=np.zeros(length, dtype=np.float32),
    )
    return Canary(token_ids, [float(p) for p in engine.logprobs([row])[0]])
