"""``ridealong up``: serve, sidecar and daemon on one machine, from one configuration file."""

import asyncio
import signal
import sys
from pathlib import Path

from deploy.config import Config
from deploy.supervisor import Supervisor, listening_socket


def run(path: Path | None, config: Config) -> int:
    """Run the three programs until a signal. Returns 0; raises UserError when one can't start."""
    return asyncio.run(_run(path, config))


async def _run(path: Path | None, config: Config) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    supervisor = Supervisor(Path(config.daemon.directory) / "logs")
    try:
        starting = asyncio.create_task(start(supervisor, path, config))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            print(f"agents connect to http://{config.sidecar.listen}/v1 ; Ctrl-C ends everything")
            await stopping
        starting.cancel()
    finally:
        await supervisor.stop()
    return 0


async def start(supervisor: Supervisor, path: Path | None, config: Config) -> None:
    """Start serve, sidecar and daemon, each when the one before is ready."""
    ridealong = [sys.executable, "-m", "deploy"]
    options = ["--config", str(path)] if path is not None else []
    await supervisor.start(
        "serve",
        [*ridealong, "serve", *options],
        ready_url=f"http://{config.serve.host}:{config.serve.port}/health",
    )
    await supervisor.start(
        "sidecar",
        [*ridealong, "sidecar", *options],
        ready_url=f"http://{config.sidecar.admin}/healthz",
        listener=listening_socket(config.sidecar.listen),
    )
    await supervisor.start(
        "daemon",
        [*ridealong, "daemon", *options],
        ready_url=f"http://{config.daemon.listen}/healthz",
    )
