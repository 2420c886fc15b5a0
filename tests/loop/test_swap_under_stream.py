"""A stream in flight while the weights are swapped, seen through the sidecar."""

import asyncio
import json
import shutil
import time
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.loop.conftest import RunningSidecar
from tokenization.tap import wire
from trainer.batch import Canary
from trainer.swap.client import Engine
from trainer.swap.config import SwapConfig

pytestmark = pytest.mark.vllm

# Long enough that a fast machine has not sent it all before the swap begins.
LENGTH = 400
CANARY_IDS = [1, 504, 2365, 282, 4649, 314, 260, 1107, 282, 253, 2591, 30]


def _version(model: Path, directory: Path, scale: float) -> tuple[Path, Canary]:
    """Weights of ``model`` with one layer scaled, and what plain transformers says of them."""
    weights = load_file(model / "model.safetensors")
    for name in weights:
        if "layers.29.mlp.down_proj" in name:
            weights[name] = weights[name] * scale
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"].clone())
    directory.mkdir()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        if (model / name).exists():
            shutil.copy(model / name, directory)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.tensor([CANARY_IDS])
    with torch.no_grad():
        logprobs = torch.log_softmax(reference(ids).logits[0, :-1].float(), -1)
    chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
    return directory, Canary(CANARY_IDS, chosen)


async def test_a_stream_goes_on_across_a_swap(
    sidecar: RunningSidecar, vllm_server: str, smol_model: Path, tmp_path: Path
) -> None:
    new, new_canary = _version(smol_model, tmp_path / "new", 1.5)
    old, old_canary = _version(smol_model, tmp_path / "old", 1.0)
    engine = Engine(vllm_server, SwapConfig())
    before = (await engine.probe()).version
    body = {
        "model": "smol",
        "messages": [{"role": "user", "content": "Tell me a long story about a dragon."}],
        "stream": True,
        "max_tokens": LENGTH,
        "ignore_eos": True,
        "temperature": 1.0,
    }
    arrivals: list[float] = []
    under_way = asyncio.Event()
    finish = None

    async def read() -> None:
        nonlocal finish
        async with (
            httpx.AsyncClient(timeout=120) as client,
            client.stream("POST", f"{sidecar.url}/v1/chat/completions", json=body) as response,
        ):
            assert response.status_code == 200
            async for text in response.aiter_lines():
                if text.startswith("data: {"):
                    arrivals.append(time.monotonic())
                    if len(arrivals) == 30:
                        under_way.set()
                    finish = json.loads(text[6:])["choices"][0]["finish_reason"] or finish

    reading = asyncio.create_task(read())
    await asyncio.wait_for(under_way.wait(), 60)
    published = time.monotonic()
    try:
        report = await engine.publish("v41", new, new_canary, None)
        await reading
    finally:
        await engine.publish(before, old, old_canary, None)

    assert finish == "length"
    (exchange,) = sidecar.wait_for_exchanges(1)
    assert exchange.outcome == "complete"
    (request,) = wire.decode(exchange.tap)
    (output,) = request.outputs.values()
    assert len(output.ids) == LENGTH
    changes = [k for k, (a, b) in enumerate(pairwise(output.versions), 1) if a != b]
    assert len(changes) == 1, (
        f"versions change at {changes}; the stream ended {arrivals[-1] - published:.1f} s after the"
        f" swap was asked for, which took {report.total_s:.1f} s"
    )
    assert (output.versions[0], output.versions[-1]) == (before, "v41")
    gap = max(b - a for a, b in pairwise(arrivals))
    print(
        f"\nswap under a stream: versions {before} -> v41 at token {changes[0]} of {LENGTH},"
        f" longest gap {gap:.3f} s, pause {report.pause_s:.3f} s, update {report.update_s:.3f} s,"
        f" canary mean |difference| {report.canary_abs_diff_mean:.1e}"
    )
    assert report.cache_reset
    assert gap < report.total_s + 2.0
