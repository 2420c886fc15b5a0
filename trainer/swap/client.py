"""Publish a weight version into one serving engine while it serves.

Sequence (vLLM's reinforcement-learning endpoints, vLLM 0.30): pause with running requests kept →
start → update → finish, which names the version → prefix cache dropped, verified → resume. Then
the canary, right after resuming, because a paused scheduler computes nothing. The engine is resumed
whatever happens; a version that fails goes back to the one before it.
"""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from deploy.errors import UserError
from tokenization.tap import wire
from trainer.batch import Canary
from trainer.swap import canary as canaries
from trainer.swap.canary import CanaryDifference
from trainer.swap.config import SwapConfig

logger = logging.getLogger("ridealong.swap")

Version = tuple[str, Path, Canary]
"""Name, folder or file of safetensors, canary."""


class EngineUnreachable(UserError):
    """No vLLM answers at the URL."""


class PluginsMissing(UserError):
    """The vLLM at the URL was started without our plugins, or they are switched off."""


class SwapFailed(Exception):
    """The version is not live. The message says what happened and which weights serve now."""


class CanaryFailed(SwapFailed):
    """The engine's log-probs are not the trainer's; the message has both figures."""


class EngineState(msgspec.Struct, frozen=True):
    """What ``GET /ridealong/engine`` and ``GET /is_paused`` say."""

    version: str
    """``wire.UNKNOWN_VERSION`` while an update runs or after one that did not end well."""
    paused: bool
    model: str
    """The served model's name in requests."""
    dtype: str
    logprobs_mode: str
    max_model_len: int
    boot: str
    """Different after every restart of the server."""


class SwapReport(msgspec.Struct, frozen=True):
    """Figures of one publication; all times in seconds, 0 where nothing had to be done."""

    version: str
    pause_s: float
    """From asking for the pause to the resume's answer: an upper bound of the standstill."""
    update_s: float
    total_s: float
    """With the canary."""
    canary_abs_diff_mean: float
    canary_abs_diff_max: float
    cache_reset: bool


