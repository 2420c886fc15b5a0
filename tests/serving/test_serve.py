"""``ridealong serve``: the command it runs and the mistakes it names."""

import json
import socket
from pathlib import Path

import msgspec
import pytest

from deploy import serve
from deploy.errors import UserError
from deploy.serve_config import ServeConfig
from trainer.batch import Canary, Manifest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(serve, "_cpu_build", lambda: True)


def flag(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_cpu_defaults(model: Path) -> None:
    argv, env = serve.command(ServeConfig(model=str(model), port=8123), [])
    assert argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert flag(argv, "--host") == "127.0.0.1"
    assert flag(argv, "--port") == "8123"
    assert flag(argv, "--served-model-name") == "tiny-model"
    assert flag(argv, "--dtype") == "float32"
    assert flag(argv, "--logprobs-mode") == "processed_logprobs"
    assert json.loads(flag(argv, "--weight-transfer-config")) == {"backend": "ridealong"}
    assert "--enforce-eager" in argv
    assert env["VLLM_PLUGINS"] == "ridealong"
    assert env["VLLM_SERVER_DEV_MODE"] == "1"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert env["TORCHDYNAMO_DISABLE"] == "1"  # The first sampled call must not wait for a compiler.
    assert env["RIDEALONG_WEIGHT_VERSION"] == "v0"


def test_gpu_defaults(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_cpu_build", lambda: False)
    argv, env = serve.command(ServeConfig(model=str(model), kv_cache_gib=2), [])
    assert "--dtype" not in argv
    assert "--enforce-eager" not in argv
    assert flag(argv, "--kv-cache-memory-bytes") == str(2 * 2**30)
    assert "VLLM_CPU_KVCACHE_SPACE" not in env
    assert "TORCHDYNAMO_DISABLE" not in env


def test_settings_and_extra_flags(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    config = ServeConfig(
        model=str(model),
        served_model_name="smol",
        chat_template="t.jinja",
        dtype="bfloat16",
        kv_cache_gib=3,
        max_model_len=512,
        tool_call_parser="hermes",
        extra_args=["--seed", "1"],
    )
    argv, env = serve.command(config, ["--seed", "2"])
    assert flag(argv, "--served-model-name") == "smol"
    assert flag(argv, "--chat-template") == "t.jinja"
    assert flag(argv, "--dtype") == "bfloat16"
    assert flag(argv, "--max-model-len") == "512"
    assert flag(argv, "--tool-call-parser") == "hermes"
    assert "--enable-auto-tool-choice" in argv
    assert argv[-4:] == ["--seed", "1", "--seed", "2"]
    assert env["VLLM_PLUGINS"] == "other,ridealong"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "3"


def test_version_of_a_trained_folder(model: Path) -> None:
    manifest = Manifest("v12", "v11", 12, "d", [], Canary([1], []), {}, 0.0)
    (model / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    _, env = serve.command(ServeConfig(model=str(model)), [])
    assert env["RIDEALONG_WEIGHT_VERSION"] == "v12"
    (model / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="not a version manifest"):
        serve.command(ServeConfig(model=str(model)), [])


def test_no_model() -> None:
    with pytest.raises(UserError, match="set --model"):
        serve.command(ServeConfig(), [])


def test_model_folder_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        serve.command(ServeConfig(model=str(tmp_path / "none")), [])


def test_model_without_config(model: Path) -> None:
    (model / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json"):
        serve.command(ServeConfig(model=str(model)), [])


def test_model_without_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="no tokenizer"):
        serve.command(ServeConfig(model=str(model)), [])
    argv, _ = serve.command(ServeConfig(model=str(model)), ["--tokenizer=elsewhere"])
    assert argv[-1] == "--tokenizer=elsewhere"


def test_occupied_port(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} .* is in use"):
            serve.run(ServeConfig(model=str(model), port=port), [])


def test_address_of_another_machine() -> None:
    with pytest.raises(UserError, match="can't listen on"):
        serve.check_port_free("192.0.2.77", 8000)


def test_config_refuses_unknown_keys_and_bad_ports() -> None:
    for bad in ({"modle": "x"}, {"port": 0}, {"port": 70000}, {"max_model_len": -1}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(bad, ServeConfig)
