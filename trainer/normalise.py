"""How much each token counts in the loss.

The loss of a mini-batch is the mean over its rollouts of the mean over each rollout's sampled
tokens: a rollout counts once, however many samples it split into and however long it is, and the
weights of a mini-batch sum to 1. Folding the weights into the advantages makes verl's ``token-sum``
aggregation compute exactly that, on any number of workers and micro-batches.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def token_weights(
    rollout_of_sample: Sequence[int], tokens_of_sample: Sequence[int]
) -> npt.NDArray[np.float64]:
    """Return the weight of each token of each sample: 1 / (rollouts x tokens of the rollout).

    Args:
        rollout_of_sample: the rollout each sample belongs to.
        tokens_of_sample: the number of trained tokens of each sample, all positive.

    Returns:
        float64 of shape (samples,). ``sum(weight * tokens_of_sample) == 1``.
    """
    owners = np.asarray(rollout_of_sample)
    counts = np.asarray(tokens_of_sample, dtype=np.float64)
    rollouts, position = np.unique(owners, return_inverse=True)
    totals = np.bincount(position, weights=counts)
    return 1.0 / (len(rollouts) * totals[position])
