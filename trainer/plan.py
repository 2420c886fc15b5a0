"""From a batch to the rows that a step computes: pure, before any model is touched."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tokenization.sample import Sample
from trainer.batch import Batch
from trainer.errors import TrainingRejected
from trainer.normalise import token_weights


@dataclass(frozen=True)
class Row:
    """One sample as the model sees it: ``prompt_length`` tokens of context, then the response.

    The response begins with the first trained token and ends with the last one: what follows could
    not influence them. With R the length of the response:

    * ``token_ids`` int64 (prompt_length + R,)
    * ``loss_mask`` bool (R,), ``versions`` int32 (R,)
    * ``rollout_logprobs`` float32 (R,): captured ones, 0 where the mask is False
    * ``advantages`` float32 (R,): the rollout's advantage times the token weight, 0 likewise
    * ``old_logprobs`` float32 (R,): the policy before the step, where the step needs it
    """

    sample_id: str
    rollout: int
    token_ids: npt.NDArray[np.int64]
    prompt_length: int
    loss_mask: npt.NDArray[np.bool_]
    rollout_logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    temperature: float
    advantages: npt.NDArray[np.float32]
    old_logprobs: npt.NDArray[np.float32] | None = None

    @property
    def tokens(self) -> int:
        """The number of trained tokens."""
        return int(self.loss_mask.sum())

    def masked(self) -> "Row":
        """Return the row with nothing to train: it fills up a worker's share."""
        nothing = np.zeros_like(self.loss_mask)
        return replace(self, loss_mask=nothing, advantages=np.zeros_like(self.advantages))


@dataclass(frozen=True)
class Selection:
    """The rows to train and the ids of the samples that are too long for a micro-batch."""

    rows: list[Row]
    overlong: list[str]


def select_rows(batch: Batch, max_tokens: int) -> Selection:
    """Turn the batch's samples into rows, with advantages still zero.

    Samples without a trained token are left out silently, those longer than ``max_tokens`` are
    named in the result.

    Raises:
        TrainingRejected: the batch contradicts itself, or nothing is left to train.
    """
    index = {rollout.run: k for k, rollout in enumerate(batch.rollouts)}
    if len(index) != len(batch.rollouts):
        raise TrainingRejected("a run appears twice among the batch's rollouts")
    for rollout in batch.rollouts:
        if not math.isfinite(rollout.reward):
            raise TrainingRejected(f"run {rollout.run}: reward {rollout.reward} is not finite")
    rows: list[Row] = []
    overlong: list[str] = []
    for sample in batch.samples:
        if sample.run not in index:
            raise TrainingRejected(
                f"sample {sample.sample_id}: its run {sample.run} has no rollout in the batch"
            )
        if not sample.loss_mask.any():
            continue
        row = _row(sample, index[sample.run])
        if len(row.token_ids) > max_tokens:
            overlong.append(sample.sample_id)
        else:
            rows.append(row)
    if not rows:
        reason = (
            f"all samples are longer than max_tokens_per_micro_batch = {max_tokens}: raise it"
            if overlong
            else "no sample has a token to train on"
        )
        raise TrainingRejected(reason)
    return Selection(rows, overlong)


def _row(sample: Sample, rollout: int) -> Row:
    trained = np.flatnonzero(sample.loss_mask)
    first, end = int(trained[0]), int(trained[-1]) + 1
    if first == 0:
        raise TrainingRejected(
            f"sample {sample.sample_id}: its first token is marked as sampled, but no context "
            "precedes it"
        )
    if not (math.isfinite(sample.temperature) and sample.temperature > 0):
        raise TrainingRejected(
            f"sample {sample.sample_id}: temperature {sample.temperature} has no log-probabilities "
            "to train with"
        )
    mask = np.asarray(sample.loss_mask[first:end], dtype=np.bool_)
    logprobs = np.asarray(sample.logprobs[first:end], dtype=np.float32)
    if not np.isfinite(logprobs[mask]).all():
        raise TrainingRejected(f"sample {sample.sample_id}: a captured log-probability is missing")
    return Row(
        sample_id=sample.sample_id,
        rollout=rollout,
        token_ids=sample.token_ids[:end].astype(np.int64),
        prompt_length=first,
        loss_mask=mask,
        rollout_logprobs=np.where(mask, logprobs, np.float32(0)),
        versions=sample.versions[first:end],
        temperature=sample.temperature,
        advantages=np.zeros(end - first, dtype=np.float32),
    )


def split(
    rows: Sequence[Row], advantages: npt.NDArray[np.float32], parts: int, seed: int
) -> list[list[Row]]:
    """Divide the rows into mini-batches, all samples of a rollout in one, and weigh their tokens.

    Args:
        rows: rows of the step.
        advantages: float32, advantage of each rollout, indexed by ``Row.rollout``.
        parts: mini-batches; fewer come back when there are fewer rollouts.
        seed: order of the rollouts.

    Returns:
        Mini-batches of rows with ``advantages`` filled in; the token weights of each sum to 1.
    """
    rollouts = np.unique([row.rollout for row in rows])
    if parts > 1:
        rollouts = np.random.default_rng(seed).permutation(rollouts)
    batches = []
    for part in np.array_split(rollouts, min(parts, len(rollouts))):
        mine = [row for row in rows if row.rollout in set(part.tolist())]
        weights = token_weights([row.rollout for row in mine], [row.tokens for row in mine])
        batches.append(
            [
                replace(
                    row,
                    advantages=np.where(
                        row.loss_mask, np.float32(advantages[row.rollout] * weight), np.float32(0)
                    ),
                )
                for row, weight in zip(mine, weights, strict=True)
            ]
        )
    return batches
