"""The plugin as a whole where vLLM is not what it expects: the tap is off and says why."""

from argparse import Namespace

import httpx
import pytest
from fastapi import FastAPI

from tests.serving.test_observer import FakeEngineClient
from tokenization.tap.plugin import VERSION_ENV, TokenTap

ARGS = Namespace(served_model_name=["smol"], model="folder", api_server_count=None)


async def engine_state(client: FakeEngineClient, args: Namespace = ARGS) -> dict[str, object]:
    app = FastAPI()
    tap = TokenTap()
    tap.attach_router(app)
    await tap.init_state(client, app.state, args)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        return dict((await http.get("/ridealong/engine")).json())


async def test_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VERSION_ENV, "v7")
    state = await engine_state(FakeEngineClient())
    assert (state["tap"], state["version"], state["model"]) == (1, "v7", "smol")


async def test_off_in_a_changed_vllm() -> None:
    client = FakeEngineClient()
    client.output_processor.process_outputs = client.output_processor.abort_requests  # type: ignore
    state = await engine_state(client)
    assert state["tap"] == 0
    assert "process_outputs" in str(state["tap_error"])


async def test_off_with_several_api_servers() -> None:
    args = Namespace(**{**vars(ARGS), "api_server_count": 2})
    state = await engine_state(FakeEngineClient(), args)
    assert state["tap"] == 0
    assert "--api-server-count 1" in str(state["tap_error"])
