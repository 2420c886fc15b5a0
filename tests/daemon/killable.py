"""A daemon with the fakes of ``fakes``, to be run in a process of its own and killed."""

import asyncio
import logging
import sys
from pathlib import Path

from daemon.config import DaemonConfig
from daemon.program import serve
from tests.daemon.fakes import FakeEngine, FakeTrainer


def main(config: DaemonConfig, log: Path) -> None:
    """Run until a signal; everything that happens is logged to ``log``."""
    logging.basicConfig(level=logging.INFO, filename=log)
    directory = Path(config.directory)
    engine = FakeEngine(directory, pause=0.02)
    try:
        asyncio.run(
            serve(config, engine, lambda report: FakeTrainer(directory, report, pause=0.03), 1000)
        )
    except BaseException:
        logging.exception("the daemon failed")
        sys.exit(1)
