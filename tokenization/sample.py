"""A training sample: one token sequence with what was sampled in it marked.

Produced by ``tokenization.tree`` from a run's calls, consumed by ``trainer``. A sample is a view:
it can always be rebuilt from trace shards.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Sample:
    """One root-to-leaf path of a run's call tree.

    Arrays all have length T, the number of tokens of the path:

    * ``token_ids`` int32: prompt of the first call, its output, what the harness added, …
    * ``loss_mask`` bool: True on the tokens this sample trains. Every sampled token of a run is
      True in exactly one of the run's samples.
    * ``logprobs`` float32, natural log, as captured while sampling; NaN where ``loss_mask`` is
      False. Never padded.
    * ``versions`` int32: the number N of the weight version ``vN`` that sampled the token; -1
      where ``loss_mask`` is False.
    """

    sample_id: str
    """``<run>/<k>``."""
    run: str
    calls: tuple[str, ...]
    """Ids of the calls on the path."""
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    temperature: float

    def __post_init__(self) -> None:
        lengths = {len(a) for a in (self.token_ids, self.loss_mask, self.logprobs, self.versions)}
        if len(lengths) != 1:
            raise ValueError(f"sample {self.sample_id}: arrays differ in length: {sorted(lengths)}")
