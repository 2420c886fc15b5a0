"""What the daemon needs of a trainer and of a serving engine.

The real ones are ``trainer.client.TrainerClient`` and ``trainer.swap.client.Engine``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from deploy.errors import UserError
from trainer.batch import Canary, Manifest
from trainer.swap.client import EngineState, SwapReport


class Trainer(Protocol):
    """Makes versions from batches. Methods raise ``TrainerDied`` when its process is gone."""

    async def start(self) -> None: ...
    async def bootstrap(self) -> Manifest: ...
    async def train(self, batch: Path, parent: str, version: str) -> Manifest: ...
    async def close(self) -> None: ...


Progress = Callable[[str], None]
"""Takes a word or two on what the trainer is doing."""

TrainerFactory = Callable[[Progress], Trainer]


class ServingEngine(Protocol):
    """Serves versions. Methods raise ``UserError`` when it can't be reached or lacks our plugins,
    ``SwapFailed`` when a swap goes wrong."""

    async def probe(self) -> EngineState: ...
    async def publish(
        self, version: str, weights: Path, canary: Canary, previous: tuple[str, Path, Canary] | None
    ) -> SwapReport: ...


def load_version(directory: Path, version: str) -> tuple[str, Path, Canary]:
    """Return name, weights folder and canary of a version that the trainer has made.

    Raises:
        UserError: its weights are not there any more.
    """
    weights = directory / "weights" / version
    path = weights / "manifest.json"
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(
            f"version {version} can't be served: {path} can't be read ({error}); "
            "restore it, or start over with another daemon.directory"
        ) from None
    return version, weights, manifest.canary
