"""One training step: a batch and an engine at the parent version in, metrics out."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from trainer.advantage import rollout_advantages
from trainer.batch import Batch
from trainer.config import TrainerConfig
from trainer.engine import Logprobs, padded_responses
from trainer.errors import TrainingRejected
from trainer.loss import PolicyLoss
from trainer.plan import Row, Selection, select_rows, split

Progress = Callable[[str], None]


class Trainable(Protocol):
    """What a step needs of ``trainer.engine.Engine``."""

    def logprobs(self, rows: Sequence[Row]) -> Logprobs: ...
    def forward_backward(self, rows: Sequence[Row]) -> Logprobs: ...
    def optimizer_step(self) -> float: ...
    def discard_gradient(self) -> None: ...
    def learning_rate(self) -> float: ...
    def advance_schedule(self) -> None: ...


class Step:
    """A step checked and ready to run: ``prepare`` touches no weights, ``run`` changes them."""

    def __init__(self, config: TrainerConfig, selection: Selection, batch: Batch) -> None:
        self.selection = selection
        self._config = config
        self._batch = batch
        self._loss = PolicyLoss(config)
        self._advantages = rollout_advantages(batch.rollouts, config.advantage)
        if not any(self._advantages[row.rollout] for row in selection.rows):
            raise TrainingRejected(
                "all advantages are zero: rewards don't differ inside any group, so there is "
                "nothing to learn"
            )

    @classmethod
    def prepare(cls, config: TrainerConfig, batch: Batch) -> "Step":
        """Check a batch and choose its rows.

        Raises:
            TrainingRejected: the batch can't be trained on; the reason is one line.
        """
        return cls(config, select_rows(batch, config.max_tokens_per_micro_batch), batch)

    def run(self, engine: Trainable, parent: int, progress: Progress) -> dict[str, float]:
        """Train ``engine``, which holds version ``parent``, and return the step's metrics.

        With one pass over one mini-batch the update's own forward pass gives the parent's
        log-probabilities; otherwise a pass of its own comes first, since later mini-batches meet
        changed weights.

        Raises:
            TrainingRejected: nothing was left after rejection, or a log-probability, loss or
                gradient was not finite. The engine may hold changed weights then.
        """
        started = time.monotonic()
        config = self._config
        rows = self.selection.rows
        once = config.epochs == 1 and config.mini_batches == 1
        if not once:
            progress("log-probabilities")
            old = engine.logprobs(rows)
            _check_finite(rows, old)
            rows = [replace(r, old_logprobs=p) for r, p in zip(rows, old, strict=True)]

        learning_rate = engine.learning_rate()
        losses: list[dict[str, float]] = []
        recomputed: Logprobs = []
        stepped = 0
        for epoch in range(config.epochs):
            seed = np.random.SeedSequence([config.seed, parent, epoch]).generate_state(1)[0]
            for part in split(rows, self._advantages, config.mini_batches, int(seed)):
                progress("update")
                recomputed = engine.forward_backward(part)
                _check_finite(part, recomputed)
                figures = self._figures(part, recomputed)
                if not figures["kept_tokens"]:
                    # A step on nothing would still move the weights by Adam's momentum.
                    engine.discard_gradient()
                    losses.append(figures)
                    continue
                norm = engine.optimizer_step()
                if not (np.isfinite(norm) and np.isfinite(figures["loss"])):
                    raise TrainingRejected(
                        f"loss {figures['loss']} or gradient norm {norm} is not finite"
                    )
                losses.append(figures | {"grad_norm": norm})
                stepped += 1
        if not stepped:
            raise TrainingRejected(
                "rollout correction rejected every token: the captured log-probabilities are too "
                "far from the trainer's (see rollout_rs_threshold)"
            )
        engine.advance_schedule()

        if once:
            # The one mini-batch holds all rows in their order.
            rows = [replace(r, old_logprobs=p) for r, p in zip(rows, recomputed, strict=True)]
        seconds = time.monotonic() - started
        first_pass = losses[: len(losses) // config.epochs]
        tokens = sum(len(row.token_ids) for row in rows)
        return {
            "reward_mean": float(np.mean([r.reward for r in self._batch.rollouts])),
            "rollouts": len(self._batch.rollouts),
            "samples": len(rows),
            "overlong_samples": len(self.selection.overlong),
            "tokens": tokens,
            "sampled_tokens": sum(row.tokens for row in rows),
            "rejected_tokens": sum(f["tokens"] - f["kept_tokens"] for f in first_pass),
            "advantage_abs_mean": float(np.mean(np.abs(self._advantages))),
            **agreement(rows, parent),
            "loss": _mean(losses, "loss"),
            "grad_norm": _mean(losses, "grad_norm"),
            "clip_fraction": _mean(losses, "clip_fraction"),
            "importance_weight_mean": _mean(losses, "importance_weight_mean"),
            "learning_rate": learning_rate,
            "optimizer_steps": stepped,
            "step_seconds": seconds,
            "tokens_per_second": tokens / seconds,
        }

    def _figures(self, rows: Sequence[Row], policy: Logprobs) -> dict[str, float]:
        padded = padded_responses(rows)
        log_prob = torch.zeros_like(padded["rollout_log_probs"])
        for k, values in enumerate(policy):
            log_prob[k, : len(values)] = torch.from_numpy(values)
        loss = self._loss.evaluate(log_prob, padded)
        return {
            "loss": float(loss.value),
            "tokens": float(padded["response_mask"].sum()),
            "kept_tokens": float(loss.kept.sum()),
            **loss.metrics,
        }


def agreement(rows: Sequence[Row], parent: int) -> dict[str, float]:
    """Compare captured log-probabilities with those recomputed under the parent version.

    ``logprob_abs_diff_*`` are over the tokens that this very version sampled, where the two should
    be equal up to numerics (``logprob_compared_tokens`` of them; no keys without any);
    ``logprob_abs_diff_mean_all`` and ``kl_rollout_trainer`` are over all trained tokens. The KL
    divergence KL(rollout || trainer), in nats per token, is Schulman's k3 estimator ("Approximating
    KL divergence", 2020). ``staleness_max`` is the parent's number minus the oldest token's.
    """
    masks = [row.loss_mask for row in rows]
    rollout = _trained([row.rollout_logprobs for row in rows], masks)
    versions = np.concatenate([row.versions[m] for row, m in zip(rows, masks, strict=True)])
    policy = _trained([_old(row) for row in rows], masks)
    difference = policy - rollout
    same = np.abs(difference[versions == parent])
    metrics = {
        "staleness_max": float(parent - versions.min()),
        "kl_rollout_trainer": float(np.mean(np.expm1(difference) - difference)),
        "logprob_abs_diff_mean_all": float(np.mean(np.abs(difference))),
        "logprob_compared_tokens": float(len(same)),
    }
    if len(same):
        metrics["logprob_abs_diff_mean"] = float(same.mean())
        metrics["logprob_abs_diff_max"] = float(same.max())
    return metrics


def _old(row: Row) -> npt.NDArray[np.float32]:
    assert row.old_logprobs is not None
    return row.old_logprobs


def _trained(
    values: Sequence[npt.NDArray[np.float32]], masks: Sequence[npt.NDArray[np.bool_]]
) -> npt.NDArray[np.float64]:
    kept = [v[m] for v, m in zip(values, masks, strict=True)]
    return np.concatenate(kept).astype(np.float64)


def _check_finite(rows: Sequence[Row], logprobs: Logprobs) -> None:
    for row, values in zip(rows, logprobs, strict=True):
        if not np.isfinite(values[row.loss_mask]).all():
            raise TrainingRejected(
                f"sample {row.sample_id}: the model gives a log-probability that is not finite"
            )


def _mean(figures: Sequence[dict[str, float]], key: str) -> float:
    found = [f[key] for f in figures if key in f]
    return float(np.mean(found)) if found else 0.0
