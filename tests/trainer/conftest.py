"""A tiny random model with a byte tokenizer, and batches for it."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tokenization.sample import Sample
from trainer.batch import Batch, Rollout
from trainer.config import TrainerConfig
from trainer.device import prepare

if TYPE_CHECKING:
    from trainer.engine import Engine

VOCABULARY = 260

# verl, which the test modules import, settles on its platform at once.
prepare(TrainerConfig(device="cpu"))


def make_model(folder: Path) -> Path:
    """Write a 2-layer Llama with tied embeddings and a byte-level tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: k for k, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def config() -> TrainerConfig:
    return TrainerConfig(device="cpu", threads=1, learning_rate=1e-3)


@pytest.fixture
def engine(config: TrainerConfig, model: Path) -> "Iterator[Engine]":
    from trainer.engine import Engine

    engine = Engine(config, model, prepare(config))
    yield engine
    engine.close()


def reference_logprobs(model: Path, sample: Sample) -> np.ndarray:
    """Log-probabilities of a sample's tokens by plain Hugging Face code, NaN for the first."""
    network = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = network(ids).logits[0, :-1] / sample.temperature
    scores = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].numpy()
    return np.concatenate([[np.nan], scores]).astype(np.float32)


def make_sample(
    seed: int,
    run: str,
    *,
    name: str = "0",
    prompt: int = 8,
    response: int = 12,
    gap: int = 3,
    version: int = 0,
    temperature: float = 1.0,
    model: Path | None = None,
) -> Sample:
    """A random two-turn sample: prompt, sampled, ``gap`` unsampled tokens, sampled, 2 unsampled.

    With ``model`` the captured log-probabilities are the model's own.
    """
    random = np.random.default_rng(seed)
    length = prompt + response + gap + response + 2
    mask = np.zeros(length, dtype=np.bool_)
    mask[prompt : prompt + response] = True
    mask[prompt + response + gap : -2] = True
    sample = Sample(
        sample_id=f"{run}/{name}",
        run=run,
        calls=(f"call-{run}-{name}",),
        token_ids=random.integers(0, 256, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, np.float32(-5.5), np.float32("nan")),
        versions=np.where(mask, version, -1).astype(np.int32),
        temperature=temperature,
    )
    if model is not None:
        sample.logprobs[mask] = reference_logprobs(model, sample)[mask]
    return sample


def make_batch(model: Path | None = None, *, seed: int = 0, version: int = 0) -> Batch:
    """Two groups of three rollouts; the first rollout has two samples."""
    rewards = [1.0, 0.0, 0.5, 0.0, 0.0, 1.0]
    rollouts = tuple(Rollout(f"run{k}", f"group{k // 3}", r) for k, r in enumerate(rewards))
    samples = [
        make_sample(seed * 100 + k, f"run{k}", response=6 + 2 * k, version=version, model=model)
        for k in range(6)
    ]
    samples.append(
        make_sample(seed * 100 + 50, "run0", name="1", response=4, version=version, model=model)
    )
    return Batch(rollouts, tuple(samples))
