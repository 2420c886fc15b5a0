"""One run of the suite for all of its tests, and its summary at the end of the output."""

import pytest

from tests.conformance import suite

_REPORT = pytest.StashKey[suite.Report]()


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> suite.Report:
    """What came of all cases."""
    found = suite.run(tmp_path_factory.mktemp("conformance"))
    pytestconfig.stash[_REPORT] = found
    return found


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    found = config.stash.get(_REPORT, None)
    if found is not None:
        terminalreporter.write_line(f"conformance: {found.notices()}")
        terminalreporter.write_line(f"conformance: {found.summary()}")
