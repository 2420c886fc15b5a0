"""Which device the trainer uses, settled before verl is imported."""

import os
from dataclasses import dataclass
from typing import Literal

import torch

from deploy.errors import UserError
from trainer.config import TrainerConfig


@dataclass(frozen=True)
class Device:
    """``dtype`` is the torch name of the computing precision, ``threads`` is per worker."""

    name: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    threads: int


def prepare(config: TrainerConfig) -> Device:
    """Choose the device and tell verl, which reads these variables when it is imported.

    Raises:
        UserError: the configuration asks for more GPUs than there are.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name: Literal["cpu", "cuda"]
    name = "cpu" if config.device == "cpu" or (config.device == "auto" and not gpus) else "cuda"
    if name == "cuda" and gpus < config.workers:
        raise UserError(
            f"trainer.workers = {config.workers} but this machine has {gpus} usable GPUs; lower "
            'it or set trainer.device = "cpu"'
        )
    if name == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"
        os.environ["VERL_USE_EXTERNAL_MODULES"] = "trainer.platform_cpu"
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")
    # All workers are on this machine: their collectives need no other interface.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    automatic: Literal["float32", "bfloat16"] = "float32" if name == "cpu" else "bfloat16"
    dtype = automatic if config.dtype == "auto" else config.dtype
    cores = len(os.sched_getaffinity(0))
    return Device(name, dtype, config.threads or max(1, cores // config.workers))
