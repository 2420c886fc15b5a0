"""What the daemon hands to the trainer for one step, and what it gets back.

The batch travels as one file, so that a step can be repeated after a crash with the very same
input. The digest of the file names the step's input: a trainer that already holds a version made
from this digest answers with it instead of training twice.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenization.sample import Sample


@dataclass(frozen=True)
class Rollout:
    """One graded rollout. ``group`` is None for live traffic that nobody grouped."""

    run: str
    group: str | None
    reward: float


@dataclass(frozen=True)
class Batch:
    """The input of one training step: graded rollouts and all samples they split into."""

    rollouts: tuple[Rollout, ...]
    samples: tuple[Sample, ...]

    def save(self, path: Path) -> str:
        """Write to ``path`` (``.npz``) atomically and return the sha256 digest of the content."""
        arrays: dict[str, Any] = {
            "offsets": np.cumsum([0] + [len(s.token_ids) for s in self.samples], dtype=np.int64)
        }
        for name in ("token_ids", "loss_mask", "logprobs", "versions"):
            arrays[name] = np.concatenate([getattr(s, name) for s in self.samples])
        meta = {
            "rollouts": [[r.run, r.group, r.reward] for r in self.rollouts],
            "samples": [[s.sample_id, s.run, list(s.calls), s.temperature] for s in self.samples],
        }
        arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, **arrays)
        part.replace(path)
        return digest(path)

    @classmethod
    def load(cls, path: Path) -> "Batch":
        with np.load(path) as arrays:
            meta = json.loads(arrays["meta"].tobytes())
            data = {n: arrays[n] for n in ("token_ids", "loss_mask", "logprobs", "versions")}
            offsets = arrays["offsets"]
        samples = []
        for k, (sample_id, run, calls, temperature) in enumerate(meta["samples"]):
            cut = slice(int(offsets[k]), int(offsets[k + 1]))
            samples.append(
                Sample(
                    sample_id=sample_id,
                    run=run,
                    calls=tuple(calls),
                    temperature=temperature,
                    **{name: array[cut] for name, array in data.items()},
                )
            )
        return cls(tuple(Rollout(*r) for r in meta["rollouts"]), tuple(samples))


def digest(path: Path) -> str:
    """Return the sha256 of a batch file as hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Canary(msgspec.Struct, frozen=True):
    """A fixed prompt and the trainer's own logprobs for it under a version's weights.

    ``logprobs[k]`` is the natural-log probability, at temperature 1, of ``token_ids[k + 1]`` given
    the tokens before it; its length is ``len(token_ids) - 1``.
    """

    token_ids: list[int]
    logprobs: list[float]


class Manifest(msgspec.Struct, frozen=True):
    """``weights/<version>/manifest.json``: where a version came from. Written last: its presence
    means that the version is whole."""

    version: str
    """``vN``; ``v0`` is the model the run started from."""
    parent: str | None
    step: int
    batch_digest: str | None
    samples: list[str]
    canary: Canary
    metrics: dict[str, float]
    created: float
