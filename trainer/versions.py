"""Weight versions and checkpoints on disk.

::

    <directory>/weights/vN/      safetensors, config.json, tokenizer, manifest.json
    <directory>/checkpoints/vN/  verl's checkpoint: weights, optimizer, schedule, random state
    <directory>/model.json       which start model the directory belongs to
    <directory>/lock             held by the one trainer that may write

A version is made under hidden names and appears by two renames, the weights' last: a version whose
weights exist is whole, and everything else is a leftover of a trainer that was killed.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import msgspec

from deploy.errors import UserError
from trainer.batch import Manifest

_FULL_BYTES = 64 * 2**20
_NAME = re.compile(r"v(0|[1-9][0-9]*)")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".index.json")


def number(version: str) -> int:
    """Return N of ``vN``. Raises ValueError for anything else."""
    match = _NAME.fullmatch(version)
    if match is None:
        raise ValueError(f"{version!r} is not a version name like v3")
    return int(match[1])


class VersionStore:
    """The versions of one run. One process at a time may use it (see ``trainer.service``)."""

    def __init__(self, directory: Path, keep_versions: int, keep_checkpoints: int) -> None:
        self._root = directory
        self._keep_versions = keep_versions
        self._keep_checkpoints = keep_checkpoints
        self._weights = directory / "weights"
        self._checkpoints = directory / "checkpoints"
        self._weights.mkdir(parents=True, exist_ok=True)
        self._checkpoints.mkdir(parents=True, exist_ok=True)

    def manifest(self, version: str) -> Manifest | None:
        """Return the manifest of a whole version, None when there is none.

        Raises:
            UserError: the file is there but can't be read.
        """
        path = self._weights / version / "manifest.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=Manifest)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise UserError(
                f"{path} can't be read ({error}); remove {path.parent} to have it made again"
            ) from None

    def checkpoint(self, version: str) -> Path | None:
        """Return the folder of a version's checkpoint, None when it is no longer kept."""
        path = self._checkpoints / version
        return path if path.is_dir() else None

    def stage(self, version: str) -> tuple[Path, Path]:
        """Return new empty folders for a version's weights and checkpoint."""
        weights, checkpoint = self._staged(version)
        self.discard(version)
        weights.mkdir()
        checkpoint.mkdir()
        return weights, checkpoint

    def commit(self, manifest: Manifest) -> None:
        """Make the staged version appear, whole."""
        weights, checkpoint = self._staged(manifest.version)
        with (weights / "manifest.json").open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest)))
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(self._checkpoints / manifest.version, ignore_errors=True)
        checkpoint.rename(self._checkpoints / manifest.version)
        weights.rename(self._weights / manifest.version)

    def failure(self, version: str, error: Exception) -> Exception:
        """Say what kept a staged version from being written, and remove what there is of it."""
        free = shutil.disk_usage(self._root).free
        self.discard(version)
        # Writers of tensor files report a full disk each in its own way.
        reason = "the disk is full" if free < _FULL_BYTES else str(error).partition("\n")[0]
        if isinstance(error, OSError) or free < _FULL_BYTES:
            return UserError(
                f"can't write {version} to {self._root}: {reason}; make room there and try again; "
                "earlier versions are unchanged"
            )
        return error

    def discard(self, version: str) -> None:
        """Remove what was staged for a version."""
        for path in self._staged(version):
            shutil.rmtree(path, ignore_errors=True)

    def clean(self) -> None:
        """Remove what a killed trainer left half made."""
        for path in (*self._weights.iterdir(), *self._checkpoints.iterdir()):
            known = _NAME.fullmatch(path.name)
            whole = known and (self._weights / path.name / "manifest.json").is_file()
            if path.is_dir() and not whole and (known or path.name.startswith(".")):
                shutil.rmtree(path)

    def prune(self, parent: str) -> None:
        """Remove all but the newest versions and checkpoints; ``parent``'s weights stay."""
        for folder, keep, spared in (
            (self._weights, self._keep_versions, {parent}),
            (self._checkpoints, self._keep_checkpoints, set()),
        ):
            names = sorted(
                (p.name for p in folder.iterdir() if _NAME.fullmatch(p.name)), key=number
            )
            for name in names[:-keep]:
                if name not in spared:
                    shutil.rmtree(folder / name)

    def claim(self, model: Path) -> None:
        """Tie the directory to its start model at the first use, check it at later ones.

        Raises:
            UserError: the directory holds versions of another model.
        """
        path = self._root / "model.json"
        now = {"path": str(model), "fingerprint": fingerprint(model)}
        if not path.exists():
            part = path.with_suffix(".part")
            part.write_bytes(msgspec.json.encode(now))
            part.replace(path)
            return
        claimed = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        if claimed["fingerprint"] != now["fingerprint"]:
            raise UserError(
                f"{self._root} holds versions of another model ({claimed['path']}); "
                "choose another directory or that model"
            )

    def _staged(self, version: str) -> tuple[Path, Path]:
        return self._weights / f".{version}.part", self._checkpoints / f".{version}.part"


def copy_side_files(model: Path, target: Path, dtype: str) -> None:
    """Copy what a model folder holds beside weights: configuration, tokenizer, chat template.

    The copied configuration names ``dtype`` as that of the weights.
    """
    for path in model.iterdir():
        is_weights = path.name.endswith(_WEIGHT_SUFFIXES) or path.name == "manifest.json"
        if path.is_file() and not path.name.startswith(".") and not is_weights:
            shutil.copyfile(path, target / path.name)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def fingerprint(model: Path) -> str:
    """Return a hex digest that tells start models apart without reading all their weights.

    It covers the configuration and the name and size of every weight file, but not the path.
    """
    state = hashlib.sha256((model / "config.json").read_bytes())
    for path in sorted(model.glob("*.safetensors")):
        state.update(f"{path.name} {path.stat().st_size}\n".encode())
    return state.hexdigest()


def check_model(model: Path) -> None:
    """Check that a folder holds what training and serving need.

    Raises:
        UserError: it does not exist, or lacks its config, weights or tokenizer.
    """
    if not model.is_dir():
        raise UserError(f"model folder {model} does not exist")
    needed = {
        "config.json": ("config.json",),
        "weights (*.safetensors)": ("*.safetensors",),
        "tokenizer (tokenizer.json)": ("tokenizer.json", "tokenizer.model", "vocab.json"),
    }
    for what, patterns in needed.items():
        if not any(any(model.glob(pattern)) for pattern in patterns):
            raise UserError(f"model folder {model} has no {what}; give a complete one")
