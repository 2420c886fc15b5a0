"""Fixtures that are shared by all tests: the real small model and the real serving engine."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.demo.model import ensure_model
from deploy.supervisor import free_port

REPOSITORY = Path(__file__).parent.parent
START_TIMEOUT_S = 300

_SERVE = """
import sys
from deploy.serve import run
from deploy.serve_config import ServeConfig
run(ServeConfig(model=sys.argv[1], port=int(sys.argv[2]), served_model_name="smol",
                max_model_len=2048, tool_call_parser="hermes"), sys.argv[3:])
"""


@contextmanager
def running_server(model: Path, log: Path, *vllm_args: str) -> Iterator[str]:
    """Start a real server through ``deploy.serve``, yield its URL, stop it and its children."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(model), str(port), *vllm_args],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            start_new_session=True,
        )
    try:
        _wait_healthy(url, server, log)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait_healthy(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(url + "/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    tail = log.read_text(errors="replace")[-4000:]
    pytest.fail(f"the vLLM server did not start (exit status {server.poll()}):\n{tail}")


@pytest.fixture(scope="session")
def smol_model() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, float32, made on first use (about 40 s)."""
    return ensure_model(REPOSITORY / "models" / "smollm2-135m")


@pytest.fixture(scope="session")
def vllm_server(smol_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real vLLM with our plugins that serves ``smol_model`` under the name ``smol``."""
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with running_server(smol_model, log) as url:
        yield url
