"""What a user can get wrong: one line that says what to do, or a loud degraded mode."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deploy.supervisor import free_port
from tests.loop.conftest import ridealong, running_sidecar, wait_for


def _one_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 2, result.stderr
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_unknown_configuration_key(tmp_path: Path) -> None:
    config = tmp_path / "ridealong.toml"
    config.write_text('[sidecar]\nupstraem = "http://127.0.0.1:8000"\n')
    line = _one_line(ridealong("sidecar", "--config", str(config)))
    assert "upstraem" in line and "$.sidecar" in line and "docs/configuration.md" in line


def test_wrong_type(tmp_path: Path) -> None:
    line = _one_line(ridealong("sidecar", "--set", "sidecar.rotate_mib=lots"))
    assert "rotate_mib" in line


def test_unknown_flag() -> None:
    result = ridealong("sidecar", "--upstraem", "http://127.0.0.1:8000")
    assert result.returncode == 2 and "--upstraem" in result.stderr


@pytest.mark.parametrize("program", ["sidecar", "serve", "daemon"])
def test_occupied_port(program: str, occupied_port: int, tmp_path: Path, smol_model: Path) -> None:
    address = f"127.0.0.1:{occupied_port}"
    arguments = {
        "sidecar": ["--listen", address, "--traces", str(tmp_path)],
        "serve": ["--model", str(smol_model), "--port", str(occupied_port)],
        "daemon": ["--listen", address, "--directory", str(tmp_path), "--model", str(smol_model)],
    }[program]
    line = _one_line(ridealong(program, *arguments))
    assert str(occupied_port) in line


@pytest.mark.parametrize("program", ["serve", "daemon"])
def test_model_folder_without_tokenizer(program: str, smol_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(
        smol_model, broken, ignore=shutil.ignore_patterns("*token*", "vocab*", "merges*")
    )
    arguments = ["--model", str(broken)]
    if program == "daemon":
        arguments += ["--directory", str(tmp_path / "state"), "--listen", "127.0.0.1:0"]
    line = _one_line(ridealong(program, *arguments))
    assert "tokenizer" in line and str(broken) in line


def test_missing_model_folder(tmp_path: Path) -> None:
    assert "nowhere" in _one_line(ridealong("serve", "--model", str(tmp_path / "nowhere")))


def test_status_without_a_daemon() -> None:
    line = _one_line(ridealong("status", "--daemon", f"http://127.0.0.1:{free_port()}"))
    assert "ridealong daemon" in line


def test_unreachable_upstream_is_seen_by_the_agent_as_without_us(tmp_path: Path) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    with running_sidecar(dead, tmp_path) as sidecar:
        with pytest.raises(httpx.ReadError):  # What connecting to it is refused with: a reset.
            httpx.post(f"{sidecar.url}/v1/chat/completions", json={"model": "m", "messages": []})
        (exchange,) = sidecar.wait_for_exchanges(1)
        assert exchange.outcome == "upstream_error" and exchange.response is None
        warning = [line for line in sidecar.log.read_text().splitlines() if dead in line]
        assert warning, sidecar.log.read_text()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.mark.vllm
def test_full_disk_does_not_stop_the_agent(
    vllm_server: str, small_disk: Path, tmp_path: Path
) -> None:
    (filler := small_disk / "filler").write_bytes(b"x" * (240 << 10))
    with running_sidecar(vllm_server, tmp_path, traces=small_disk / "traces") as sidecar:
        body = {
            "model": "smol",
            "messages": [{"role": "user", "content": ""}],
            "max_tokens": 4,
        }
        for k in range(10):
            body["messages"][0]["content"] = os.urandom(600).hex()  # type: ignore[index]
            reply = httpx.post(f"{sidecar.url}/v1/chat/completions", json=body, timeout=60)
            assert reply.status_code == 200, (k, reply.text)
        deadline = time.monotonic() + 10
        while (health := httpx.get(f"{sidecar.admin}/healthz").json())["status"] != "degraded":
            assert time.monotonic() < deadline, health
            time.sleep(0.1)
        assert "space" in json.dumps(health)
        filler.unlink()
        reply = httpx.post(f"{sidecar.url}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 200
        while (health := httpx.get(f"{sidecar.admin}/healthz").json())["status"] != "ok":
            assert time.monotonic() < deadline + 20, health
            time.sleep(0.1)


@pytest.mark.vllm
def test_a_vllm_without_our_plugins_serves_on(smol_model: Path, tmp_path: Path) -> None:
    port = free_port()
    log = tmp_path / "plain.log"
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smol_model)]
    argv += ["--port", str(port), "--host", "127.0.0.1", "--served-model-name", "smol"]
    argv += ["--enforce-eager", "--max-model-len", "1024"]
    environment = {
        **os.environ,
        "VLLM_PLUGINS": "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("wb") as output:
        plain = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", plain, log, 300)
        with running_sidecar(f"http://127.0.0.1:{port}", tmp_path) as sidecar:
            deadline = time.monotonic() + 20
            while (
                "api" not in httpx.get(f"{sidecar.admin}/healthz").json()["token_sources"].values()
            ):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            body = {"model": "smol", "messages": [{"role": "user", "content": "Hello"}]}
            body |= {"max_tokens": 8, "stream": True}
            reply = httpx.post(f"{sidecar.url}/v1/chat/completions", json=body, timeout=60)
            assert reply.status_code == 200 and b"data: [DONE]" in reply.content
            (exchange,) = sidecar.wait_for_exchanges(1)
            assert exchange.tap_source == "api"
            assert "ridealong serve" in sidecar.log.read_text()
            assert httpx.get(f"{sidecar.admin}/healthz").json()["status"] == "degraded"
    finally:
        plain.terminate()
        plain.wait(60)
