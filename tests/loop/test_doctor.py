"""``ridealong doctor`` in front of the real server, and of nothing."""

from pathlib import Path

import pytest

from deploy.supervisor import free_port
from tests.loop.conftest import RunningSidecar, ridealong, running_sidecar


def _config(sidecar: RunningSidecar, directory: Path) -> str:
    path = directory / "ridealong.toml"
    listen, admin = (url.removeprefix("http://") for url in (sidecar.url, sidecar.admin))
    path.write_text(
        f'[sidecar]\nlisten = "{listen}"\nadmin = "{admin}"\ntraces = "{sidecar.traces}"\n'
    )
    return str(path)


@pytest.mark.vllm
def test_all_is_well(sidecar: RunningSidecar, tmp_path: Path) -> None:
    result = ridealong("doctor", "--config", _config(sidecar, tmp_path), seconds=180)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("ok  ") == 15 and "NO " not in result.stdout
    for route in ("chat", "completions", "responses", "messages"):
        assert f"{route}: exact tokens from the engine's token tap" in result.stdout
    cancelled = [e for e in sidecar.exchanges() if e.outcome == "cancelled"]
    assert {e.route for e in cancelled} == {"chat", "completions", "responses", "messages"}


def test_no_sidecar(tmp_path: Path) -> None:
    config = tmp_path / "ridealong.toml"
    config.write_text(f'[sidecar]\nadmin = "127.0.0.1:{free_port()}"\n')
    result = ridealong("doctor", "--config", str(config))
    assert result.returncode == 2 and "start `ridealong sidecar`" in result.stderr


def test_no_model_server(tmp_path: Path) -> None:
    with running_sidecar(f"http://127.0.0.1:{free_port()}", tmp_path) as sidecar:
        result = ridealong("doctor", "--config", _config(sidecar, tmp_path))
    assert result.returncode == 2 and "lists no models" in result.stderr
