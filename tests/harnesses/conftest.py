import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harnesses import install
from tests.harnesses.bench import Bench
from tests.harnesses.clients import CLIENTS, Client
from tests.harnesses.findings import Findings

COLUMNS = [
    "protocol",
    "tool round trip",
    "session",
    "agent",
    "429",
    "500",
    "reset",
    "break",
    "SIGINT",
    "subagents",
    "side calls",
]
FOR_ALL = COLUMNS[: COLUMNS.index("SIGINT") + 1]
TABLE = install.REPOSITORY / "docs" / "harnesses.md"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-table", action="store_true", help="rewrite docs/harnesses.md")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the suite out of ``make test``, whatever else is selected there."""
    if "harness" in config.getoption("markexpr"):
        return
    chosen = [item for item in items if item.get_closest_marker("harness") is None]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.fixture(scope="session")
def findings(request: pytest.FixtureRequest) -> Iterator[Findings]:
    """The table, written at the end when nothing failed and no harness was left out."""
    versions = {c.name: install.version(c.program, c.package) for c in CLIENTS}
    found = Findings(versions, COLUMNS)
    yield found
    if request.config.getoption("--write-table", default=False) and not request.session.testsfailed:
        if not found.complete(FOR_ALL):
            pytest.fail("docs/harnesses.md is not written: not every harness was tried")
        found.write(TABLE)


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    running = Bench(tmp_path_factory.mktemp("harnesses"))
    yield running
    running.close()


@pytest.fixture(scope="session")
def installed() -> dict[str, Path | install.InstallError]:
    return {}


@pytest.fixture
def ready(installed: dict[str, Path | install.InstallError]):
    """Install a client's program, once; what can't be installed fails the test, loudly."""

    def ready(client: Client) -> Client:
        if client.program not in installed:
            try:
                installed[client.program] = install.install(client.program)
            except install.InstallError as error:
                installed[client.program] = error
        found = installed[client.program]
        if isinstance(found, install.InstallError):
            pytest.fail(str(found), pytrace=False)
        return client

    return ready


@pytest.fixture(autouse=True)
def _paced() -> Iterator[None]:
    """Let stragglers of the last harness end before the next one begins."""
    yield
    time.sleep(0.1)
