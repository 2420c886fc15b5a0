"""Asks the model servers about their token tap, and for tokens of calls whose client has gone."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import aiohttp

from sidecar.tokens.sources import Source, vllm_has_token_ids
from tokenization.tap import wire

_log = logging.getLogger(__name__)

_ENGINE_PATH = "/ridealong/engine"
_VERSION_PATH = "/version"
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5)
_UNREACHABLE_SECONDS = 5.0
_REACHABLE_SECONDS = 60.0
# The engine itself waits up to 2 s for the call to end.
_PULL_TIMEOUT = aiohttp.ClientTimeout(total=2.5)


class TapClient:
    """HTTP client for the tap's two endpoints; all failures are answers, not exceptions."""

    def __init__(self, upstreams: Sequence[str], *, api: bool) -> None:
        """``upstreams``: URLs of the model servers, with their path prefixes; ``api``: look for
        the API source where there is no tap.
        """
        self.sources: dict[str, Source] = {}
        """What gives tokens at a server, by URL, as far as is known."""
        self._upstreams = upstreams
        self._api = api
        self._session = aiohttp.ClientSession()

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def pull(self, upstream: str, nonce: str, authorization: str | None) -> list[str] | None:
        """Return the tap's lines of a call after its end, None if there are none to be had."""
        headers = {"authorization": authorization} if authorization else {}
        url = f"{upstream}{wire.PULL_PATH}{nonce}"
        try:
            async with self._session.get(url, headers=headers, timeout=_PULL_TIMEOUT) as reply:
                if reply.status != 200 or reply.content_type != "application/jsonl":
                    return None
                text = await reply.text()
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as error:
            _log.warning("tokens of a cancelled call could not be fetched: %s", _reason(error))
            return None
        return text.splitlines() or None

    async def probe(self, upstream: str) -> bool:
        """Say whether a model server's tap is at work.

        Raises:
            aiohttp.ClientError, TimeoutError: the model server can't be reached.
        """
        url = upstream + _ENGINE_PATH
        async with self._session.get(url, timeout=_PROBE_TIMEOUT) as reply:
            if reply.status != 200 or reply.content_type != "application/json":
                return False
            answer = await reply.json()
            return isinstance(answer, dict) and bool(answer.get("tap"))

    async def probe_api(self, upstream: str) -> bool:
        """Say whether a model server is a vLLM whose API can tell token ids.

        Raises:
            aiohttp.ClientError, TimeoutError: the model server can't be reached.
        """
        async with self._session.get(upstream + _VERSION_PATH, timeout=_PROBE_TIMEOUT) as reply:
            if reply.status != 200 or reply.content_type != "application/json":
                return False
            return vllm_has_token_ids(await reply.json())

    async def watch(self, report: Callable[[bool], None]) -> None:
        """Probe for ever, and log what the user should know.

        ``report`` is called with whether all model servers that answer have the tap.
        """
        async with asyncio.TaskGroup() as servers:
            for upstream in self._upstreams:
                servers.create_task(self._watch(upstream, report))

    async def _watch(self, upstream: str, report: Callable[[bool], None]) -> None:
        known: str | None = None
        while True:
            try:
                source = await self._source(upstream)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                if known != "unreachable":
                    _log.warning(
                        "the model server %s can't be reached (%s): requests will fail until it is "
                        "started",
                        upstream,
                        _reason(error),
                    )
                known = "unreachable"
                await asyncio.sleep(_UNREACHABLE_SECONDS)
                continue
            if source != known:
                self._tell(upstream, source, known)
            known = self.sources[upstream] = source
            report(all(source == "tap" for source in self.sources.values()))
            await asyncio.sleep(_REACHABLE_SECONDS)

    async def _source(self, upstream: str) -> Source:
        if await self.probe(upstream):
            return "tap"
        return "api" if self._api and await self.probe_api(upstream) else "none"

    def _tell(self, upstream: str, source: Source, before: str | None) -> None:
        if source == "none":
            _log.warning(
                "NO TOKENS ARE CAPTURED: the model server %s runs without the token tap. "
                "Traffic goes on; start it with `ridealong serve` to train from these calls",
                upstream,
            )
        elif source == "api":
            _log.warning(
                "the model server %s runs without the token tap: tokens are taken from its API, "
                "for chat and completions calls only and without weight versions; start it with "
                "`ridealong serve` to train from these calls",
                upstream,
            )
        elif before in ("api", "none"):
            _log.warning("the model server's token tap is at work now")


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
