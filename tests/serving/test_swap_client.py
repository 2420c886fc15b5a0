"""The publisher against an engine that misbehaves in ways the real one can't be made to."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.conftest import free_port
from tokenization.tap import wire
from trainer.batch import Canary
from trainer.swap import canary as canaries
from trainer.swap.client import (
    CanaryFailed,
    Engine,
    EngineUnreachable,
    PluginsMissing,
    SwapFailed,
)
from trainer.swap.config import SwapConfig
from trainer.swap.watchdog import unpause_orphans

CONFIG = SwapConfig(resume_attempts=3)
# For steps that hang. A busy machine must still answer the other steps in time.
HASTY = msgspec.structs.replace(CONFIG, admin_timeout_s=1.5, update_timeout_s=1.5)
CANARY = Canary([4, 5, 6], [-1.0, -2.0])
V0 = ("v0", Path("/weights/v0"), CANARY)


class FakeFaultyEngine:
    """Answers the routes of a swap and keeps a log; ``faults`` replaces a route's answers."""

    def __init__(self) -> None:
        self.paused = False
        self.version = "v0"
        self.log: list[str] = []
        self.faults: dict[str, list[Any]] = {}
        self.logprobs = list(CANARY.logprobs)
        self.tap: dict[str, Any] = {"tap": 1}
        self.hanging = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        body = await request.json() if request.can_read_body else {}
        abandoned = body.get("update_info", {}).get("abandon", False)
        if path not in ("/is_paused", "/ridealong/engine"):
            self.log.append("abandon" if abandoned else path)
        if self.faults.get(path):
            fault = self.faults[path].pop(0)
            if fault == "hang":
                self.hanging.set()
                await asyncio.sleep(2 * HASTY.admin_timeout_s)
            elif fault is not None:
                return fault
        if abandoned:
            return web.json_response({"error": {"message": "abandoned"}}, status=500)
        return web.json_response(self.answer(path, body))

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        match path:
            case "/pause":
                self.paused = True
            case "/resume":
                self.paused = False
            case "/is_paused":
                return {"is_paused": self.paused}
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/finish_weight_update":
                self.version = body["weight_version"]
            case "/ridealong/reset_prefix_cache":
                return {"reset": True}
            case "/ridealong/engine":
                return {
                    "version": self.version,
                    "model": "smol",
                    "dtype": "float32",
                    "logprobs_mode": "processed_logprobs",
                    "max_model_len": 8,
                    "boot": "b1",
                    **self.tap,
                }
            case "/v1/completions":
                pairs = zip(CANARY.token_ids[1:], self.logprobs, strict=True)
                scores = [{str(token): {"logprob": logprob}} for token, logprob in pairs]
                return {"choices": [{"prompt_logprobs": [None, *scores]}]}
        return {}


@pytest.fixture
def fake() -> FakeFaultyEngine:
    return FakeFaultyEngine()


@pytest.fixture
async def engine(fake: FakeFaultyEngine) -> AsyncIterator[Engine]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.handle)
    async with TestServer(app) as server:
        yield Engine(str(server.make_url("")), CONFIG)


@pytest.fixture
def hasty_engine(engine: Engine) -> Engine:
    return Engine(engine.url, HASTY)


def error(message: str = "broken") -> web.Response:
    return web.json_response({"error": {"message": message}}, status=500)


async def test_order_of_a_swap(fake: FakeFaultyEngine, engine: Engine) -> None:
    report = await engine.publish("v1", Path("/weights/v1"), CANARY, V0)
    assert fake.log == [
        "/init_weight_transfer_engine",
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/ridealong/reset_prefix_cache",
        "/resume",
        "/v1/completions",
    ]
    assert (fake.version, fake.paused, report.cache_reset) == ("v1", False, True)
    await engine.publish("v2", Path("/weights/v2"), CANARY, V0)
    assert fake.log.count("/init_weight_transfer_engine") == 1


@pytest.mark.parametrize("step", ["/pause", "/update_weights", "/finish_weight_update"])
@pytest.mark.parametrize("fault", ["error", "hang"])
async def test_resumed_whatever_fails(
    fake: FakeFaultyEngine, hasty_engine: Engine, step: str, fault: str
) -> None:
    fake.faults[step] = [error() if fault == "error" else "hang"]
    with pytest.raises(SwapFailed, match=step):
        await hasty_engine.publish("v1", Path("/weights/v1"), CANARY, None)
    assert not fake.paused
    assert fake.log[-1] == "/resume"
    if step != "/pause":
        assert fake.log[-2] == "abandon", "a half-done update must end before the engine runs"


async def test_failed_update_goes_back(fake: FakeFaultyEngine, engine: Engine) -> None:
    fake.faults["/update_weights"] = [error("the update lacks x")]
    with pytest.raises(SwapFailed, match="lacks x; v0 serves again"):
        await engine.publish("v1", Path("/weights/v1"), CANARY, V0)
    assert fake.version == "v0"


async def test_an_update_left_open_is_ended_first(fake: FakeFaultyEngine, engine: Engine) -> None:
    fake.faults["/start_weight_update"] = [error("already active")]
    await engine.publish("v1", Path("/weights/v1"), CANARY, None)
    start = fake.log.index("/start_weight_update")
    assert fake.log[start : start + 3] == [
        "/start_weight_update",
        "abandon",
        "/start_weight_update",
    ]


async def test_resume_is_tried_again(fake: FakeFaultyEngine, engine: Engine) -> None:
    fake.faults["/resume"] = [error(), error()]
    await engine.publish("v1", Path("/weights/v1"), CANARY, None)
    assert not fake.paused


