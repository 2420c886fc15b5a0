"""Real calls: the real engine with its tap, the real sidecar, read by the daemon."""

import asyncio
from pathlib import Path

import numpy as np
import openai
import pytest

from daemon import replay
from daemon.ingest import Ingester
from daemon.rollouts import Limits, select
from daemon.state import State
from tests.loop.conftest import running_sidecar

MESSAGES = [{"role": "user", "content": "Name a colour."}]


@pytest.mark.vllm
async def test_real_calls_pass_the_checks_and_merge(vllm_server: str, tmp_path: Path):
    with running_sidecar(vllm_server, tmp_path) as sidecar:
        client = openai.AsyncOpenAI(base_url=f"{sidecar.url}/r/one/v1", api_key="none")
        await talk(client)
        await asyncio.to_thread(sidecar.wait_for_exchanges, 7)
        state = State(tmp_path / "daemon.db")
        await Ingester(sidecar.traces, state).catch_up()
    rows = state.rows("SELECT * FROM calls ORDER BY started, id")
    whole, streamed, first, second, greedy, filtered, cancelled, refused = rows

    for sound in (whole, streamed, first, second):
        assert (sound["check_result"], sound["status"]) == ("passed", "waiting"), sound
        assert sound["token_source"] == "engine" and sound["run"] == "one"
    assert greedy["reason"] == "check failed: temperature"
    assert filtered["reason"] == "check failed: sampling filter"
    assert (cancelled["reason"], cancelled["check_result"]) == ("cancelled", "passed")
    assert 0 < cancelled["output_tokens"] < 400
    assert refused["reason"] == "HTTP 404"

    calls, missing = replay.read_calls(sidecar.traces, rows)
    assert missing == {}
    waiting = {row["id"] for row in rows if row["status"] == "waiting"}
    selection = select("one", calls, waiting, Limits(newest=99, max_staleness=99, max_tokens=4096))
    assert set(selection.trained) == waiting and selection.left_out == {}
    sampled = sum(row["output_tokens"] for row in rows if row["id"] in waiting)
    assert selection.sampled_tokens == sampled
    # The second turn's prompt holds the first turn's very tokens: one sequence, not two.
    together = [s for s in selection.samples if whole["id"] in s.calls]
    assert streamed["id"] in together[0].calls or selection.forks[streamed["id"]].startswith(
        "drift"
    )
    for sample in selection.samples:
        assert np.isfinite(sample.logprobs[sample.loss_mask]).all()
        assert (sample.logprobs[sample.loss_mask] <= 0).all()
    state.close()


async def talk(client: openai.AsyncOpenAI) -> None:
    """Two turns, two choices, two calls that can't be trained, one that is given up, an error."""
    (model,) = [m.id async for m in client.models.list()]
    create = client.chat.completions.create
    reply = await create(model=model, messages=MESSAGES, temperature=1.0, max_tokens=40)
    answer = reply.choices[0].message.content
    history = [*MESSAGES, {"role": "assistant", "content": answer}, *MESSAGES]
    async for _ in await create(
        model=model, messages=history, temperature=1.0, max_tokens=8, stream=True
    ):
        pass
    await create(model=model, messages=MESSAGES, temperature=1.0, max_tokens=8, n=2)
    await create(model=model, messages=MESSAGES, temperature=0.0, max_tokens=4)
    await create(model=model, messages=MESSAGES, temperature=1.0, top_p=0.5, max_tokens=4)
    story = await create(
        model=model,
        messages=MESSAGES,
        temperature=1.0,
        max_tokens=400,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for chunk in story:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    await story.close()
    with pytest.raises(openai.NotFoundError):
        await create(model="nobody", messages=MESSAGES)
