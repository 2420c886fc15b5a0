"""The arguments of ``python -m tests.conformance``."""

import pytest

from tests.conformance.__main__ import main


@pytest.mark.parametrize(
    ("argv", "status", "text"),
    [
        (["--help"], 0, "part of the ids of cases to run"),
        (["nosuchcase"], 2, "no case matches 'nosuchcase'"),
        (["chat", "nosuchcase"], 2, "no case matches 'nosuchcase'"),
    ],
)
def test_help_and_unknown_cases(
    argv: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    said = capsys.readouterr()
    assert ended.value.code == status and text in said.out + said.err
