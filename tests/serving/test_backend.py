"""What the weight-transfer backend refuses before it touches the model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainer.swap.backend import (
    BACKEND,
    WeightsRefused,
    check_names,
    register,
    safetensors_files,
    tensor_names,
)

CHECKPOINT = {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"}
PARAMETERS = {"model.embed_tokens.weight", "model.layers.0.self_attn.qkv_proj.weight"}
HEAD = "lm_head.weight"


def test_complete() -> None:
    check_names(CHECKPOINT, CHECKPOINT, PARAMETERS)
    check_names(CHECKPOINT | {HEAD}, CHECKPOINT, PARAMETERS | {HEAD})
    check_names(CHECKPOINT, set(), PARAMETERS)


def test_missing_tensor() -> None:
    with pytest.raises(WeightsRefused, match=r"lacks model\.layers\.0\.self_attn\.q_proj"):
        check_names({"model.embed_tokens.weight"}, CHECKPOINT, PARAMETERS)


def test_missing_tied_head() -> None:
    with pytest.raises(WeightsRefused, match=r"lacks lm_head\.weight"):
        check_names(CHECKPOINT, CHECKPOINT, PARAMETERS | {HEAD})


def test_unknown_tensor() -> None:
    with pytest.raises(WeightsRefused, match=r"has not: model\.layers\.9\.bias"):
        check_names(CHECKPOINT | {"model.layers.9.bias"}, CHECKPOINT, PARAMETERS)


def test_rotary_buffers_of_old_checkpoints_are_not_asked_for() -> None:
    old = CHECKPOINT | {"model.layers.0.self_attn.rotary_emb.inv_freq"}
    check_names(CHECKPOINT, old, PARAMETERS)


def test_long_lists_are_cut() -> None:
    with pytest.raises(WeightsRefused, match="and 15 more"):
        check_names(set(), {f"layer.{k}" for k in range(20)}, set())


def test_files_and_names(tmp_path: Path) -> None:
    with pytest.raises(WeightsRefused, match="holds no safetensors"):
        safetensors_files(tmp_path)
    with pytest.raises(WeightsRefused, match="holds no safetensors"):
        safetensors_files(tmp_path / "nowhere")
    save_file({"b": torch.zeros(1)}, tmp_path / "2.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "1.safetensors")
    files = safetensors_files(tmp_path)
    assert [file.name for file in files] == ["1.safetensors", "2.safetensors"]
    assert tensor_names(files) == {"a", "b"}
    assert safetensors_files(files[0]) == files[:1]


def test_registering_twice_is_fine() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    register()
    register()
    assert BACKEND in WeightTransferEngineFactory._registry
