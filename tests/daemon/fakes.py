"""Stand-ins that only exist to be killed at any moment, hundreds of times in seconds.

``FakeTrainer`` and ``FakeEngine`` keep their state in files, as the real ones outlive a killed
daemon in checkpoints and in the engine's process, and append every effect to a journal.
"""

import asyncio
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import msgspec

from daemon.learner import Progress
from trainer.batch import Batch, Canary, Manifest, digest
from trainer.errors import TrainerDied, TrainingRejected
from trainer.swap.client import CanaryFailed, EngineState, EngineUnreachable, SwapReport

CANARY = Canary([1, 2, 3], [-1.0, -1.0])


def journal(path: Path, **entry: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_journal(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class FakeTrainer:
    """Makes versions with no weights in them. Like the real one it answers for a step that it has
    done already, refuses another batch under the same name, and leaves nothing half made."""

    def __init__(self, directory: Path, on_progress: Progress | None = None, pause: float = 0.0):
        self._directory = directory
        self._pause = pause
        self._report = on_progress or (lambda stage: None)
        self.deaths: list[TrainerDied] = []
        self.rejections: list[TrainingRejected] = []

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def bootstrap(self) -> Manifest:
        return self._find("v0") or self._make("v0", None, None, [], {})

    async def train(self, batch: Path, parent: str, version: str) -> Manifest:
        if self.deaths:
            raise self.deaths.pop()
        if self.rejections:
            raise self.rejections.pop()
        fingerprint = digest(batch)
        if existing := self._find(version):
            if (existing.batch_digest, existing.parent) == (fingerprint, parent):
                return existing
            raise TrainingRejected(f"{version} exists already, made from another batch")
        if self._find(parent) is None:
            raise TrainingRejected(f"no parent {parent}")
        self._report("update")
        await asyncio.sleep(self._pause * random.random())
        samples = [s.sample_id for s in Batch.load(batch).samples]
        metrics = {"kl_rollout_trainer": 0.001, "logprob_abs_diff_mean": 1e-5}
        return self._make(version, parent, fingerprint, samples, metrics)

    def _find(self, version: str) -> Manifest | None:
        path = self._directory / "weights" / version / "manifest.json"
        return msgspec.json.decode(path.read_bytes(), type=Manifest) if path.exists() else None

    def _make(
        self,
        version: str,
        parent: str | None,
        fingerprint: str | None,
        samples: list[str],
        metrics: dict[str, float],
    ) -> Manifest:
        manifest = Manifest(
            version, parent, int(version[1:]), fingerprint, samples, CANARY, metrics, time.time()
        )
        folder = self._directory / "weights" / version
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / "manifest.part"
        part.write_bytes(msgspec.json.encode(manifest))
        part.rename(folder / "manifest.json")
        journal(self._directory / "trained.jsonl", version=version, samples=samples)
        return manifest


class FakeEngine:
    """Serves the version that its file names."""

    def __init__(self, directory: Path, pause: float = 0.0, version: str = "v0") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = directory / "engine"
        self._journal = directory / "published.jsonl"
        self._pause = pause
        self.unreachable = False
        self.canary_fails: set[str] = set()
        if not self._file.exists():
            self.restart(version)

    @property
    def version(self) -> str:
        return self._file.read_text()

    def restart(self, version: str) -> None:
        """Come up again with the weights that it was started with."""
        self._file.write_text(version)

    async def probe(self) -> EngineState:
        if self.unreachable:
            raise EngineUnreachable("no vLLM answers at http://127.0.0.1:1")
        return EngineState(self.version, False, "m", "float32", "processed_logprobs", 1024, "b")

    async def publish(
        self, version: str, weights: Path, canary: Canary, previous: tuple[str, Path, Canary] | None
    ) -> SwapReport:
        await self.probe()
        assert (weights / "manifest.json").exists() and canary == CANARY
        await asyncio.sleep(self._pause * random.random())
        if version in self.canary_fails:
            assert previous is not None
            journal(self._journal, version=version, failed=True)
            self._file.write_text(previous[0])
            raise CanaryFailed(f"canary of {version}: log-probs differ by 1.0e+00 on average")
        part = self._file.with_suffix(".part")
        part.write_text(version)
        part.rename(self._file)
        journal(self._journal, version=version)
        await asyncio.sleep(self._pause * random.random())
        return SwapReport(version, 0.1, 0.2, 0.3, 1e-6, 1e-5, True)