async def test_resume_that_never_works_is_an_error(fake: FakeFaultyEngine, engine: Engine) -> None:
    fake.faults["/resume"] = [error() for _ in range(CONFIG.resume_attempts)]
    with pytest.raises(SwapFailed, match="could not be resumed"):
        await engine.publish("v1", Path("/weights/v1"), CANARY, None)


async def test_cancelled_publication_resumes(fake: FakeFaultyEngine, engine: Engine) -> None:
    fake.faults["/update_weights"] = ["hang"]
    publication = asyncio.create_task(engine.publish("v1", Path("/w"), CANARY, None))
    await fake.hanging.wait()
    publication.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publication
    assert not fake.paused
    assert not engine.publishing


async def test_cache_that_is_not_reset_is_an_error(fake: FakeFaultyEngine, engine: Engine) -> None:
    fake.faults["/ridealong/reset_prefix_cache"] = [web.json_response({"reset": False})]
    with pytest.raises(SwapFailed, match="prefix cache"):
        await engine.publish("v1", Path("/weights/v1"), CANARY, None)


async def test_canary_names_the_figures(fake: FakeFaultyEngine, engine: Engine) -> None:
    fake.logprobs[0] = -1.01
    figures = r"differ by 5\.00e-03 on average \(max 1\.00e-02\), allowed 5\.00e-04"
    with pytest.raises(CanaryFailed, match=figures + "; went back to v0, whose canary differs"):
        await engine.publish("v1", Path("/weights/v1"), CANARY, V0)
    assert fake.version == wire.UNKNOWN_VERSION, "weights that no canary holds for have no name"


async def test_same_version_is_checked_and_left(fake: FakeFaultyEngine, engine: Engine) -> None:
    report = await engine.publish(*V0, previous=None)
    assert fake.log == ["/v1/completions"]
    assert (report.pause_s, report.cache_reset) == (0.0, False)


async def test_same_version_with_wrong_weights_is_published_again(
    fake: FakeFaultyEngine, engine: Engine
) -> None:
    fake.logprobs[0] = -9.0
    with pytest.raises(CanaryFailed):
        await engine.publish(*V0, previous=None)
    assert "/update_weights" in fake.log


async def test_vllm_without_plugins(fake: FakeFaultyEngine, engine: Engine) -> None:
    fake.faults["/ridealong/engine"] = [web.Response(status=404)]
    with pytest.raises(PluginsMissing, match="ridealong serve"):
        await engine.probe()


async def test_tap_that_is_off(fake: FakeFaultyEngine, engine: Engine) -> None:
    fake.tap = {"tap": 0, "tap_error": "add_request is missing", "version": None}
    with pytest.raises(PluginsMissing, match="add_request is missing"):
        await engine.probe()


async def test_something_else_answers(fake: FakeFaultyEngine, engine: Engine) -> None:
    fake.faults["/ridealong/engine"] = [web.Response(text="<html>hello</html>")]
    with pytest.raises(PluginsMissing, match="does not answer like"):
        await engine.probe()


async def test_nobody_answers() -> None:
    with pytest.raises(EngineUnreachable, match=r"127\.0\.0\.1"):
        await Engine(f"http://127.0.0.1:{free_port()}", CONFIG).probe()


async def test_watchdog_wants_two_looks(fake: FakeFaultyEngine, engine: Engine) -> None:
    watchdog = asyncio.create_task(unpause_orphans(engine, poll_s=0.05))
    for _ in range(5):
        fake.paused = not fake.paused
        await asyncio.sleep(0.05)
    fake.paused = True
    deadline = time.monotonic() + 5
    while fake.paused:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert fake.log[-2:] == ["abandon", "/resume"]
    watchdog.cancel()


async def test_watchdog_leaves_a_running_publication_alone(
    fake: FakeFaultyEngine, hasty_engine: Engine
) -> None:
    fake.faults["/update_weights"] = ["hang"]
    watchdog = asyncio.create_task(unpause_orphans(hasty_engine, poll_s=0.05))
    with pytest.raises(SwapFailed):
        await hasty_engine.publish("v1", Path("/weights/v1"), CANARY, None)
    watchdog.cancel()
    assert fake.log.count("/resume") == 1


async def test_watchdog_survives_an_engine_that_is_away() -> None:
    engine = Engine(f"http://127.0.0.1:{free_port()}", CONFIG)
    watchdog = asyncio.create_task(unpause_orphans(engine, poll_s=0.02))
    await asyncio.sleep(0.2)
    assert not watchdog.done()
    watchdog.cancel()


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"choices": []},
        {"choices": [{"prompt_logprobs": None}]},
        {"choices": [{"prompt_logprobs": [None, {"5": {"logprob": -1.0}}]}]},
        {"choices": [{"prompt_logprobs": [None, {"9": {"logprob": -1.0}}, {"6": {}}]}]},
    ],
)
def test_canary_without_an_answer(reply: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no log-probs"):
        canaries.compare(CANARY, reply)


def test_not_a_number_is_never_within_tolerance() -> None:
    scores = [{"5": {"logprob": math.nan}}, {"6": {"logprob": -2.0}}]
    difference = canaries.compare(CANARY, {"choices": [{"prompt_logprobs": [None, *scores]}]})
    assert not difference.within(1e9)


def test_config_refuses_unknown_keys_and_nonsense() -> None:
    for bad in ({"unknown": 1}, {"admin_timeout_s": 0}, {"keep_versions": 1}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(bad, SwapConfig)
