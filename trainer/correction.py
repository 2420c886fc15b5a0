"""Rollout correction: training on tokens that a slightly different policy sampled.

The captured log-probabilities are those of the policy that really sampled (the serving engine's
kernels and precision, possibly an older version); the recomputed ones are those of the policy being
trained. Truncated importance sampling reweights by their ratio (Yao et al. 2025, "Your efficient RL
framework secretly brings you off-policy RL training"); rejection drops what has drifted too far.
Both are verl's ``rollout_corr_helper``.
"""

import torch
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

from trainer.config import TrainerConfig


def correct(
    policy: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, config: TrainerConfig
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return importance weights and the mask without rejected tokens.

    Args:
        policy: recomputed log-probabilities, float32 (rows, tokens), without gradient.
        rollout: captured log-probabilities, same shape; finite where ``mask`` is True.
        mask: bool, same shape: the tokens to train on. Rows of only False are allowed.

    Returns:
        Weights, float32 (rows, tokens), 0 outside the mask, or None with ``rollout_is = "off"``;
        and the bool mask of the tokens that are left.
    """
    if not mask.any():
        return None, mask
    weights, kept, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=policy,
        rollout_log_prob=rollout,
        response_mask=mask.to(policy.dtype),
        rollout_is=None if config.rollout_is == "off" else config.rollout_is,
        rollout_is_threshold=config.rollout_is_threshold,
        rollout_rs=None if config.rollout_rs == "off" else config.rollout_rs,
        rollout_rs_threshold=config.rollout_rs_threshold,
    )
    return None if weights is None else weights.batch["rollout_is_weights"], kept.bool()
