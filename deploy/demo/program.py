"""``ridealong demo``: the whole loop on one machine, with a small model and a third-party agent.

The programs are started as ``ridealong up`` does, from a configuration written to the run folder.
"""

import argparse
import asyncio
import contextlib
import fcntl
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from daemon.client import AsyncDaemonClient
from deploy import config, up
from deploy.demo import report
from deploy.demo.agent_process import AgentProcess
from deploy.demo.bystander import Bystander
from deploy.demo.controller import Controller
from deploy.demo.journal import Journal
from deploy.demo.model import ensure_model_apart
from deploy.demo.progress import Display
from deploy.demo.settings import Addresses, Settings, configuration, to_toml
from deploy.demo.tasks import tasks
from deploy.errors import UserError
from deploy.supervisor import Supervisor, free_port

STEPS = 8
SETTLE_SECONDS = 2.0
CONFIGURATION = "ridealong.toml"
HEAVY = ("weights", "checkpoints", "batches")
INTERRUPTED = 130


def run(args: argparse.Namespace) -> int:
    """Run the demo: ``args`` has ``steps`` (None: the full length), ``seed`` and ``directory``.

    Returns:
        0 when done (at full length only if the reward has clearly risen), 1 when it has not,
        130 after Ctrl-C or SIGTERM.

    Raises:
        UserError: something the user can put right, such as a missing package.
    """
    steps = STEPS if args.steps is None else args.steps
    if steps < 1:
        raise UserError("--steps must be at least 1")
    settings = Settings(seed=args.seed, steps=steps)
    directory = args.directory.absolute()
    with _owned(directory):
        return asyncio.run(_run(settings, directory))


async def _run(settings: Settings, directory: Path) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    demo = asyncio.create_task(_demo(settings, directory))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({demo, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if demo.done():
        return demo.result()
    print("ending everything", flush=True)
    demo.cancel()
    await asyncio.wait({demo})
    return INTERRUPTED


async def _demo(settings: Settings, directory: Path) -> int:
    began = time.time()
    display = Display(settings.steps)
    kept = _fresh(directory)
    if kept is not None:
        display.event(f"the last run's report, traces and logs are in {kept}")
    display.event("the model: SmolLM2-135M-Instruct (converted once, a minute or two)")
    model = await ensure_model_apart()
    addresses = Addresses(*(free_port() for _ in range(4)))
    path = directory / CONFIGURATION
    sections = configuration(settings, addresses, model, directory)
    path.write_text(to_toml(sections), encoding="utf-8")
    journal = Journal(directory / "rollouts.jsonl")
    daemon = AsyncDaemonClient(addresses.daemon_url)
    supervisor = Supervisor(directory / "logs", on_event=display.event)
    agent = AgentProcess(directory / "logs" / "agent.log")
    bystander = Bystander(addresses.agent_base_url)

    def on_status(status: dict[str, Any]) -> None:
        display.status(status)
        bystander.status(status)

    try:
        display.event(f"starting vLLM, sidecar and daemon (minutes); logs in {directory / 'logs'}")
        await up.start(supervisor, path, config.load(path))
        display.event("they are up: the agent begins, and the daemon trains from its traffic")
        display.event(f"look inside: ridealong status --daemon {addresses.daemon_url}")
        controller = Controller(
            settings,
            daemon,
            agent,
            tasks(settings.seed),
            addresses.agent_base_url,
            journal,
            on_status,
            display.attempt,
        )
        with display.shown():
            status = await controller.run()
        await bystander.close()
        # The daemon reads the last records a moment after they were written.
        await asyncio.sleep(SETTLE_SECONDS)
        runs = [attempt.run for attempt in journal.attempts]
        # A reply that broke off may have left no record.
        runs += [reply.run for reply in bystander.replies if reply.finish is not None]
        calls = await _calls(daemon, runs)
    finally:
        await agent.close()
        await supervisor.stop()
    found = report.build(
        settings, journal.attempts, bystander.replies, status, calls, time.time() - began
    )
    report.write(found, directory)
    _show(found, directory)
    return 0 if settings.steps < STEPS or found["reward_risen"] else 1


async def _calls(daemon: AsyncDaemonClient, runs: Sequence[str]) -> list[dict[str, Any]]:
    """Return what the daemon says of every call of these runs."""
    found: list[dict[str, Any]] = []
    for run in runs:
        found += [call | {"run": run} for call in (await daemon.run(run))["calls"]]
    return found


def _show(found: dict[str, Any], directory: Path) -> None:
    console = Console(highlight=False)
    console.print(report.table(found))
    for line in report.summary(found):
        console.print(line, soft_wrap=True)
    console.print(
        f"written: {directory / 'report.json'}, {directory / 'reward.png'}", soft_wrap=True
    )


def _fresh(directory: Path) -> Path | None:
    """Make the run folder. An earlier run's is renamed, without its gigabytes of weights, and its
    new name returned.

    Raises:
        UserError: the folder holds something else.
    """
    kept = None
    if directory.exists() and any(directory.iterdir()):
        if not (directory / CONFIGURATION).is_file():
            raise UserError(f"{directory} is not a demo's run folder; choose another --directory")
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(directory.stat().st_mtime))
        kept = directory.with_name(f"{directory.name}-{stamp}")
        directory.rename(kept)
        for name in HEAVY:
            shutil.rmtree(kept / "state" / name, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    return kept


@contextlib.contextmanager
def _owned(directory: Path) -> Iterator[None]:
    """Hold the run folder, so that a second demo doesn't move it away under the first.

    Raises:
        UserError: another demo holds it, it is no folder, or the place can't be written.
    """
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is not a folder; choose another --directory")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = directory.with_name(f".{directory.name}.lock").open("w")
    except OSError as error:
        raise UserError(f"can't write to {directory.parent}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another demo runs in {directory}; end it or choose another --directory"
            ) from None
        yield
