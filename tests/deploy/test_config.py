"""One TOML file: every key documented, unknown keys and wrong types refused by name."""

from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
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


def _enumerated() -> list[tuple[str, list[str]]]:
    """Every ``section.key`` whose values are enumerated, with these."""
    found = []
    for section in msgspec.structs.fields(config.Config):
        for key, annotation in get_type_hints(section.type).items():
            if get_origin(annotation) is Literal:
                found.append((f"{section.name}.{key}", list(get_args(annotation))))
    assert len(found) > 10
    return found


@pytest.mark.parametrize(("key", "values"), _enumerated())
def test_the_values_that_a_key_may_have_are_named(key: str, values: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        config.load(None, {key: "tapp"})
    assert f"`$.{key}`; allowed: {', '.join(sorted(values))};" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("sidecar.upstreams", [{"urls": ["x"], "credentials": "k"}], "drop, forward, replace"),
        ("sidecar.intercept", [{"host": "x"}, {"host": "y", "to": 1}], "original, routes"),
        ("daemon.train_side_calls", ["naming"], "title"),
    ],
)
def test_also_in_lists(key: str, value: list[Any], words: str) -> None:
    with pytest.raises(UserError, match=f"; allowed: .*{words}"):
        config.load(None, {key: value})
