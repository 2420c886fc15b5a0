"""Routed experts of a mixture-of-experts model through the tap of a real server."""

import base64
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.conftest import running_server
from tests.serving.protocols import ANTHROPIC, CHAT, RESPONSES, Protocol
from tests.serving.tapped import tapped_post

pytestmark = pytest.mark.vllm

LAYERS, EXPERTS, TOP_K = 2, 8, 2


@pytest.fixture(scope="module")
def moe_model(smol_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE with random weights, small enough to serve in a second."""
    folder = tmp_path_factory.mktemp("moe")
    tokenizer = AutoTokenizer.from_pretrained(smol_model)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=64,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def moe_server(moe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("moe-log") / "server.log"
    flags = ("--enable-return-routed-experts", "--max-model-len", "512")
    with running_server(moe_model, log, *flags) as url:
        yield url


@pytest.mark.parametrize("protocol", [CHAT, RESPONSES, ANTHROPIC], ids=lambda p: p.name)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_every_token_has_its_experts(moe_server: str, protocol: Protocol, stream: bool) -> None:
    reply = tapped_post(moe_server, protocol.path, protocol.body(6, stream))
    (request,) = reply.requests()
    output = reply.output()
    experts = output.routed_experts
    assert experts is not None
    # The last sampled token never went through the model.
    passed = len(request.prompt_ids) + len(output.ids) - 1
    assert experts["shape"] == [passed, LAYERS, TOP_K]
    routed = np.frombuffer(base64.b64decode(experts["b64"]), dtype=experts["dtype"])
    assert routed.size == passed * LAYERS * TOP_K
    assert routed.max() < EXPERTS
    assert len(np.unique(routed)) > 1
