"""The ``ridealong`` command. Each subcommand imports only what it runs: the sidecar stays light."""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deploy.errors import UserError

DAEMON_URL = "http://127.0.0.1:8790"
# What runs without the learner, or not without the engine, which pip alone can't install.
_SIDECAR_COMMANDS = frozenset({"sidecar", "run", "key", "doctor"})
_ENGINE_COMMANDS = frozenset({"serve", "up", "demo"})


def _config(args: argparse.Namespace, flags: dict[str, str]) -> Any:
    """Load the configuration file and lay this command's flags and ``--set`` values over it."""
    from deploy import config

    overrides = {
        key: getattr(args, flag) for flag, key in flags.items() if getattr(args, flag) is not None
    }
    for assignment in args.set:
        key, equals, value = assignment.partition("=")
        if not equals or "." not in key:
            raise UserError(f"--set {assignment}: write it as section.key=value")
        overrides[key] = _literal(value)
    return config.load(args.config, overrides)


def _literal(text: str) -> Any:
    """Read a ``--set`` value as JSON where it is JSON, else as text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _sidecar(args: argparse.Namespace) -> int:
    from sidecar.program import run

    flags = {
        "upstream": "sidecar.upstream",
        "listen": "sidecar.listen",
        "admin": "sidecar.admin",
        "traces": "sidecar.traces",
    }
    return run(_config(args, flags).sidecar, lambda: _config(args, flags).sidecar)


def _key(args: argparse.Namespace) -> int:
    from sidecar.access.keys import RunKeys, load_secret

    path = Path(_config(args, {}).sidecar.key_file).expanduser()
    known = path.exists()
    try:
        print(RunKeys(load_secret(path)).issue(args.run))
    except ValueError as error:
        raise UserError(str(error)) from None
    if not known:
        print(
            f"made a new secret, {path}: a sidecar that runs already takes it after SIGHUP",
            file=sys.stderr,
        )
    return 0


def _run(args: argparse.Namespace) -> int:
    from deploy.launch import run

    command = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    return run(_config(args, {"admin": "sidecar.admin"}).sidecar, command, args.run, args.mode)


def _serve(args: argparse.Namespace) -> int:
    from deploy.serve import run

    flags = {"model": "serve.model", "host": "serve.host", "port": "serve.port"}
    return run(_config(args, flags).serve, args.vllm_flags)


def _daemon(args: argparse.Namespace) -> int:
    from daemon.program import run

    flags = {
        "traces": "daemon.traces",
        "directory": "daemon.directory",
        "engine": "daemon.engine",
        "model": "daemon.model",
        "listen": "daemon.listen",
    }
    config = _config(args, flags)
    return run(config.daemon, config.trainer, config.swap)


def _up(args: argparse.Namespace) -> int:
    from deploy.up import run

    return run(args.config, _config(args, {}))


def _demo(args: argparse.Namespace) -> int:
    from deploy.demo.program import run

    return run(args)


def _doctor(args: argparse.Namespace) -> int:
    from deploy.doctor.program import run

    return run(_config(args, {}), args.model, args.api_key)


def _reward(args: argparse.Namespace) -> int:
    from daemon.client import DaemonClient

    reply = DaemonClient(_url(args.daemon)).reward(
        value=args.value, run=args.run, call=args.call, name=args.name, key=args.key
    )
    print(json.dumps(reply))
    return 0


def _status(args: argparse.Namespace) -> int:
    from daemon.client import DaemonClient, format_status

    status = DaemonClient(_url(args.daemon)).status()
    print(json.dumps(status, indent=2) if args.json else format_status(status))
    return 0


def _parser() -> argparse.ArgumentParser:
    from deploy import __version__, traces_cli

    parser = argparse.ArgumentParser(
        prog="ridealong",
        description="Record an unmodified agent's model calls token-exactly, train the served"
        " model from them, and swap its weights while it serves.",
    )
    parser.add_argument("--version", action="version", version=f"ridealong {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True)

    def command(name: str, function: Callable[[argparse.Namespace], int], text: str) -> Any:
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        sub.set_defaults(function=function)
        return sub

    def configured(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--config", type=Path, metavar="FILE", help="TOML configuration")
        sub.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="SECTION.KEY=VALUE",
            help="override one key of the configuration; may be repeated",
        )

    sub = command("sidecar", _sidecar, "run the recording proxy beside an agent")
    sub.add_argument("--upstream", metavar="URL", help="the model server")
    sub.add_argument("--listen", metavar="HOST:PORT", help="where the agent connects")
    sub.add_argument("--admin", metavar="HOST:PORT", help="health and metrics")
    sub.add_argument("--traces", metavar="DIR", help="folder for trace shards")
    configured(sub)

    _add_agents_commands(command, configured)

    sub = command("serve", _serve, "start vLLM with the token tap and the weight transfer")
    sub.add_argument("--model", metavar="DIR", help="Hugging Face model folder")
    sub.add_argument("--host")
    sub.add_argument("--port", type=int)
    configured(sub)
    sub.set_defaults(passes_flags_on=True, vllm_flags=[])

    sub = command("daemon", _daemon, "run the daemon: traces to samples to training to weights")
    sub.add_argument("--traces", metavar="DIR", help="folder with trace shards")
    sub.add_argument("--directory", metavar="DIR", help="state, weights and checkpoints")
    sub.add_argument("--engine", metavar="URL", help="the vLLM that serves the model")
    sub.add_argument("--model", metavar="DIR", help="the model that training starts from")
    sub.add_argument("--listen", metavar="HOST:PORT", help="the daemon's API")
    configured(sub)

    sub = command("up", _up, "run serve, sidecar and daemon on this machine")
    configured(sub)

    sub = command("demo", _demo, "show the whole loop on a small model, on this machine")
    sub.add_argument("--steps", type=int, metavar="N", help="training steps (default: the demo's)")
    sub.add_argument("--seed", type=int, default=0, help="seed of tasks and training (default: 0)")
    sub.add_argument("--directory", type=Path, default=Path("runs/demo"), help="default: runs/demo")

    _add_answers_commands(command, configured)
    traces_cli.add(commands)
    for sub in commands.choices.values():
        sub.set_defaults(parser=sub)
    return parser


def _add_agents_commands(command: Callable[..., Any], configured: Callable[[Any], None]) -> None:
    sub = command("run", _run, "start a program so that a running sidecar records its model calls")
    sub.add_argument("--run", metavar="ID", help="the run's id (default: a new one)")
    sub.add_argument(
        "--mode",
        choices=["base-url", "proxy"],
        default="base-url",
        help="tell the program the sidecar as base URL of the model API (the default), or as its"
        " HTTP proxy",
    )
    sub.add_argument("--admin", metavar="HOST:PORT", help="the sidecar's health and metrics")
    configured(sub)
    sub.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the program")
    sub.usage = "ridealong run [options] -- COMMAND [ARGUMENT …]"

    sub = command("key", _key, "print the key that lets an agent post the calls of one run")
    sub.add_argument("run", metavar="RUN", help="the run's id")
    configured(sub)


def _add_answers_commands(command: Callable[..., Any], configured: Callable[[Any], None]) -> None:
    sub = command("reward", _reward, "give a run or a call a reward")
    target = sub.add_mutually_exclusive_group(required=True)
    target.add_argument("--run", metavar="ID")
    target.add_argument("--call", metavar="ID")
    sub.add_argument("--value", type=float, required=True)
    sub.add_argument("--name", default="reward", help="which reward (default: reward)")
    sub.add_argument(
        "--key",
        help="idempotency key; the same key again replaces the value",
    )
    _daemon_url(sub)

    sub = command("doctor", _doctor, "send real calls through the sidecar and say what works")
    sub.add_argument("--model", help="model to ask for (default: the first that is listed)")
    sub.add_argument("--api-key", metavar="KEY", help="API key of the model server")
    configured(sub)

    sub = command("status", _status, "say where every call and sample is")
    sub.add_argument("--json", action="store_true", help="the daemon's answer as it is")
    _daemon_url(sub)


def _daemon_url(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--daemon", default=DAEMON_URL, metavar="URL", help=f"the daemon's API ({DAEMON_URL})"
    )


def _url(text: str) -> str:
    """Return the value of ``--daemon``.

    Raises:
        UserError: it is no URL.
    """
    try:
        parts = urlsplit(text)
        # Reading the port checks it.
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or any(character.isspace() for character in text):
        raise UserError(f"--daemon {text} is no URL: write it like {DAEMON_URL}")
    return text


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns its exit status: 0 done, 1 failed, 2 for the user to put right."""
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown and not getattr(args, "passes_flags_on", False):
        args.parser.error(f"unrecognised arguments: {' '.join(unknown)}")
    args.vllm_flags = unknown
    try:
        return int(args.function(args))
    except UserError as error:
        print(f"ridealong {args.command}: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    except ModuleNotFoundError as error:
        print(
            f"ridealong {args.command}: the package {error.name} is not installed: in a clone of"
            f" Ridealong, {_installation(args.command)}",
            file=sys.stderr,
        )
        return 2
    except BrokenPipeError:
        # The reader has left (`ridealong status | head`); keep the exit from flushing into it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _installation(command: str) -> str:
    """Return what installs all that a command needs."""
    if command in _ENGINE_COMMANDS:
        return "run deploy/setup.sh"
    extra = "sidecar" if command in _SIDECAR_COMMANDS else "learner"
    return f"pip install '.[{extra}]', or run deploy/setup.sh"
