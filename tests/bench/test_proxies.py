"""The benchmark's parts: what they measure is what they say."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.tokens.strip import BodyCutter, SseCutter
from tests.bench import clocks, contenders, load, report
from tests.bench.contenders import Contender, Missing
from tests.bench.load import Calls, Result, Streams, Target
from tests.bench.proxies import measure
from tests.bench.report import Figures
from tests.bench.stub import Order, sent_at, words
from tokenization.tap import wire

NONCE = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    port = contenders.free_port()
    folder = tmp_path_factory.mktemp("stub")
    command = [sys.executable, "-m", "tests.bench.stub", str(port)]
    with contenders.process(command, port, folder) as pids:
        yield Target(port, pids=pids)


async def ask(port: int, order: Order, headers: str = "", more: str = "") -> tuple[str, bytes]:
    """Return the head and the decoded body of the stub's reply."""
    body = f'{{"model": "m", "user": "{order}", "messages": []{more}}}'
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{headers}"
        f"content-length: {len(body)}\r\n\r\n{body}".encode()
    )
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    data = b""
    if order.chunks:
        while size := int(await reader.readline(), 16):
            data += await reader.readexactly(size)
            await reader.readline()
    else:
        length = next(line for line in head.split("\r\n") if line.startswith("content-length"))
        data = await reader.readexactly(int(length.partition(":")[2]))
    writer.close()
    return head, data


async def test_a_tapped_reply_is_the_plain_one_with_lines_of_the_sizes_asked_for(
    upstream: Target,
) -> None:
    order = Order(prompt=300, output=20)
    _, plain = await ask(upstream.port, order)
    head, tapped = await ask(upstream.port, order, f"{wire.HEADER}: {NONCE}\r\n")
    assert f"{wire.LENGTH_HEADER}: {len(plain)}\r\n" in head
    cutter = BodyCutter(len(plain), NONCE)
    passed = cutter.feed(tapped)
    assert passed + cutter.finish() == plain
    (request,) = wire.decode(cutter.lines)
    assert len(request.prompt_ids) == 300
    assert len(request.outputs[0].ids) == len(request.outputs[0].logprobs) == 20
    assert request.outputs[0].reported == 20


async def test_a_tapped_stream_is_the_plain_one_with_a_line_for_each_token(
    upstream: Target,
) -> None:
    order = Order(prompt=300, output=0, chunks=7)
    _, plain = await ask(upstream.port, order)
    _, tapped = await ask(upstream.port, order, f"{wire.HEADER}: {NONCE}\r\n")
    cutter = SseCutter(NONCE)
    passed = cutter.feed(tapped)
    passed += cutter.finish()
    assert len(passed) == len(plain)
    assert len(sent_at(passed)) == len(sent_at(plain)) == 7
    (request,) = wire.decode(cutter.lines)
    assert len(request.prompt_ids) == 300
    assert len(request.outputs[0].ids) == request.outputs[0].reported == 7


async def test_ids_in_the_reply_are_as_many_as_asked_for(upstream: Target) -> None:
    _, reply = await ask(upstream.port, Order(64, 8), more=', "return_token_ids": true')
    answer = json.loads(reply)
    assert len(answer["prompt_token_ids"]) == 64
    assert len(answer["choices"][0]["token_ids"]) == 8
    assert len(answer["choices"][0]["logprobs"]["content"]) == 8
    _, stream = await ask(upstream.port, Order(64, 0, 3), more=', "return_token_ids": true')
    events = [json.loads(line[6:]) for line in stream.split(b"\n\n")[:3]]
    assert len(events[0]["prompt_token_ids"]) == 64
    assert [event["choices"][0]["token_ids"] for event in events] == [[12345]] * 3


def test_text_has_four_characters_a_token_and_no_two_seeds_agree() -> None:
    assert len(words(4096)) == 4 * 4096
    assert words(64, seed=1) != words(64, seed=2)


