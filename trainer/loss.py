"""The policy loss that the workers minimise and the trainer reports."""

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.padding import no_padding_2_padding

from trainer.config import TrainerConfig
from trainer.correction import correct

FIELDS = ("response_mask", "advantages", "rollout_log_probs")


@dataclass(frozen=True)
class Loss:
    """Value of the loss over some rows. ``kept`` marks the tokens correction did not reject."""

    value: torch.Tensor
    kept: torch.Tensor
    metrics: dict[str, float]


@dataclass(frozen=True)
class PolicyLoss:
    """One of verl's policy losses with rollout correction, summed over pre-scaled tokens.

    Picklable: verl sends it to its workers and calls it for each micro-batch.

    The policy before the update is ``old_log_probs``. A step that visits each token once leaves it
    out: then the forward pass of the update itself gives these values, and no separate one is
    needed.
    """

    config: TrainerConfig

    def __call__(
        self, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """verl's loss interface: jagged micro-batch in, scalar with gradient and metrics out."""
        log_prob = no_padding_2_padding(model_output["log_probs"], data)
        fields = [*FIELDS, *(f for f in ("old_log_probs",) if f in data)]
        padded = data.select(*fields).to_padded_tensor()
        loss = self.evaluate(log_prob, padded, workers=data["dp_size"])
        return loss.value, {}

    def evaluate(self, log_prob: torch.Tensor, padded: TensorDict, workers: int = 1) -> Loss:
        """Compute the loss of padded rows.

        Args:
            log_prob: log-probabilities under the policy being trained, float32 (rows, tokens).
            padded: ``response_mask``, ``advantages`` (already multiplied by the token weights),
                ``rollout_log_probs`` and perhaps ``old_log_probs``, all (rows, tokens).
            workers: data-parallel workers that the rows are a part for; FSDP averages gradients
                over them, so a worker's sum is multiplied by their number.
        """
        mask = padded["response_mask"].bool()
        old = padded.get("old_log_probs", None)
        old = log_prob.detach() if old is None else old
        weights, kept = correct(old, padded["rollout_log_probs"], mask, self.config)
        if not kept.any():
            return Loss((log_prob * 0.0).sum(), kept, {})
        actor = self._actor_config()
        actor.global_batch_info.update(dp_size=workers)
        value, metrics = get_policy_loss_fn(self.config.loss)(
            old_log_prob=old,
            log_prob=log_prob,
            advantages=padded["advantages"],
            response_mask=kept,
            loss_agg_mode="token-sum",
            config=actor,
            rollout_is_weights=weights,
        )
        metrics = {"clip_fraction": float(metrics["actor/pg_clipfrac"])}
        if weights is not None:
            metrics["importance_weight_mean"] = float(weights[kept].mean())
        return Loss(value, kept, metrics)

    def _actor_config(self) -> FSDPActorConfig:
        config = self.config
        return FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=1,
            use_dynamic_bsz=True,
            policy_loss=PolicyLossConfig(loss_mode=config.loss),
            loss_agg_mode="token-sum",
            clip_ratio_low=config.clip_ratio_low,
            clip_ratio_high=config.clip_ratio_high,
            clip_ratio_c=config.dual_clip,
        )
