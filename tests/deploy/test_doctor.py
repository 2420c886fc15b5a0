"""What ``ridealong doctor`` says of paths that do not work, in front of real sidecars."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from deploy import config
from deploy.doctor import program
from deploy.doctor.probes import Answer, Model, models
from deploy.errors import UserError
from deploy.supervisor import free_port
from tests.sidecar.fake_engine import FakeEngine
from tests.sidecar.running import RunningSidecar
from tests.sidecar.test_records import self_signed

Start = Callable[..., RunningSidecar]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[RunningSidecar] = []

    def started(upstream: str, **options: Any) -> RunningSidecar:
        running.append(RunningSidecar(upstream, tmp_path / "traces", **options))
        return running[-1]

    yield started
    for sidecar in running:
        sidecar.stop()


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """It has no list of models."""
    with closing(FakeEngine()) as running:
        yield running


def said(sidecar: RunningSidecar) -> str:
    """Return the doctor's error. All it is told is where to find the sidecar and its records."""
    keys = {"sidecar.admin": f"127.0.0.1:{sidecar.admin}", "sidecar.traces": str(sidecar.traces)}
    with pytest.raises(UserError) as caught:
        program.run(config.load(None, keys), None, None)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_address_is_the_one_that_the_sidecar_names(engine: FakeEngine, start: Start) -> None:
    message = said(start(engine.url))
    assert "HTTP 404: " in message and "Not Found" in message and "--model" in message
    assert engine.last()["path"] == "/v1/models"


def test_no_model_server(start: Start) -> None:
    upstream = f"http://127.0.0.1:{free_port()}"
    message = said(start(upstream))
    assert f"request to {upstream} failed: " in message and "Connect call failed" in message
    assert "start the model server" in message


def test_a_sidecar_that_wants_a_run_key(engine: FakeEngine, start: Start) -> None:
    message = said(start(engine.url, require_key=True))
    assert "HTTP 401: this sidecar needs a run key" in message and "--config" in message
    assert "--api-key" not in message and "model server" not in message


def test_a_model_server_whose_certificate_is_not_trusted(start: Start, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    with closing(FakeEngine(ssl_certfile=certificate, ssl_keyfile=key)) as engine:
        message = said(start(engine.url))
    assert "self-signed certificate" in message
    assert "start the sidecar with SSL_CERT_FILE" in message


def test_a_sidecar_whose_certificate_is_not_trusted(
    engine: FakeEngine, start: Start, tmp_path: Path
) -> None:
    certificate, key = self_signed(tmp_path)
    sidecar = start(engine.url, tls_certificate=certificate, tls_key=key)
    message = said(sidecar)
    assert "the sidecar's certificate is not trusted: self-signed certificate" in message
    assert "start the doctor with SSL_CERT_FILE" in message
    trusting = subprocess.run(
        [
            sys.executable,
            "-m",
            "deploy",
            "doctor",
            "--set",
            f"sidecar.admin=127.0.0.1:{sidecar.admin}",
        ],
        env=os.environ | {"SSL_CERT_FILE": certificate},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "HTTP 404" in trusting.stderr


@pytest.mark.parametrize(
    ("body", "answer", "listed"),
    [
        (
            '{"data": [{"id": "a", "max_model_len": 512}, {"id": "b"}]}',
            Answer(200),
            [Model("a", 512), Model("b")],
        ),
        ('{"data": []}', Answer(200, "the list is empty"), []),
        ("<html>", Answer(200, "not a list of models: <html>"), []),
    ],
)
async def test_lists_of_models(body: str, answer: Answer, listed: list[Model]) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        assert await models(f"http://127.0.0.1:{server.server_port}", "r", None) == (answer, listed)
        server.shutdown()
