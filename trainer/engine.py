"""One interface over verl's training worker, inside this process or spread over Ray.

Importing this module imports verl, which decides on its platform at once: call
``trainer.device.prepare`` first.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)

from trainer.config import TrainerConfig
from trainer.device import Device
from trainer.loss import FIELDS, PolicyLoss
from trainer.plan import Row
from trainer.worker import Worker, WorkerConfig

Logprobs = list[npt.NDArray[np.float32]]


class _Workers(Protocol):
    """All workers as one."""

    def everywhere(self, method: str, *arguments: Any) -> Any:
        """Call on every worker and return rank 0's result."""

    def spread(self, method: str, data: TensorDict) -> TensorDict:
        """Give each worker its part of the rows and return the results put together."""

    def close(self) -> None: ...


class _InProcess:
    def __init__(self, config: WorkerConfig) -> None:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        self._worker = Worker(config)

    def everywhere(self, method: str, *arguments: Any) -> Any:
        return getattr(self._worker, method)(*arguments)

    def spread(self, method: str, data: TensorDict) -> TensorDict:
        return getattr(self._worker, method)(data)

    def close(self) -> None:
        torch.distributed.destroy_process_group()


class _OnRay:
    def __init__(self, config: WorkerConfig, count: int, device: Device) -> None:
        import ray
        from verl.single_controller.ray import (
            RayClassWithInitArgs,
            RayResourcePool,
            RayWorkerGroup,
        )

        inherited = (
            "GLOO_SOCKET_IFNAME",
            "OMP_WAIT_POLICY",
            "VERL_LOGGING_LEVEL",
            "VERL_PLATFORM",
            "VERL_USE_EXTERNAL_MODULES",
        )
        environment = {k: os.environ[k] for k in inherited if k in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(
            p for p in (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")) if p
        )
        ray.init(
            num_cpus=max(count, os.cpu_count() or 1),
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            runtime_env={"env_vars": environment},
        )
        self._ray = ray
        pool = RayResourcePool(
            process_on_nodes=[count], use_gpu=device.name == "cuda", max_colocate_count=1
        )
        self._group = RayWorkerGroup(
            resource_pool=pool,
            ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(Worker), config=config),
            device_name=device.name,
        )

    def everywhere(self, method: str, *arguments: Any) -> Any:
        results = getattr(self._group, method)(*arguments)
        return results[0] if isinstance(results, list) else results

    def spread(self, method: str, data: TensorDict) -> TensorDict:
        return getattr(self._group, method)(data).get()

    def close(self) -> None:
        self._ray.shutdown()


class Engine:
    """A model in training: log-probabilities, gradients, optimizer steps, checkpoints, export."""

    def __init__(self, config: TrainerConfig, model: Path, device: Device) -> None:
        """Load ``model`` (a Hugging Face folder) onto the workers."""
        self._workers_count = config.workers
        worker = WorkerConfig(
            verl=_verl_config(config, model, device), threads=device.threads, seed=config.seed
        )
        self._workers: _Workers = (
            _InProcess(worker) if config.workers == 1 else _OnRay(worker, config.workers, device)
        )
        self._workers.everywhere("reset")
        self._workers.everywhere("set_loss_fn", PolicyLoss(config))

    def logprobs(self, rows: Sequence[Row]) -> Logprobs:
        """Return the model's log-probabilities of each row's response, float32 (R,).

        They are at the row's temperature.
        """
        return self._forward("infer_batch", rows, compute_loss=False)

    def forward_backward(self, rows: Sequence[Row]) -> Logprobs:
        """Add the gradient of the policy loss over ``rows`` and return as ``logprobs`` does."""
        return self._forward("forward_backward", rows, global_batch_size=len(rows))

    def optimizer_step(self) -> float:
        """Step the optimizer, clear the gradient and return its norm before clipping.

        A gradient that is not finite changes nothing; its norm says so.
        """
        return float(self._workers.everywhere("optimizer_step")["grad_norm"])

    def discard_gradient(self) -> None:
        self._workers.everywhere("optimizer_zero_grad")

    def learning_rate(self) -> float:
        """Return the rate of the next optimizer step."""
        return self._workers.everywhere("learning_rate")

    def advance_schedule(self) -> None:
        self._workers.everywhere("advance_schedule")

    def export(self, directory: Path, dtype: str) -> None:
        """Write the weights into an existing folder; see ``Worker.export_weights``."""
        self._workers.everywhere("export_weights", str(directory), dtype)

    def save(self, directory: Path) -> None:
        """Write weights, optimizer, schedule and random state for an exact continuation."""
        self._workers.everywhere("save_checkpoint", str(directory))

    def load(self, directory: Path) -> None:
        """Take back what ``save`` wrote, with the same number of workers."""
        self._workers.everywhere("load_checkpoint", str(directory))

    def close(self) -> None:
        self._workers.close()

    def _forward(self, method: str, rows: Sequence[Row], **settings: Any) -> Logprobs:
        order, placed = _share_out(rows, self._workers_count)
        data = to_tensordict(placed)
        tensordict_utils.assign_non_tensor(data, calculate_entropy=False, **settings)
        output = self._workers.spread(method, data)["log_probs"]
        found = _responses(output, placed)
        restored: Logprobs = [found[0]] * len(rows)
        for position, k in enumerate(order):
            if k < len(rows):
                restored[k] = found[position]
        return restored


def _share_out(rows: Sequence[Row], workers: int) -> tuple[list[int], list[Row]]:
    """Order rows so that equal parts in a row carry about equal numbers of tokens.

    verl cuts a batch into as many equal parts as there are workers. Rows with nothing to train,
    numbered ``len(rows)`` and up, fill up the last part.
    """
    if workers == 1:
        return list(range(len(rows))), list(rows)
    shortest = min(rows, key=lambda row: len(row.token_ids))
    filled = list(rows) + [shortest.masked()] * (-len(rows) % workers)
    lengths = [len(row.token_ids) for row in filled]
    parts = get_seqlen_balanced_partitions(lengths, k_partitions=workers, equal_size=True)
    order = [k for part in parts for k in part]
    return order, [filled[k] for k in order]


def to_tensordict(rows: Sequence[Row]) -> TensorDict:
    """Pack rows as verl's engines take them: jagged tensors, one temperature for each row."""
    columns: dict[str, torch.Tensor] = {
        "input_ids": _jagged([row.token_ids for row in rows]),
        "position_ids": _jagged([np.arange(len(row.token_ids)) for row in rows]),
        "prompts": _jagged([row.token_ids[: row.prompt_length] for row in rows]),
        "responses": _jagged([row.token_ids[row.prompt_length :] for row in rows]),
        "response_mask": _jagged([row.loss_mask.astype(np.int64) for row in rows]),
        "loss_mask": _jagged([row.loss_mask.astype(np.int64) for row in rows]),
        "advantages": _jagged([row.advantages for row in rows]),
        "rollout_log_probs": _jagged([row.rollout_logprobs for row in rows]),
    }
    old = [row.old_logprobs for row in rows if row.old_logprobs is not None]
    if old:
        columns["old_log_probs"] = _jagged(old)
    temperatures = {row.temperature for row in rows}
    if len(temperatures) == 1:
        # A plain number lets verl skip the scaling at temperature 1.
        return tensordict_utils.get_tensordict(columns, {"temperature": temperatures.pop()})
    columns["temperature"] = torch.tensor([row.temperature for row in rows], dtype=torch.float32)
    return tensordict_utils.get_tensordict(columns, {})


def padded_responses(rows: Sequence[Row]) -> TensorDict:
    """Return the loss's inputs of the rows as padded tensors (rows, longest response)."""
    data = to_tensordict(rows)
    return data.select(*FIELDS, *(f for f in ("old_log_probs",) if f in data)).to_padded_tensor()


def _jagged(arrays: Sequence[npt.NDArray[Any]]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(
        [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays], layout=torch.jagged
    )


def _responses(output: torch.Tensor, rows: Sequence[Row]) -> Logprobs:
    """Cut the responses out of verl's output, whose position t scores token t + 1."""
    values = output.values().float().numpy()
    ends = output.offsets()[1:].tolist()
    return [
        values[end - len(row.loss_mask) - 1 : end - 1].copy()
        for end, row in zip(ends, rows, strict=True)
    ]


def _verl_config(config: TrainerConfig, model: Path, device: Device) -> TrainingWorkerConfig:
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=str(model),
            load_tokenizer=False,
            use_remove_padding=config.packing,
            enable_gradient_checkpointing=config.gradient_checkpointing,
            override_config={"attn_implementation": config.attention},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            # Unset, verl computes in bfloat16.
            mixed_precision={
                "param_dtype": device.dtype,
                "reduce_dtype": "float32",
                "buffer_dtype": "float32",
            },
            # Resharding frees memory only where others hold the rest of the shards.
            reshard_after_forward=config.workers > 1,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=config.max_tokens_per_micro_batch,
            infer_max_token_len_per_gpu=config.max_tokens_per_micro_batch,
            seed=config.seed,
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            betas=(config.adam_beta1, config.adam_beta2),
            clip_grad=config.clip_grad,
            lr_scheduler_type=config.schedule,
            lr_warmup_steps=config.warmup_steps,
            total_training_steps=max(config.total_steps, 1),
            min_lr_ratio=config.min_learning_rate_ratio,
        ),
        checkpoint_config=CheckpointConfig(
            save_contents=["model", "optimizer", "extra"],
            load_contents=["model", "optimizer", "extra"],
        ),
    )