@pytest.mark.parametrize(
    "contender",
    [
        contenders.NGINX,
        contenders.AIOHTTP,
        contenders.MITMPROXY,
        contenders.SIDECAR_TAP,
        contenders.SIDECAR_API,
    ],
    ids=lambda contender: contender.name,
)
def test_a_contender_passes_calls_and_streams_on_and_its_cost_is_seen(
    contender: Contender, upstream: Target, tmp_path: Path
) -> None:
    try:
        with contenders.started(contender, upstream, tmp_path / "own") as running:
            called = measure(running, Calls(running.target, 64, 8, count=16, chunks=4))
            streamed = measure(running, Streams(running.target, 64, 3, step_ms=50, seconds=0.3))
    except Missing as missing:
        pytest.skip(str(missing))
    assert called.units == len(called.latencies) == 16
    assert streamed.units == len(streamed.latencies) > 0
    for result in (called, streamed):
        assert result.cpu > 0
        assert result.memory_during > 1 << 20


async def test_streams_of_one_pace_all_last_and_first_bytes_are_timed(upstream: Target) -> None:
    plan = Streams(Target(upstream.port), 64, 5, step_ms=20, seconds=0.4, probe_seconds=0.3)
    result = await load.streams(plan)
    assert result.first_bytes
    assert min(result.latencies) > 0
    assert result.units > 5


async def test_the_generator_stops_at_anything_but_a_good_answer() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(RuntimeError, match="503"):
            await load.calls(Calls(Target(port), 64, 8, count=1, connections=1))


def test_cpu_of_another_process_is_what_it_used() -> None:
    code = (
        "import time\nwhile time.process_time() < 0.3: pass\nprint(time.process_time(), flush=True)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", f"{code}\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    said = float(child.stdout.readline())
    measured = clocks.cpu_seconds([child.pid])
    child.communicate(b"\n")
    assert said <= measured < said + 0.1


def figures(mitmproxy: list[float], sidecar: list[float], soak: list[int]) -> Figures:
    made = Figures(soak_calls=100)
    for name, values in {
        contenders.MITMPROXY.name: mitmproxy,
        contenders.SIDECAR_TAP.name: sidecar,
    }.items():
        for value in values:
            made.add(name, report.streams(16), Result(cpu=value, units=1000))
    made.soak[contenders.SIDECAR_TAP.name] = soak
    return made


def test_a_ratio_is_the_median_of_the_rounds_not_the_ratio_of_medians() -> None:
    made = figures([1.0, 2.0, 10.0], [1.1, 2.4, 9.0], [])
    ratio = report.ratio(
        made, contenders.SIDECAR_TAP.name, contenders.MITMPROXY.name, report.streams(16)
    )
    assert ratio == pytest.approx(1.1)


def test_memory_is_flat_after_one_jump_and_not_when_it_grows() -> None:
    jump = [50 << 20] * 12 + [60 << 20] * 9
    growth = [(50 << 20) + 100 * 200 * part for part in range(21)]
    name = contenders.SIDECAR_TAP.name
    assert report.slope(figures([], [], jump), name) == 0
    assert report.slope(figures([], [], growth), name) == pytest.approx(200)


def test_targets_say_met_not_met_and_not_measured() -> None:
    made = figures([1.0], [1.3], [1000] * 21)
    verdicts = {target.what: target.verdict for target in report.targets(made)}
    name = contenders.SIDECAR_TAP.name
    assert verdicts[f"{name}: CPU / bare mitmproxy, streams 16"] == "NOT MET"
    assert verdicts[f"{name}: bytes kept per call"] == "met"
    assert verdicts[f"{contenders.SIDECAR_NO_TOKENS.name}: bytes kept per call"] == "not measured"
    text = report.text(made)
    assert "NOT MET" in text
    assert "1300 (1300-1300)" in text
    assert json.loads(report.as_json(made))["targets"]


def test_a_saturated_generator_is_reported() -> None:
    made = figures([1.0], [1.0], [])
    assert "SATURATED" not in report.text(made)
    made.add("nginx", report.streams(256), Result(cpu=1, units=1, generator_busy=0.95))
    assert "SATURATED in nginx, streams 256" in report.text(made)


def test_the_load_of_a_second_is_timed_by_the_sender() -> None:
    stamp = time.monotonic_ns()
    assert sent_at(b'data: {"id":"chatcmpl-%032d","x"' % stamp) == [stamp]
    assert sent_at(b'data: {"id":"chatcmpl-8f14e45fceea467f8f14e45fceea467f"') == []
