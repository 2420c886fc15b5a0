"""One TOML file: every key documented, unknown keys and wrong types refused by name."""

from pathlib import Path

import pytest

from deploy import config
from deploy.errors import UserError

REPOSITORY = Path(__file__).parents[2]


def test_the_reference_is_up_to_date() -> None:
    """After changing a key: ``python -m deploy.config > docs/configuration.md``."""
    written = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == config.reference()


def test_every_key_has_a_type_a_default_and_a_description() -> None:
    rows = [line for line in config.reference().splitlines() if line.startswith("| `")]
    assert len(rows) > 40
    for row in rows:
        key, kind, default, description = (cell.strip() for cell in row.strip("|").split(" | "))
        assert kind and default and description, key


def test_the_example_is_valid() -> None:
    loaded = config.load(REPOSITORY / "deploy" / "ridealong.example.toml")
    assert loaded.daemon.engine == loaded.sidecar.upstream
    assert loaded.daemon.model == loaded.serve.model
    assert loaded.daemon.traces == loaded.sidecar.traces


def test_overrides_lie_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('[sidecar]\ntraces = "a"\nrotate_mib = 3\n')
    loaded = config.load(file, {"sidecar.traces": "b", "trainer.learning_rate": 1e-5})
    assert (loaded.sidecar.traces, loaded.sidecar.rotate_mib) == ("b", 3)
    assert loaded.trainer.learning_rate == 1e-5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[sidecar]\ntrace = 'x'\n", ["trace", "$.sidecar"]),
        ("[sidekick]\n", ["sidekick"]),
        ("[daemon]\ngroups_per_step = 'four'\n", ["groups_per_step"]),
        ("[daemon]\ngroups_per_step = 0\n", ["groups_per_step", "1"]),
        ("[trainer]\ndevice = 'tpu'\n", ["device", "tpu"]),
        ("[sidecar\n", ["r.toml"]),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "r.toml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        config.load(file)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.toml does not exist"):
        config.load(tmp_path / "nowhere.toml")
