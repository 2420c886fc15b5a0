"""Resume engines that nobody is going to resume.

A publisher that is killed between pause and resume leaves an engine which answers nothing. Whoever
publishes next to this engine runs the watchdog for it.
"""

import asyncio
import logging

from trainer.swap.client import Engine, SwapFailed

logger = logging.getLogger("ridealong.swap")


async def unpause_orphans(engine: Engine, poll_s: float) -> None:
    """Watch ``engine`` until cancelled.

    It is taken for an orphan when it is paused at two looks in a row, ``poll_s`` seconds apart, and
    no publication of ours runs. An engine that can't be reached is left alone.
    """
    suspected = False
    while True:
        await asyncio.sleep(poll_s)
        try:
            paused = not engine.publishing and await engine.is_paused()
            if paused and suspected and not engine.publishing:
                logger.warning("%s was left paused by nobody we know: resuming it", engine.url)
                await engine.recover()
                paused = False
        except SwapFailed as error:
            logger.debug("watchdog: %s", error)
            paused = False
        suspected = paused
