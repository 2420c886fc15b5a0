"""Publishing weights into the real server while it serves."""

import asyncio
import itertools
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.serving.protocols import CHAT, COMPLETIONS
from tests.serving.tapped import cut, tapped_post
from tokenization.tap import wire
from trainer.batch import Canary
from trainer.swap.client import CanaryFailed, Engine, SwapFailed
from trainer.swap.config import SwapConfig
from trainer.swap.watchdog import unpause_orphans

pytestmark = pytest.mark.vllm

CANARY_TOKENS = list(range(200, 260))
CONFIG = SwapConfig(orphan_poll_s=0.2)


@dataclass
class TrainedVersion:
    """A version as the trainer leaves it, and the model itself to compute log-probs with."""

    name: str
    folder: Path
    model: Any
    canary: Canary

    def logprobs(self, token_ids: list[int]) -> list[float]:
        """Natural-log probability of each token but the first, given those before it."""
        with torch.no_grad():
            logits = self.model(torch.tensor([token_ids])).logits[0]
        table = torch.log_softmax(logits.double(), -1)
        return [table[k, token].item() for k, token in enumerate(token_ids[1:])]

    @property
    def published(self) -> tuple[str, Path, Canary]:
        return self.name, self.folder, self.canary


def trained_version(name: str, base: Path, folder: Path, noise: float) -> TrainedVersion:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(0)
    for key, parameter in model.named_parameters():
        if "layers.29.mlp.down_proj" in key or "embed_tokens" in key:
            parameter.data += noise * torch.randn_like(parameter)
    folder.mkdir(parents=True)
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    version = TrainedVersion(name, folder, model, Canary(CANARY_TOKENS, []))
    version.canary = Canary(CANARY_TOKENS, version.logprobs(CANARY_TOKENS))
    return version


@pytest.fixture(scope="module")
def v0(smol_model: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedVersion:
    """The weights that the server starts from."""
    return trained_version("v0", smol_model, tmp_path_factory.mktemp("w") / "v0", noise=0.0)


@pytest.fixture(scope="module")
def v1(smol_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainedVersion]:
    """Weights that answer differently, the tied embedding changed too."""
    version = trained_version("v1", smol_model, tmp_path_factory.mktemp("w") / "v1", noise=0.02)
    yield version
    shutil.rmtree(version.folder)


@pytest.fixture
async def engine(vllm_server: str, v0: TrainedVersion) -> AsyncIterator[Engine]:
    engine = Engine(vllm_server, CONFIG)
    yield engine
    await engine.recover()
    await engine.publish(*v0.published, previous=None)


async def greedy(url: str) -> str:
    body = COMPLETIONS.body(12, False, temperature=0, prompt="The first day of the week is")
    async with httpx.AsyncClient(timeout=60) as client:
        reply = await client.post(url + COMPLETIONS.path, json=body)
    return str(reply.json()["choices"][0]["text"])


async def test_stream_goes_on_across_a_swap(
    vllm_server: str, engine: Engine, v0: TrainedVersion, v1: TrainedVersion
) -> None:
    await engine.publish(*v0.published, previous=None)
    nonce, total = secrets.token_hex(8), 160
    body = CHAT.body(total, True, temperature=1.0, ignore_eos=True)
    swap: asyncio.Task[Any] | None = None
    received, times = b"", []
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream(
            "POST", vllm_server + CHAT.path, json=body, headers={wire.HEADER: nonce}
        ) as reply,
    ):
        async for chunk in reply.aiter_raw():
            received += chunk
            times.append(time.monotonic())
            if swap is None and received.count(b'"e":"tok"') >= 30:
                swap = asyncio.create_task(engine.publish(*v1.published, previous=v0.published))
    assert swap is not None
    report = await swap

    clean, lines = cut(received, nonce)
    assert clean.endswith(b"data: [DONE]\n\n")
    assert b'"error"' not in clean
    (request,) = wire.decode(lines)
    output = request.outputs[0]
    assert (output.finish, output.reported, len(output.ids)) == ("length", total, total)
    change = output.versions.index("v1")
    assert change >= 30
    assert output.versions == ["v0"] * change + ["v1"] * (total - change)

    # Tokens before the change were sampled from v0, those after it from v1 alone: no key or value
    # computed by the old weights took part.
    sequence = request.prompt_ids + output.ids
    expected = v0.logprobs(sequence)[-total:][:change] + v1.logprobs(sequence)[-total:][change:]
    differences = [abs(a - b) for a, b in zip(output.logprobs, expected, strict=True)]
    assert max(differences) < 1e-2
    assert sum(differences) / total < 1e-3

    assert report.version == "v1"
    assert report.cache_reset
    assert 0 < report.update_s <= report.pause_s <= report.total_s
    assert report.canary_abs_diff_mean < CONFIG.canary_tolerance_float32
    gap = max(b - a for a, b in itertools.pairwise(times))
    print(f"\nswap: pause {report.pause_s:.2f} s, longest gap in the stream {gap:.2f} s")


