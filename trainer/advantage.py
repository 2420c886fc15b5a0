"""Advantages of rollouts from their rewards: one value for each rollout.

A rollout may have split into several samples (compaction, sub-agents, side calls); its advantage is
a property of the rollout, so it is computed before, and apart from, any splitting.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from trainer.batch import Rollout

Method = Literal["grpo", "dr_grpo", "rloo"]


def rollout_advantages(rollouts: Sequence[Rollout], method: Method) -> npt.NDArray[np.float32]:
    """Return the advantage of each rollout, float32 of shape (len(rollouts),).

    Rollouts of a group are compared with each other, whatever the group's size:

    * ``grpo``: (reward - mean) / (standard deviation + 1e-6), Shao et al. 2024, arXiv:2402.03300
    * ``dr_grpo``: reward - mean, Liu et al. 2025, arXiv:2503.20783
    * ``rloo``: reward - mean of the others, Ahmadian et al. 2024, arXiv:2402.14740

    Rollouts without a group, or alone in theirs, have nothing to be compared with but each other:
    their rewards are whitened over the batch as in REINFORCE++, Hu 2025, arXiv:2501.03262. A single
    such rollout has advantage 0.

    The estimators are verl's, on inputs of one reward for each rollout.
    """
    sizes: dict[str, int] = {}
    for rollout in rollouts:
        if rollout.group is not None:
            sizes[rollout.group] = sizes.get(rollout.group, 0) + 1
    grouped = [k for k, r in enumerate(rollouts) if r.group is not None and sizes[r.group] > 1]
    alone = [k for k, r in enumerate(rollouts) if r.group is None or sizes[r.group] == 1]

    advantages = np.zeros(len(rollouts), dtype=np.float32)
    if grouped:
        estimator = get_adv_estimator_fn("rloo" if method == "rloo" else "grpo")
        options = {} if method == "rloo" else {"norm_adv_by_std_in_grpo": method == "grpo"}
        rewards = _column(rollouts, grouped)
        values, _ = estimator(
            token_level_rewards=rewards,
            response_mask=torch.ones_like(rewards),
            index=np.array([rollouts[k].group for k in grouped], dtype=object),
            **options,
        )
        advantages[grouped] = values[:, 0].numpy()
    if len(alone) > 1:
        estimator = get_adv_estimator_fn("reinforce_plus_plus")
        rewards = _column(rollouts, alone)
        values, _ = estimator(
            token_level_rewards=rewards,
            response_mask=torch.ones_like(rewards),
            config=SimpleNamespace(gamma=1.0),
        )
        advantages[alone] = values[:, 0].numpy()
    return advantages


def _column(rollouts: Sequence[Rollout], which: list[int]) -> torch.Tensor:
    return torch.tensor([[rollouts[k].reward] for k in which], dtype=torch.float32)
