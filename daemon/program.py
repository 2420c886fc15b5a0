"""``ridealong daemon``: wires the parts together and runs them until a signal."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from daemon.api import Api, parse_loopback
from daemon.config import DaemonConfig
from daemon.ingest import Ingester
from daemon.learner import Progress, ServingEngine, TrainerFactory
from daemon.ownership import DATABASE, owned
from daemon.planner import Planner
from daemon.redaction import Redactor
from daemon.scheduler import Scheduler
from daemon.serving import Serving
from daemon.state import State
from daemon.status import StatusReport
from daemon.tail import Tail
from deploy.errors import UserError
from trainer.client import TrainerClient
from trainer.config import TrainerConfig
from trainer.swap.client import Engine
from trainer.swap.config import SwapConfig
from trainer.swap.watchdog import unpause_orphans
from trainer.versions import check_model

logger = logging.getLogger(__name__)


def run(config: DaemonConfig, trainer: TrainerConfig, swap: SwapConfig) -> int:
    """Run the daemon until SIGTERM or SIGINT. Returns the exit status.

    Raises:
        UserError: the engine's URL is none, the address is taken, another daemon owns the
            directory, the state is of another version, or the trainer can't use the model.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    return asyncio.run(_run(config, trainer, swap))


async def _run(config: DaemonConfig, trainer: TrainerConfig, swap: SwapConfig) -> int:
    check_engine(config.engine)
    engine = Engine(config.engine, swap)
    if not config.train:
        return await serve(config, engine, None, config.max_sequence_tokens)

    check_model(Path(config.model))

    def make_trainer(on_progress: Progress) -> TrainerClient:
        return TrainerClient(trainer, Path(config.model), Path(config.directory), on_progress)

    # A longer sample would not fit into one of the trainer's passes.
    longest = min(config.max_sequence_tokens, trainer.max_tokens_per_micro_batch)
    watchdog = asyncio.create_task(unpause_orphans(engine, swap.orphan_poll_s))
    try:
        return await serve(config, engine, make_trainer, longest)
    finally:
        watchdog.cancel()


def check_engine(url: str) -> None:
    """Check ``http(s)://[user:password@]host[:port][/prefix]``.

    Raises:
        UserError: it is not such a URL.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port  # Read for its check.
    except ValueError as error:
        raise UserError(f"daemon.engine {url!r} is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(
            f"daemon.engine {url!r}: give the vLLM server's URL, such as http://127.0.0.1:8000"
        )
    if parts.query or parts.fragment:
        raise UserError(f"daemon.engine {parts.hostname}: leave out query and fragment")


async def serve(
    config: DaemonConfig,
    engine: ServingEngine,
    make_trainer: TrainerFactory | None,
    max_sequence_tokens: int,
) -> int:
    """Run all parts until a signal; without ``make_trainer`` nothing is trained."""
    directory, traces = Path(config.directory), Path(config.traces)
    host, port = parse_loopback(config.listen)
    with owned(directory), contextlib.closing(State(directory / DATABASE)) as state:
        ingester = Ingester(traces, state, config.train_side_calls, Redactor(config.redact))
        serving = Serving(engine, state, directory, config.engine_poll_seconds)
        planner = Planner(config, state, ingester, max_sequence_tokens)
        scheduler = None
        if make_trainer is not None:
            scheduler = Scheduler(config, state, planner, make_trainer, serving)
        report = StatusReport(state, traces, ingester, serving, planner, scheduler)
        tail = Tail(traces, config.poll_seconds)
        async with _listening(Api(state, report, config.reward_window_seconds).app(), host, port):
            tail.start()
            parts = [_ingest(tail, ingester), serving.watch()]
            if scheduler is not None:
                parts.append(scheduler.run())
            try:
                await _until_stopped(parts)
            finally:
                tail.stop()
                if scheduler is not None:
                    await scheduler.close()
    return 0


async def _ingest(tail: Tail, ingester: Ingester) -> None:
    while True:
        await ingester.catch_up()
        await tail.wait()


async def _until_stopped(parts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run the parts, which never end by themselves, until SIGTERM, SIGINT or an error in one."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tasks = [asyncio.create_task(part) for part in parts]
    stopping = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (*tasks, stopping):
            task.cancel()
        await asyncio.gather(*tasks, stopping, return_exceptions=True)


@asynccontextmanager
async def _listening(app: web.Application, host: str, port: int) -> AsyncIterator[None]:
    runner = web.AppRunner(app, handle_signals=False)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise UserError(
                f"daemon.listen {host}:{port} can't be used ({error.strerror}): stop what runs "
                "there or choose another port"
            ) from None
        logger.info("API on http://%s:%d", *runner.addresses[0][:2])
        yield
    finally:
        await runner.cleanup()
