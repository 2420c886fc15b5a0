"""The ``[trainer]`` section of the configuration."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class TrainerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the served model is trained."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="Where to train; auto takes a GPU when there is one."),
    ] = "auto"
    workers: Annotated[
        int,
        Meta(
            description="Training processes, one per GPU; 1 trains inside the trainer process, "
            "more start verl workers on a local Ray.",
            ge=1,
        ),
    ] = 1
    threads: Annotated[
        int, Meta(description="CPU threads of each worker; 0 shares all cores among them.", ge=0)
    ] = 0
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Meta(
            description="Precision of the forward and backward pass; auto is float32 on a CPU "
            "and bfloat16 on a GPU. Weights and optimizer are always float32."
        ),
    ] = "auto"
    export_dtype: Annotated[
        Literal["float32", "bfloat16"],
        Meta(description="Precision of the published weight files."),
    ] = "float32"
    attention: Annotated[
        Literal["sdpa", "eager", "flash_attention_2"],
        Meta(
            description="Attention implementation; flash_attention_2 needs the flash-attn package."
        ),
    ] = "sdpa"
    packing: Annotated[
        bool,
        Meta(
            description="Pack the samples of a micro-batch into one sequence and compute the "
            "output layer for trained tokens only; otherwise pad them."
        ),
    ] = True
    gradient_checkpointing: Annotated[
        bool,
        Meta(description="Recompute activations in the backward pass: less memory, more time."),
    ] = False
    max_tokens_per_micro_batch: Annotated[
        int,
        Meta(
            description="Tokens per forward and backward pass of one worker; bounds memory. "
            "Without flash_attention_2, attention costs grow with it: keep it near the longest "
            "sample. A longer sample is left out and reported.",
            ge=1,
        ),
    ] = 4096
    learning_rate: Annotated[float, Meta(description="Peak learning rate of AdamW.", gt=0)] = 1e-6
    schedule: Annotated[
        Literal["constant", "cosine"],
        Meta(description="Learning rate after the warm-up; cosine needs total_steps."),
    ] = "constant"
    warmup_steps: Annotated[
        int, Meta(description="Steps over which the learning rate rises linearly from zero.", ge=0)
    ] = 0
    total_steps: Annotated[
        int, Meta(description="Step at which the cosine schedule reaches its minimum.", ge=0)
    ] = 0
    min_learning_rate_ratio: Annotated[
        float,
        Meta(description="Minimum of the cosine schedule as a part of learning_rate.", ge=0, le=1),
    ] = 0.0
    weight_decay: Annotated[float, Meta(description="Weight decay of AdamW.", ge=0)] = 0.0
    adam_beta1: Annotated[float, Meta(description="First-moment decay of AdamW.", ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Meta(description="Second-moment decay of AdamW.", ge=0, lt=1)] = (
        0.999
    )
    clip_grad: Annotated[float, Meta(description="Largest gradient norm.", gt=0)] = 1.0
    advantage: Annotated[
        Literal["grpo", "dr_grpo", "rloo"],
        Meta(
            description="Advantage inside a group: grpo divides by the group's standard deviation, "
            "dr_grpo does not, rloo compares with the mean of the others. Rollouts "
            "without a group are whitened among themselves."
        ),
    ] = "grpo"
    loss: Annotated[
        Literal["vanilla", "cispo", "gspo"],
        Meta(description="Policy loss: PPO's clipped loss, CISPO or GSPO."),
    ] = "vanilla"
    clip_ratio_low: Annotated[
        float, Meta(description="The policy ratio is clipped below 1 minus this.", gt=0, le=1)
    ] = 0.2
    clip_ratio_high: Annotated[
        float, Meta(description="The policy ratio is clipped above 1 plus this.", gt=0)
    ] = 0.2
    dual_clip: Annotated[
        float,
        Meta(description="Bound on the ratio for negative advantages (loss vanilla).", gt=1),
    ] = 3.0
    epochs: Annotated[int, Meta(description="Passes over a batch in one step.", ge=1)] = 1
    mini_batches: Annotated[
        int,
        Meta(
            description="Optimizer steps per pass; each takes an equal part of the rollouts.", ge=1
        ),
    ] = 1
    rollout_is: Annotated[
        Literal["off", "token", "sequence"],
        Meta(
            description="Truncated importance sampling against the captured log-probabilities, "
            "per token or per sample."
        ),
    ] = "token"
    rollout_is_threshold: Annotated[
        float, Meta(description="Upper bound of the importance weights.", gt=0)
    ] = 2.0
    rollout_rs: Annotated[
        Literal["off", "token_k2", "token_k3", "seq_mean_k2", "seq_mean_k3", "seq_max_k3"],
        Meta(
            description="Rejection of tokens or whole samples whose divergence from the captured "
            "log-probabilities exceeds rollout_rs_threshold."
        ),
    ] = "off"
    rollout_rs_threshold: Annotated[
        float, Meta(description="Largest divergence that is still trained on.", gt=0)
    ] = 0.01
    seed: Annotated[int, Meta(description="Seed of the order of mini-batches.", ge=0)] = 0
    keep_versions: Annotated[
        int, Meta(description="Weight versions kept on disk for rollback.", ge=2)
    ] = 5
    keep_checkpoints: Annotated[
        int,
        Meta(
            description="Checkpoints (weights, optimizer, schedule) kept; training can go on from "
            "any of them.",
            ge=1,
        ),
    ] = 2

    def __post_init__(self) -> None:
        """Raises ValueError (a msgspec.ValidationError when decoding) for keys that contradict."""
        if self.schedule == "cosine" and self.total_steps <= self.warmup_steps:
            raise ValueError("schedule = cosine needs total_steps above warmup_steps")
        if self.keep_checkpoints > self.keep_versions:
            raise ValueError("keep_checkpoints can't be above keep_versions")
