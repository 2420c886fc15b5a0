"""Installs the harnesses that the suite drives: real programs, pinned, unmodified.

Each gets a folder of its own under ``.harnesses/`` (or ``RIDEALONG_HARNESSES``): a Python
environment from PyPI or a ``node_modules`` from npm. A folder whose stamp names the same packages
is left as it is, so a second run takes no time. Run it alone with
``python -m tests.harnesses.install [NAME…]``.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

REPOSITORY = Path(__file__).parent.parent.parent
NODE_MAJOR = 20
"""Claude Code, Codex, pi and the Node SDKs run on it; qwen-code brings its own Node 22."""


class InstallError(Exception):
    """A program could not be installed. The message is one line."""


@dataclass(frozen=True)
class Program:
    """What to install. ``packages`` are given to uv or npm as they are."""

    name: str
    source: Literal["npm", "pypi"]
    packages: tuple[str, ...]


PROGRAMS = {
    program.name: program
    for program in (
        Program("pi", "npm", ("@mariozechner/pi-coding-agent@0.73.1",)),
        Program("codex", "npm", ("@openai/codex@0.171.0",)),
        Program("claude-code", "npm", ("@anthropic-ai/claude-code@2.1.332",)),
        Program("qwen-code", "npm", ("@qwen-code/qwen-code@0.24.4", "node@22.23.3")),
        Program("node-sdks", "npm", ("openai@6.49.0", "@anthropic-ai/sdk@1.14.0")),
        Program("python-sdks", "pypi", ("openai==3.57.0", "anthropic==2.14.0")),
        Program("openai-agents", "pypi", ("openai-agents==0.24.0", "openai==3.57.0")),
        Program(
            "langgraph",
            "pypi",
            ("langgraph==1.2.24", "langchain==1.3.6", "langchain-openai==1.7.4"),
        ),
        Program("smolagents", "pypi", ("smolagents[openai]==1.26.0",)),
        Program("mini-swe-agent", "pypi", ("mini-swe-agent==2.4.6",)),
    )
}


def folder(name: str) -> Path:
    """Where a program lies, whether installed or not."""
    root = os.environ.get("RIDEALONG_HARNESSES")
    return (Path(root) if root else REPOSITORY / ".harnesses") / name


def executable(name: str, command: str) -> Path:
    """A command of an installed program."""
    inside = "bin" if PROGRAMS[name].source == "pypi" else "node_modules/.bin"
    return folder(name) / inside / command


def version(name: str, package: str | None = None) -> str:
    """The pinned version of one of the program's packages, by default of the first."""
    sign = "@" if PROGRAMS[name].source == "npm" else "=="
    pins = {pin[: pin.rindex(sign)]: pin for pin in PROGRAMS[name].packages}
    pin = pins[package] if package else PROGRAMS[name].packages[0]
    return pin[pin.rindex(sign) + len(sign) :]


def install(name: str) -> Path:
    """Install a program unless it is there already; returns its folder.

    Raises:
        InstallError: node, npm or uv is missing, or the registry's client failed.
    """
    program, target = PROGRAMS[name], folder(name)
    stamp = target / ".installed"
    wanted = "\n".join(program.packages)
    if stamp.is_file() and stamp.read_text() == wanted:
        return target
    # What a broken installation left would be taken for a part of the new one.
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    if program.source == "npm":
        _check_node()
        (target / "package.json").write_text('{"private": true}')
        _run(name, "npm", "install", "--no-audit", "--no-fund", *program.packages, at=target)
    else:
        uv = _uv()
        _run(name, uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, target)
        interpreter = target / "bin" / "python"
        _run(name, uv, "pip", "install", "--quiet", "--python", interpreter, *program.packages)
    stamp.write_text(wanted)
    return target


def _check_node() -> None:
    if not (shutil.which("node") and shutil.which("npm")):
        raise InstallError(f"node and npm are not on the path: install Node.js {NODE_MAJOR}")
    found = subprocess.run(
        ["node", "--version"], capture_output=True, text=True, check=False
    ).stdout.strip()
    if not found.startswith("v") or int(found[1:].split(".")[0]) < NODE_MAJOR:
        raise InstallError(f"Node.js is {found or 'broken'}: install {NODE_MAJOR} or newer")


def _uv() -> str:
    beside = Path(sys.executable).parent / "uv"
    if found := str(beside) if beside.is_file() else shutil.which("uv"):
        return found
    raise InstallError("uv is missing: run deploy/setup.sh, which installs it")


def _run(name: str, *command: str | Path, at: Path | None = None) -> None:
    environment = {**os.environ, "UV_SYSTEM_CERTS": "1", "UV_NATIVE_TLS": "1"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=at,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        why = next((line for line in said if "error" in line.lower()), said[-1] if said else "")
        raise InstallError(f"{name} can't be installed: {Path(command[0]).name}: {why[:300]}")


def main(names: list[str]) -> int:
    """Install the named programs, or all; returns the exit status."""
    failed = 0
    for name in names or PROGRAMS:
        if name not in PROGRAMS:
            print(f"{name} is not one of {', '.join(PROGRAMS)}", file=sys.stderr)
            return 2
        try:
            print(f"{name} {version(name)}: {install(name)}", flush=True)
        except InstallError as error:
            print(error, file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
