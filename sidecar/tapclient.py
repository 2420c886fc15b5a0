"""Asks the model server about its token tap, and for tokens of calls whose client has gone."""

import asyncio
import logging
from collections.abc import Callable

import aiohttp

from tokenization.tap import wire

_log = logging.getLogger(__name__)

_ENGINE_PATH = "/ridealong/engine"
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5)
_UNREACHABLE_SECONDS = 5.0
_REACHABLE_SECONDS = 60.0
# The engine itself waits up to 2 s for the call to end.
_PULL_TIMEOUT = aiohttp.ClientTimeout(total=2.5)


class TapClient:
    """HTTP client for the tap's two endpoints; all failures are answers, not exceptions."""

    def __init__(self, upstream: str) -> None:
        """``upstream``: URL of the model server, with its path prefix."""
        self._upstream = upstream
        self._session = aiohttp.ClientSession()

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def pull(self, nonce: str, authorization: str | None) -> list[str] | None:
        """Return the tap's lines of a call after its end, None if there are none to be had."""
        headers = {"authorization": authorization} if authorization else {}
        url = f"{self._upstream}{wire.PULL_PATH}{nonce}"
        try:
            async with self._session.get(url, headers=headers, timeout=_PULL_TIMEOUT) as reply:
                if reply.status != 200 or reply.content_type != "application/jsonl":
                    return None
                text = await reply.text()
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as error:
            _log.warning("tokens of a cancelled call could not be fetched: %s", _reason(error))
            return None
        return text.splitlines() or None

    async def probe(self) -> bool:
        """Say whether the model server's tap is at work.

        Raises:
            aiohttp.ClientError, TimeoutError: the model server can't be reached.
        """
        url = self._upstream + _ENGINE_PATH
        async with self._session.get(url, timeout=_PROBE_TIMEOUT) as reply:
            if reply.status != 200 or reply.content_type != "application/json":
                return False
            answer = await reply.json()
            return isinstance(answer, dict) and bool(answer.get("tap"))

    async def watch(self, report: Callable[[bool], None]) -> None:
        """Probe for ever: call ``report`` with every answer, and log what the user should know."""
        known: bool | str | None = None
        while True:
            try:
                available = await self.probe()
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                if known != "unreachable":
                    _log.warning(
                        "the model server %s can't be reached (%s): requests will fail until it is "
                        "started",
                        self._upstream,
                        _reason(error),
                    )
                known = "unreachable"
                await asyncio.sleep(_UNREACHABLE_SECONDS)
                continue
            if not available and known is not False:
                _log.warning(
                    "NO TOKENS ARE CAPTURED: the model server %s runs without the token tap. "
                    "Traffic goes on; start it with `ridealong serve` to train from these calls",
                    self._upstream,
                )
            elif available and known is False:
                _log.warning("the model server's token tap is at work now")
            known = available
            report(available)
            await asyncio.sleep(_REACHABLE_SECONDS)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
