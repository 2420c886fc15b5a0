"""Weight transfer by files, as a backend of vLLM's weight-transfer API.

Runs inside vLLM's workers (entry point ``vllm.general_plugins``), on CPU and GPU. One update is one
``update_weights`` call with ``{"path": <safetensors file or folder of them>}``; the files hold a
Hugging Face checkpoint of the served model, all shards, ``lm_head.weight`` included where the
model ties it: engines keep a packed copy of the head, which reloading the embedding leaves alone.

A checkpoint that lacks a tensor, or has one too many, is refused before anything is loaded.
Whatever goes wrong, the model is left able to run.

Source of the reload protocol: ``vllm.model_executor.model_loader.reload`` (vLLM 0.30).
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

if TYPE_CHECKING:
    import torch

logger = init_logger("vllm.ridealong.swap")

BACKEND = "ridealong"


def register() -> None:
    """Make the backend known to vLLM; called in every vLLM process, more than once in some."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # already registered in this process
        WeightTransferEngineFactory.register_engine(
            BACKEND, "trainer.swap.backend", "FileWeightTransfer"
        )


class WeightsRefused(ValueError):
    """The checkpoint does not fit the served model, or the update was given up."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on: both sides see the same files."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """``path``: file or folder. ``abandon``: end an update that its owner did not finish."""

    path: str = ""
    abandon: bool = False


class FileWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads new weights from safetensors files into the running model, in place."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    _loaded = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._loaded = False
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one whole checkpoint.

        Raises:
            WeightsRefused: nothing was changed, the old weights are back.
            Exception: loading broke off; layers may be old or new, but the model runs.
        """
        import torch

        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self._settle_model()
            raise
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        self._loaded = True

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.abandon:
            raise WeightsRefused("the update was abandoned")
        files = safetensors_files(Path(update_info.path))
        # Right after start_weight_update every parameter has its own name, tied ones too.
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        served = Path(self.model_config.model)
        check_names(
            offered=tensor_names(files),
            known=tensor_names(safetensors_files(served)) if served.is_dir() else set(),
            parameters=parameters,
        )
        self.model.load_weights(_tensors(files))
        stale = self._stale_parameters()
        if stale:
            raise RuntimeError(f"vLLM did not load {_some(stale)} from {update_info.path}")

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if not self._loaded:
            raise RuntimeError("finish_weight_update without loaded weights: the old ones are back")

    def _stale_parameters(self) -> set[str]:
        """Return the parameters of layers that nothing was loaded into: they have old values.

        The names that ``load_weights`` returns do not tell: some models return others.
        """
        from vllm.model_executor.layers.attention import is_deferred_attention_layer
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        stale: set[str] = set()
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            untouched = info.can_load() and info.load_numel == 0
            if untouched and not is_deferred_attention_layer(layer):
                own = dict(layer.named_parameters(recurse=False))
                stale |= {f"{name}.{parameter}" for parameter in own}
        return stale

    def _settle_model(self) -> None:
        """Give every layer that is not completely loaded its old weights back."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.load_numel = 0
                info.loaded_weights.clear()
        finalize_layerwise_reload(self.model, self.model_config)


def safetensors_files(path: Path) -> list[Path]:
    """Return the safetensors files at ``path``, itself one or a folder of them, sorted.

    Raises:
        WeightsRefused: there are none.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise WeightsRefused(f"{path} holds no safetensors file")
    return files


def tensor_names(files: list[Path]) -> set[str]:
    """Return the names of all tensors in ``files``; reads their headers only."""
    from safetensors import safe_open

    names: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as checkpoint:
            names.update(checkpoint.keys())
    return names


def check_names(offered: set[str], known: set[str], parameters: set[str]) -> None:
    """Check the tensor names of an update against those of the checkpoint that is being served.

    Args:
        offered: names in the update.
        known: names in the served model's own folder; empty when it can't be read.
        parameters: the engine's parameter names, tied ones listed under each name.

    Raises:
        WeightsRefused: a tensor is missing or unknown; the message names it.
    """
    # vLLM computes rotary frequencies itself, and exporters leave these buffers out.
    missing = {name for name in known - offered if not name.endswith("rotary_emb.inv_freq")}
    if not any(name.endswith("lm_head.weight") for name in offered):
        missing |= {name for name in parameters if name.endswith("lm_head.weight")}
    if missing:
        raise WeightsRefused(f"the update lacks {_some(missing)}")
    unknown = {n for n in offered - known if not n.endswith("lm_head.weight")} if known else set()
    if unknown:
        raise WeightsRefused(f"the update has tensors the served model has not: {_some(unknown)}")


def _tensors(files: list[Path]) -> "Iterator[tuple[str, torch.Tensor]]":
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118 (not a dict)
                yield name, checkpoint.get_tensor(name)


def _some(names: set[str], limit: int = 5) -> str:
    listed = ", ".join(sorted(names)[:limit])
    return listed if len(names) <= limit else f"{listed} and {len(names) - limit} more"
