"""The trainer: makes versions from batches, exactly once, whatever was killed in between."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.batch import Batch, Manifest, digest
from trainer.canary import canary_tokens, score
from trainer.config import TrainerConfig
from trainer.device import prepare
from trainer.errors import TrainingRejected
from trainer.versions import VersionStore, check_model, copy_side_files, number

if TYPE_CHECKING:
    from trainer.engine import Engine

Report = Callable[[str], None]


class Trainer:
    """Holds one model in training. Not for concurrent use; owns ``directory``."""

    def __init__(self, config: TrainerConfig, model: Path, directory: Path, report: Report) -> None:
        """Open the directory and remove leftovers.

        Args:
            config: how to train.
            model: Hugging Face folder of the start model, ``v0``.
            directory: where versions and checkpoints live.
            report: called with a word or two whenever a stage begins.

        Raises:
            UserError: the model folder is incomplete, the directory belongs to another model, or
                the device asked for does not exist.
        """
        check_model(model)
        self._config = config
        self._model = model
        self._report = report
        self._device = prepare(config)
        self._store = VersionStore(directory, config.keep_versions, config.keep_checkpoints)
        self._store.claim(model)
        self._store.clean()
        self._engine: Engine | None = None
        self._held: str | None = None
        """The version that the engine's weights and optimizer are at, None when unsure."""

    def bootstrap(self) -> Manifest:
        """Return ``v0``, made from the start model at the first call."""
        manifest = self._store.manifest("v0")
        if manifest is not None:
            return manifest
        engine = self._started()
        manifest = self._publish(engine, "v0", None, None, [], {}, canary_tokens(self._model))
        self._held = "v0"
        return manifest

    def train(self, batch_path: Path, parent: str, version: str) -> Manifest:
        """Train ``parent`` on a batch and return the manifest of ``version``.

        Repeating a step that was completed returns its manifest without training.

        Raises:
            TrainingRejected: the step can't be done, for the reason given; nothing changed.
            UserError: the version could not be written.
        """
        fingerprint = digest(batch_path)
        existing = self._store.manifest(version)
        if existing is not None:
            if existing.batch_digest == fingerprint and existing.parent == parent:
                return existing
            raise TrainingRejected(
                f"{version} exists already, made from {existing.parent} and another batch"
            )
        start = self._store.manifest(parent)
        if start is None:
            raise TrainingRejected(f"parent {parent} does not exist")
        try:
            batch = Batch.load(batch_path)
        except Exception as error:
            raise TrainingRejected(f"batch {batch_path} can't be read: {error}") from None

        engine = self._started()
        from trainer.step import Step

        step = Step.prepare(self._config, batch)
        self._take(engine, parent)
        self._held = None
        metrics = step.run(engine, number(parent), self._report)
        manifest = self._publish(
            engine,
            version,
            parent,
            fingerprint,
            [row.sample_id for row in step.selection.rows],
            metrics,
            start.canary.token_ids,
        )
        self._held = version
        self._store.prune(parent)
        return manifest

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _started(self) -> "Engine":
        if self._engine is None:
            self._report("loading model")
            from trainer.engine import Engine

            self._engine = Engine(self._config, self._model, self._device)
        return self._engine

    def _take(self, engine: "Engine", version: str) -> None:
        """Bring the engine to a version, from its checkpoint unless it is there already."""
        if self._held == version:
            return
        checkpoint = self._store.checkpoint(version)
        if checkpoint is None:
            raise TrainingRejected(
                f"the checkpoint of {version} is no longer kept; raise trainer.keep_checkpoints "
                "to go back further"
            )
        self._report("loading checkpoint")
        self._held = None
        engine.load(checkpoint)

    def _publish(
        self,
        engine: "Engine",
        version: str,
        parent: str | None,
        batch_digest: str | None,
        samples: list[str],
        metrics: dict[str, float],
        canary: list[int],
    ) -> Manifest:
        self._report("canary")
        scored = score(engine, canary)
        self._report("writing")
        started = time.monotonic()
        try:
            weights, checkpoint = self._store.stage(version)
            engine.save(checkpoint)
            engine.export(weights, self._config.export_dtype)
            copy_side_files(self._model, weights, self._config.export_dtype)
            if metrics:
                metrics = metrics | {"write_seconds": time.monotonic() - started}
            manifest = Manifest(
                version=version,
                parent=parent,
                step=number(version),
                batch_digest=batch_digest,
                samples=samples,
                canary=scored,
                metrics=metrics,
                created=time.time(),
            )
            self._store.commit(manifest)
        except Exception as error:
            raise self._store.failure(version, error) from error
        return manifest
