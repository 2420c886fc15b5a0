"""A folder of shards, a state, and what reads the one into the other."""

import pytest

from daemon.ingest import Ingester
from daemon.state import State


@pytest.fixture
def traces(tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    return folder


@pytest.fixture
def state(tmp_path):
    opened = State(tmp_path / "daemon.db")
    yield opened
    opened.close()


@pytest.fixture
def ingester(traces, state):
    return Ingester(traces, state)
