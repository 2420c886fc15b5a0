"""The verl worker that trains: the same class in the trainer's process and on Ray, CPU and GPU."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers_tinker import TinkerTrainingWorker

from trainer import lm_engine

SHARD_BYTES = 4 * 2**30


@dataclass
class WorkerConfig:
    """What a worker is made from. ``threads`` are CPU threads, ``seed`` seeds torch."""

    verl: TrainingWorkerConfig
    threads: int
    seed: int


class Worker(TinkerTrainingWorker):
    """verl's Tinker-style worker with weight export and its learning-rate schedule exposed."""

    def __init__(self, config: WorkerConfig) -> None:
        torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        lm_engine.register()
        if not dist.is_initialized():
            _init_process_group()
        super().__init__(config.verl)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def learning_rate(self) -> float:
        """Return the rate of the next optimizer step."""
        return float(self.engine.optimizer.param_groups[0]["lr"])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def advance_schedule(self) -> None:
        """Count one step of the learning-rate schedule."""
        self.engine.lr_scheduler_step()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_weights(self, directory: str, dtype: str) -> None:
        """Write the weights as safetensors under their Hugging Face names.

        ``lm_head.weight`` is written for tied models too: a serving engine that reloads in place
        may hold it as a tensor of its own.

        Args:
            directory: existing folder, written by rank 0.
            dtype: torch dtype name for the floating-point tensors.
        """
        tensors, _ = self.engine.get_per_tensor_param()
        target = getattr(torch, dtype)
        # Gathering a sharded tensor is a collective: every rank drains the generator.
        own = self._owned(tensors, target)
        if self.rank == 0:
            write_safetensors(own, Path(directory), SHARD_BYTES)
        else:
            for _ in own:
                pass
        dist.barrier()

    def _owned(
        self, tensors: Iterator[tuple[str, torch.Tensor]], target: torch.dtype
    ) -> Iterator[tuple[str, torch.Tensor]]:
        names = set()
        embedding = None
        for name, tensor in tensors:
            names.add(name)
            # A single worker's tensors alias the live weights: copy.
            data = tensor.detach().to("cpu", target if tensor.is_floating_point() else None)
            data = data.clone() if data.data_ptr() == tensor.data_ptr() else data
            if name.endswith("embed_tokens.weight"):
                embedding = data
            yield name, data.contiguous()
        tied = self.model_config.hf_config.tie_word_embeddings
        if tied and "lm_head.weight" not in names and embedding is not None:
            yield "lm_head.weight", embedding.clone()


def _init_process_group() -> None:
    """Join the process group before verl does.

    verl asks for the backend ``cpu:gloo,<device>:<collectives>``, which on a CPU names the device
    twice and is refused. A single worker needs no port either: its store is in memory.
    """
    backend = "gloo" if get_device_name() == "cpu" else "cpu:gloo,cuda:nccl"
    world = int(os.environ["WORLD_SIZE"])
    if world == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend, rank=int(os.environ["RANK"]), world_size=world)


def write_safetensors(
    tensors: Iterator[tuple[str, torch.Tensor]], directory: Path, shard_bytes: int
) -> None:
    """Write ``model.safetensors``, or numbered shards and their index where there are several.

    Args:
        tensors: names and CPU tensors that share no memory.
        directory: existing folder.
        shard_bytes: a shard is closed when it holds at least this many bytes.
    """
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    size = total = 0

    def close() -> None:
        nonlocal held, size
        save_file(held, directory / f"model-{len(shards) + 1:05d}.safetensors", {"format": "pt"})
        shards.append(list(held))
        held, size = {}, 0

    for name, tensor in tensors:
        held[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
        if size >= shard_bytes:
            close()
    if held:
        close()
    if len(shards) == 1:
        (directory / "model-00001.safetensors").rename(directory / "model.safetensors")
        return
    index: dict[str, str] = {}
    for k, names in enumerate(shards, 1):
        final = f"model-{k:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"model-{k:05d}.safetensors").rename(directory / final)
        index |= dict.fromkeys(names, final)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    )