class Engine:
    """One serving engine. Publications of one object never overlap."""

    def __init__(self, url: str, config: SwapConfig) -> None:
        self.url = url.rstrip("/")
        self._config = config
        self._lock = asyncio.Lock()
        self._initialised_boot: str | None = None

    @property
    def publishing(self) -> bool:
        return self._lock.locked()

    async def probe(self) -> EngineState:
        """Ask the engine who it is.

        Raises:
            EngineUnreachable: nobody answers.
            PluginsMissing: it is a vLLM that can't be captured from or published to.
        """
        try:
            status, engine = await self._call("GET", "/ridealong/engine")
            if status == 404:
                raise PluginsMissing(
                    f"the vLLM at {self.url} runs without ridealong's plugins: start it with "
                    "`ridealong serve`"
                )
            if status == 200 and not engine["tap"]:
                raise PluginsMissing(
                    f"the token tap of {self.url} is off: {engine['tap_error']}; install the vLLM "
                    "version that ridealong's extras name"
                )
            paused = await self.is_paused()
            return msgspec.convert({**engine, "paused": paused}, EngineState)
        except SwapFailed as error:
            raise EngineUnreachable(str(error)) from error
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            raise PluginsMissing(
                f"{self.url} does not answer like a vLLM with ridealong's plugins: {error}"
            ) from error

    async def is_paused(self) -> bool:
        """Raises ``SwapFailed`` when the engine doesn't say."""
        return bool((await self._admin("GET", "/is_paused")).get("is_paused"))

    async def publish(
        self, version: str, weights: Path, canary: Canary, previous: Version | None
    ) -> SwapReport:
        """Make ``version`` the serving one. Does nothing when it already is and its canary holds.

        Args:
            version: name that every token sampled from now on carries.
            weights: folder or file of safetensors, as the engine's host sees it.
            canary: the trainer's log-probs under these weights.
            previous: what to go back to when the version fails; None leaves the failed one.

        Raises:
            UserError: the engine can't be reached or lacks our plugins.
            CanaryFailed: the engine computes something else than the trainer.
            SwapFailed: any other step failed.
        """
        async with self._lock:
            began = time.monotonic()
            state = await self.probe()
            tolerance = self._tolerance(state.dtype)
            if state.version == version and not state.paused:
                difference = await self._canary(state.model, canary)
                if difference.within(tolerance):
                    return _report(version, began, difference)
            try:
                pause_s, update_s = await self._swap(state.boot, version, weights)
                difference = await self._canary(state.model, canary)
                if not difference.within(tolerance):
                    raise CanaryFailed(
                        f"canary of {version}: log-probs differ by {difference.mean:.2e} on "
                        f"average (max {difference.max:.2e}), allowed {tolerance:.2e}"
                    )
            except SwapFailed as error:
                outcome = await self._roll_back(state, version, previous)
                raise type(error)(f"{error}; {outcome}") from error
            return _report(version, began, difference, pause_s, update_s)

    async def recover(self) -> None:
        """Bring back an engine whose publisher is gone: end its update if one is open, resume.

        Raises:
            SwapFailed: it stays paused.
        """
        await self._abandon_update()
        await self._resume()

    async def _swap(self, boot: str, version: str, weights: Path) -> tuple[float, float]:
        """Return how long scheduling stood still and how long the update took, in seconds."""
        if self._initialised_boot != boot:
            await self._admin("POST", "/init_weight_transfer_engine", {"init_info": {}})
            self._initialised_boot = boot
        paused_at = time.monotonic()
        try:
            await self._admin("POST", "/pause?mode=keep&clear_cache=true")
            update_s = await self._update(version, _absolute(weights))
            await self._reset_cache()
        finally:
            await self._resume()
        return time.monotonic() - paused_at, update_s

    async def _update(self, version: str, weights: str) -> float:
        began = time.monotonic()
        try:
            try:
                await self._admin("POST", "/start_weight_update")
            except SwapFailed:
                # An update that a killed publisher left open blocks every later one.
                await self._abandon_update()
                await self._admin("POST", "/start_weight_update")
            await self._admin(
                "POST",
                "/update_weights",
                {"update_info": {"path": weights}},
                self._config.update_timeout_s,
            )
            await self._admin("POST", "/finish_weight_update", {"weight_version": version})
        except BaseException:
            # Without this a resumed engine would run on half-loaded layers.
            await self._abandon_update()
            raise
        return time.monotonic() - began

    async def _abandon_update(self) -> None:
        """End an open update; the engine answers with an error whether or not there was one."""
        try:
            await self._call("POST", "/update_weights", {"update_info": {"abandon": True}})
        except SwapFailed:
            logger.exception("the open weight update of %s could not be ended", self.url)

    async def _reset_cache(self) -> None:
        answer = await self._admin("POST", "/ridealong/reset_prefix_cache")
        if answer.get("reset") is not True:
            raise SwapFailed(f"{self.url} did not drop its prefix cache: {answer}")

    async def _resume(self) -> None:
        last: SwapFailed | None = None
        for attempt in range(self._config.resume_attempts):
            await asyncio.sleep(min(0.2 * attempt, 2.0))
            try:
                await self._admin("POST", "/resume")
                if not await self.is_paused():
                    return
            except SwapFailed as error:
                last = error
        logger.error("%s stays paused", self.url)
        raise SwapFailed(f"{self.url} could not be resumed: {last}")

    async def _canary(self, model: str, canary: Canary) -> CanaryDifference:
        reply = await self._admin(
            "POST",
            "/v1/completions",
            canaries.request(canary, model),
            self._config.canary_timeout_s,
        )
        try:
            return canaries.compare(canary, reply)
        except ValueError as error:
            raise CanaryFailed(f"{self.url}: {error}") from error

    async def _roll_back(self, state: EngineState, failed: str, previous: Version | None) -> str:
        """Go back to ``previous`` and return a clause for the error message.

        Where that does not work either, the weights that serve lose their name, so that nothing
        sampled from them is taken for a version's.
        """
        if previous is None or previous[0] == failed:
            await self._disown(failed)
            return "there is no earlier version to go back to"
        version, weights, canary = previous
        try:
            await self._swap(state.boot, version, weights)
            difference = await self._canary(state.model, canary)
        except SwapFailed as error:
            logger.error("%s: going back to %s failed too: %s", self.url, version, error)
            await self._disown(failed, version)
            return f"going back to {version} failed too: {error}"
        if not difference.within(self._tolerance(state.dtype)):
            await self._disown(version)
            return f"went back to {version}, whose canary differs by {difference.mean:.2e} as well"
        return f"{version} serves again"

    async def _disown(self, *versions: str) -> None:
        try:
            if (await self._admin("GET", "/ridealong/engine")).get("version") in versions:
                await self._admin(
                    "POST", "/update_weight_version", {"new_version": wire.UNKNOWN_VERSION}
                )
        except SwapFailed as error:
            logger.error("%s: its weights keep a name that is not theirs: %s", self.url, error)

    def _tolerance(self, dtype: str) -> float:
        if dtype == "float32":
            return self._config.canary_tolerance_float32
        return self._config.canary_tolerance_half

    async def _admin(
        self, method: str, path: str, body: Any = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        status, answer = await self._call(method, path, body, timeout_s)
        if status != 200:
            raise SwapFailed(f"{method} {self.url}{path}: {status} {_reason(answer)}")
        return answer

    async def _call(
        self, method: str, path: str, body: Any = None, timeout_s: float | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Return status and JSON answer. Raises ``SwapFailed`` when there is none in time."""
        timeout = aiohttp.ClientTimeout(total=timeout_s or self._config.admin_timeout_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, self.url + path, json=body) as response,
            ):
                text = await response.text()
                status = response.status
        except TimeoutError:
            raise SwapFailed(f"{method} {self.url}{path}: no answer in {timeout.total} s") from None
        except aiohttp.ClientError as error:
            raise SwapFailed(f"{method} {self.url}{path}: {error}") from error
        try:
            answer = msgspec.json.decode(text) if text else {}
        except msgspec.DecodeError:
            answer = {"error": text[:500]}
        return status, answer if isinstance(answer, dict) else {"answer": answer}


def _absolute(path: Path) -> str:
    # The engine has a working directory of its own.
    return str(path.absolute())


def _reason(answer: dict[str, Any]) -> str:
    error = answer.get("error", answer)
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:500]


def _report(
    version: str,
    began: float,
    difference: CanaryDifference,
    pause_s: float = 0.0,
    update_s: float = 0.0,
) -> SwapReport:
    return SwapReport(
        version=version,
        pause_s=pause_s,
        update_s=update_s,
        total_s=time.monotonic() - began,
        canary_abs_diff_mean=difference.mean,
        canary_abs_diff_max=difference.max,
        cache_reset=pause_s > 0.0,
    )
