"""verl's FSDP engine, computing logits only where a token is trained."""

from functools import cache
from inspect import signature
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.device import get_device_name, get_vendor
from verl.utils.torch_functional import logprobs_from_logits
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import FSDPEngineWithLMHead


class TrainedTokensEngine(FSDPEngineWithLMHead):
    """Leaves out the output layer for context: most of an agent's tokens.

    With packed micro-batches (``use_remove_padding``) and a model whose ``forward`` takes
    ``logits_to_keep``, as Hugging Face's do; in any other case it is verl's engine. The
    log-probabilities of tokens that aren't trained come out as 0.
    """

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict, dict]:
        inputs, args = super().prepare_model_inputs(micro_batch)
        packed = tensordict_utils.get_non_tensor_data(micro_batch, "use_remove_padding", True)
        if packed and not self.use_ulysses_sp and _selects_logits(self.module):
            keep = _scoring_positions(micro_batch)
            inputs["logits_to_keep"] = keep
            args["keep"] = keep
        return inputs, args

    def prepare_model_outputs(
        self, output: Any, output_args: dict, micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, torch.Tensor]:
        keep = output_args.get("keep")
        if keep is None:
            return super().prepare_model_outputs(
                output, output_args, micro_batch, logits_processor_func
            )
        logits = output.logits.squeeze(0)
        if not output_args["temperature_is_one"]:
            logits = logits / output_args["temperature_rmpad"][keep, None].to(logits.dtype)
        labels = output_args["input_ids_rmpad_rolled"]
        scores = logprobs_from_logits(logits, labels[keep])
        everywhere = scores.new_zeros(len(labels)).index_put((keep,), scores)
        offsets = micro_batch["input_ids"].offsets()
        return {"log_probs": torch.nested.nested_tensor_from_jagged(everywhere, offsets)}


def _scoring_positions(micro_batch: TensorDict) -> torch.Tensor:
    """Return the positions in the packed micro-batch whose next token is trained.

    At least one, so that a micro-batch of filler rows still has a graph.
    """
    ends = micro_batch["input_ids"].offsets()[1:]
    mask = micro_batch["response_mask"]
    lengths = mask.offsets().diff()
    # Position of each response token in the packed sequence: responses end where rows end.
    start = torch.repeat_interleave(ends - lengths - mask.offsets()[:-1], lengths)
    positions = start + torch.arange(len(start), device=start.device)
    keep = positions[mask.values().bool()] - 1
    return keep if len(keep) else positions[:1] - 1


def _selects_logits(module: torch.nn.Module) -> bool:
    return "logits_to_keep" in signature(module.forward).parameters


@cache
def register() -> None:
    """Make verl use this engine on the present device; a vendor's entry wins over the stock one."""
    EngineRegistry.register(
        "language_model", ["fsdp2"], device=get_device_name(), vendor=get_vendor()
    )(TrainedTokensEngine)
