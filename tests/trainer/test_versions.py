"""The directory of versions: what a kill leaves behind, what is kept, what is refused."""

import errno
import json
from pathlib import Path

import pytest

from deploy.errors import UserError
from tests.trainer.conftest import make_model
from trainer.batch import Canary, Manifest
from trainer.versions import VersionStore, check_model, copy_side_files, number


def manifest(version: str, parent: str | None = None) -> Manifest:
    return Manifest(version, parent, number(version), None, [], Canary([1, 2], [-1.0]), {}, 0.0)


def make(store: VersionStore, version: str) -> None:
    weights, checkpoint = store.stage(version)
    (weights / "model.safetensors").write_bytes(b"w")
    (checkpoint / "optimizer.pt").write_bytes(b"o")
    store.commit(manifest(version))


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return VersionStore(tmp_path, keep_versions=3, keep_checkpoints=2)


def test_a_version_appears_whole(store: VersionStore, tmp_path: Path) -> None:
    weights, _ = store.stage("v1")
    assert store.manifest("v1") is None and not (tmp_path / "weights/v1").exists()
    (weights / "model.safetensors").write_bytes(b"w")
    store.commit(manifest("v1"))
    assert store.manifest("v1") == manifest("v1")
    assert store.checkpoint("v1") is not None


def test_leftovers_of_every_stage_are_removed(store: VersionStore, tmp_path: Path) -> None:
    make(store, "v1")
    store.stage("v2")
    (tmp_path / "checkpoints/v3").mkdir()  # killed between the two renames
    (tmp_path / "weights/v4").mkdir()
    store.clean()
    assert sorted(p.name for p in tmp_path.glob("*/*")) == ["v1", "v1"]


def test_pruning_keeps_the_newest_and_the_parent(store: VersionStore, tmp_path: Path) -> None:
    for k in (1, 2, 9, 10, 11):
        make(store, f"v{k}")
    store.prune(parent="v2")
    assert {p.name for p in (tmp_path / "weights").iterdir()} == {"v2", "v9", "v10", "v11"}
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"v10", "v11"}


def test_a_failed_write_leaves_earlier_versions(store: VersionStore, tmp_path: Path) -> None:
    make(store, "v1")
    store.stage("v2")
    found = store.failure("v2", OSError(errno.ENOSPC, "No space left on device"))
    assert isinstance(found, UserError)
    assert "v2" in str(found) and "make room" in str(found)
    assert sorted(p.name for p in tmp_path.glob("*/*")) == ["v1", "v1"]


def test_a_bug_is_not_blamed_on_the_disk(store: VersionStore) -> None:
    store.stage("v2")
    bug = RuntimeError("not about the disk")
    assert store.failure("v2", bug) is bug


def test_an_unreadable_manifest_says_what_to_do(store: VersionStore, tmp_path: Path) -> None:
    make(store, "v1")
    (tmp_path / "weights/v1/manifest.json").write_text("{")
    with pytest.raises(UserError, match="remove"):
        store.manifest("v1")


def test_a_directory_belongs_to_one_model(store: VersionStore, tmp_path: Path) -> None:
    one, other = make_model(tmp_path / "one"), make_model(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    store.claim(one)
    store.claim(one)
    with pytest.raises(UserError, match="another model"):
        store.claim(other)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_model_folder_is_named(tmp_path: Path, missing: str) -> None:
    folder = make_model(tmp_path / "model")
    check_model(folder)
    (folder / missing).unlink()
    with pytest.raises(UserError, match=missing.rsplit(".", 1)[-1]):
        check_model(folder)
    with pytest.raises(UserError, match="does not exist"):
        check_model(tmp_path / "nowhere")


def test_side_files_go_along_and_weights_do_not(model: Path, tmp_path: Path) -> None:
    copy_side_files(model, tmp_path, "bfloat16")
    names = {p.name for p in tmp_path.iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert "model.safetensors" not in names
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["3", "v", "v01", "V1", "v-1", "../v1"])
def test_version_names(name: str) -> None:
    assert number("v0") == 0 and number("v17") == 17
    with pytest.raises(ValueError, match="version name"):
        number(name)