async def test_publishing_again_does_nothing(engine: Engine, v0: TrainedVersion) -> None:
    await engine.publish(*v0.published, previous=None)
    report = await engine.publish(*v0.published, previous=None)
    assert (report.version, report.pause_s, report.cache_reset) == ("v0", 0.0, False)


async def test_wrong_weights_are_rolled_back(
    vllm_server: str, engine: Engine, v0: TrainedVersion, v1: TrainedVersion
) -> None:
    await engine.publish(*v0.published, previous=None)
    before = await greedy(vllm_server)
    with pytest.raises(CanaryFailed, match=r"differ by .*; v0 serves again"):
        await engine.publish("v1", v1.folder, v0.canary, previous=v0.published)
    assert (await engine.probe()).version == "v0"
    assert await greedy(vllm_server) == before


async def test_wrong_weights_with_nothing_to_go_back_to(
    engine: Engine, v0: TrainedVersion, v1: TrainedVersion
) -> None:
    with pytest.raises(CanaryFailed, match="no earlier version"):
        await engine.publish("v1", v1.folder, v0.canary, previous=None)
    state = await engine.probe()
    assert (state.version, state.paused) == (wire.UNKNOWN_VERSION, False)


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.layers.3.self_attn.k_proj.weight"], ids=["head", "shard"]
)
async def test_missing_tensor_is_refused(
    vllm_server: str, engine: Engine, v0: TrainedVersion, tmp_path: Path, name: str
) -> None:
    await engine.publish(*v0.published, previous=None)
    before = await greedy(vllm_server)
    tensors = load_file(v0.folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(SwapFailed, match=name):
        await engine.publish("v1", tmp_path, v0.canary, previous=None)
    state = await engine.probe()
    assert (state.version, state.paused) == (wire.UNKNOWN_VERSION, False)
    assert await greedy(vllm_server) == before, "a refused update must leave the old weights"


async def test_several_shards(
    engine: Engine, v0: TrainedVersion, v1: TrainedVersion, tmp_path: Path
) -> None:
    tensors = load_file(v1.folder / "model.safetensors")
    names = sorted(tensors)
    for part in range(3):
        save_file(
            {n: tensors[n] for n in names[part::3]}, tmp_path / f"model-{part}-of-3.safetensors"
        )
    report = await engine.publish("v1", tmp_path, v1.canary, previous=v0.published)
    assert report.canary_abs_diff_mean < CONFIG.canary_tolerance_float32


async def test_damaged_file_leaves_a_working_engine(
    vllm_server: str, engine: Engine, v0: TrainedVersion, v1: TrainedVersion, tmp_path: Path
) -> None:
    whole = (v1.folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SwapFailed, match="v0 serves again"):
        await engine.publish("v1", tmp_path, v1.canary, previous=v0.published)
    assert (await engine.probe()).version == "v0"
    assert await greedy(vllm_server)


async def test_orphan_is_resumed(vllm_server: str, engine: Engine, v0: TrainedVersion) -> None:
    """What a publisher leaves that is killed in the middle of an update."""
    await engine.publish(*v0.published, previous=None)
    before = await greedy(vllm_server)
    async with httpx.AsyncClient(timeout=60) as client:
        for path in ("/pause?mode=keep", "/start_weight_update"):
            (await client.post(vllm_server + path)).raise_for_status()
    assert await engine.is_paused()
    # A paused engine computes nothing, the canary's prompt included.
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(greedy(vllm_server), 1.0)

    watchdog = asyncio.create_task(unpause_orphans(engine, CONFIG.orphan_poll_s))
    deadline = time.monotonic() + 15
    while await engine.is_paused():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    watchdog.cancel()
    assert await greedy(vllm_server) == before


async def test_publishing_after_a_killed_publisher(
    vllm_server: str, engine: Engine, v0: TrainedVersion, v1: TrainedVersion
) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        for path in ("/pause?mode=keep", "/start_weight_update"):
            (await client.post(vllm_server + path)).raise_for_status()
    report = await engine.publish(*v1.published, previous=v0.published)
    assert report.cache_reset
    state = await engine.probe()
    assert (state.version, state.paused) == ("v1", False)
    assert (await asyncio.to_thread(sample_version, vllm_server)) == {"v1"}


def sample_version(url: str) -> set[str]:
    return set(tapped_post(url, CHAT.path, CHAT.body(3, False)).output().versions)
