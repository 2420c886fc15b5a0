"""The token tap as a vLLM endpoint plugin (entry point ``vllm.endpoint_plugins``).

Named in ``VLLM_PLUGINS``, it gives every tapped request its exact tokens (``tokenization.tap.wire``
says how they travel) and adds three routes:

``GET /ridealong/tap/<nonce>``
    All events of a call, once the engine is done with it; 404 when the call is unknown.
``GET /ridealong/engine``
    What serves here: weight version, dtype, logprobs mode, model, and whether the tap works.
``POST /ridealong/reset_prefix_cache``
    Drop all cached KV, also that of running requests (they recompute it), and say whether it was
    really dropped, which vLLM's own route does not.
"""

import asyncio
import logging
import os
import uuid
from argparse import Namespace
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import JSONResponse

from tokenization.tap import internals, wire
from tokenization.tap.calls import Calls
from tokenization.tap.middleware import TapMiddleware
from tokenization.tap.observer import EngineObserver

logger = logging.getLogger("vllm.ridealong.tap")

VERSION_ENV = "RIDEALONG_WEIGHT_VERSION"
"""Environment variable with the name of the weights that the server starts from."""

SETTLE_S = 2.0
"""How long ``GET /ridealong/tap/<nonce>`` waits for the engine to be done with the call."""


class TokenTap:
    """Implements ``vllm.plugins.endpoint_plugins.interface.EndpointPlugin``."""

    name = "ridealong"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._calls = Calls()
        self._observer: EngineObserver | None = None
        self._engine_client: Any = None
        self._problem = "the server is still starting"
        self._engine: dict[str, Any] = {}

    def attach_router(self, app: FastAPI) -> None:
        app.add_middleware(
            TapMiddleware, calls=self._calls, enabled=lambda: self._observer is not None
        )
        router = APIRouter()
        router.get(wire.PULL_PATH + "{nonce}")(self.pull)
        router.get("/ridealong/engine")(self.engine)
        router.post("/ridealong/reset_prefix_cache")(self.reset_prefix_cache)
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Verify vLLM, wrap its engine client, publish the name of the initial weights.

        Where vLLM is not as expected the tap stays off, with an error in the log: traffic goes on.
        """
        self._engine_client = engine_client
        served = args.served_model_name or [args.model]
        self._engine = {
            "model": served[0],
            "boot": uuid.uuid4().hex,
            "dtype": str(engine_client.model_config.dtype).removeprefix("torch."),
            "logprobs_mode": str(engine_client.model_config.logprobs_mode),
            "max_model_len": engine_client.model_config.max_model_len,
        }
        problems = internals.verify(engine_client)
        if (getattr(args, "api_server_count", None) or 1) > 1:
            problems.append("there are several API server processes: use --api-server-count 1")
        if problems:
            self._problem = "; ".join(problems)
            logger.error("ridealong tap is OFF, calls are not captured: %s", self._problem)
            return
        version = os.environ.get(VERSION_ENV, "v0")
        observer = EngineObserver(engine_client, version)
        await engine_client.update_weight_version(version)
        self._observer = observer
        logger.info("ridealong tap is on, weight version %s", version)

    async def pull(self, nonce: str) -> Response:
        call = self._calls.get(nonce)
        if call is None:
            return JSONResponse({"error": f"no call {nonce} within the last minute"}, 404)
        try:
            await asyncio.wait_for(call.settled.wait(), SETTLE_S)
        except TimeoutError:
            logger.warning("ridealong tap: call %s had not ended when it was asked for", nonce)
        return Response(call.events(), media_type="application/jsonl")

    async def engine(self) -> dict[str, Any]:
        if self._observer is None:
            return {**self._engine, "tap": 0, "tap_error": self._problem, "version": None}
        return {
            **self._engine,
            "tap": 1,
            "tap_failures": self._observer.failures,
            "version": self._observer.version,
        }

    async def reset_prefix_cache(self) -> Response:
        try:
            reset = await self._engine_client.reset_prefix_cache(
                reset_running_requests=True, reset_connector=True
            )
            await self._engine_client.reset_encoder_cache()
        except Exception as error:  # any failure means the same: stale cache
            logger.exception("ridealong: the prefix cache could not be reset")
            return JSONResponse({"reset": False, "error": str(error)}, 500)
        return JSONResponse({"reset": reset is True})
