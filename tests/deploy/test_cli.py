"""The ``ridealong`` command: what the user can put right is said in one line, with status 2."""

from pathlib import Path
from typing import Any

import pytest

from deploy import cli


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that has to be refused; return the line it writes."""
    assert cli.main(list(arguments)) == 2
    written = capsys.readouterr().err
    assert written.count("\n") == 1
    return written


@pytest.mark.parametrize(
    "url",
    ["foo", "127.0.0.1:8790", "http://", "http://h:port", "http://[::1", "http://a b", "ftp://h"],
)
@pytest.mark.parametrize("command", [("status",), ("reward", "--run", "r", "--value", "1")])
def test_what_is_no_url_of_a_daemon(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...], url: str
) -> None:
    written = refused(capsys, *command, "--daemon", url)
    assert f"--daemon {url} is no URL: write it like http://127.0.0.1:8790" in written


def test_a_demo_in_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    written = refused(capsys, "demo", "--directory", str(file))
    assert f"{file} is not a folder; choose another --directory" in written
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("sidecar", "pip install '.[sidecar]', or run deploy/setup.sh"),
        ("daemon", "pip install '.[learner]', or run deploy/setup.sh"),
        ("up", "in a clone of Ridealong, run deploy/setup.sh"),
    ],
)
def test_a_package_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, words: str
) -> None:
    def function(args: Any) -> int:
        raise ModuleNotFoundError(name="rich")

    monkeypatch.setattr(cli, f"_{command}", function)
    written = refused(capsys, command)
    assert "the package rich is not installed" in written and words in written


@pytest.mark.parametrize("command", ["sidecar", "daemon", "status", "demo"])
def test_an_unknown_argument_is_answered_with_the_commands_usage(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--bogus"])
    written = capsys.readouterr().err
    assert ended.value.code == 2 and "--bogus" in written
    assert written.startswith(f"usage: ridealong {command} ")
