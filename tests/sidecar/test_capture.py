"""The addon's guards, with mitmproxy's own test flows: faults of ours that can't be provoked from
outside.
"""

import asyncio
import time
from collections.abc import Callable

import pytest
from mitmproxy import http
from mitmproxy.proxy.mode_specs import ProxyMode
from mitmproxy.test import tflow

from sidecar.access.admission import Access
from sidecar.access.keys import RunKeys
from sidecar.call import Call, new_id
from sidecar.capture import Capture
from sidecar.config import SidecarConfig
from sidecar.operations.metrics import Metrics
from sidecar.routing.intercept import Interception
from sidecar.routing.router import Router
from sidecar.routing.upstreams import Health, parse_targets
from sidecar.tokens.sources import Source, Sources
from sidecar.traces.record import Exchange, Record
from sidecar.traces.writer import Writer


class FakeSink:
    """Keeps records in a list, or raises."""

    def __init__(self) -> None:
        self.records: list[Exchange] = []
        self.lost: list[str] = []
        self.broken = False
        self.hanging = False
        self.waiting: list[Callable[[], None]] = []

    def put(self, record: Record, done: Callable[[], None] | None = None) -> bool:
        if self.broken:
            raise RuntimeError("bug")
        assert isinstance(record, Exchange)
        self.records.append(record)
        if done is not None:
            (self.waiting.append if self.hanging else lambda call: call())(done)
        return True

    def lose(self, reason: str) -> None:
        self.lost.append(reason)


class FakePuller:
    """Answers what it is told to."""

    lines: list[str] | None = None

    async def pull(self, upstream: str, nonce: str, authorization: str | None) -> list[str] | None:
        await asyncio.sleep(0)
        return self.lines


@pytest.fixture
def sink() -> FakeSink:
    return FakeSink()


@pytest.fixture
def metrics(tmp_path) -> Metrics:
    return Metrics(Writer(tmp_path, "s", rotate_bytes=1, rotate_seconds=1, queue_bytes=1))


@pytest.fixture
def sent() -> list[bytes]:
    return []


@pytest.fixture
def capture(sink, sent, metrics, known) -> Capture:
    def write(_: http.HTTPFlow, data: bytes) -> None:
        sent.append(data)

    access = Access(RunKeys(b"s" * 32), required=False)
    targets = parse_targets(SidecarConfig(upstream="http://u"), {}, str)
    router = Router(targets, Interception([], [], []), Health())
    sources = Sources("auto", {targets.default.replicas[0].url: known})
    return Capture(
        router,
        sources,
        sink,
        FakePuller(),
        write,
        lambda _: False,
        metrics,
        access,
    )


@pytest.fixture
def known() -> Source:
    """What the model server is known to have."""
    return "tap"


def chat_flow(content_type: str = "text/event-stream") -> http.HTTPFlow:
    flow = tflow.tflow(resp=True)
    flow.live = True
    flow.client_conn.proxy_mode = ProxyMode.parse("reverse:http://u")
    flow.request.method, flow.request.path = "POST", "/v1/chat/completions"
    assert flow.response
    flow.response.headers = http.Headers(content_type=content_type)
    return flow


def faults(metrics: Metrics) -> float:
    return metrics.registry.get_sample_value("ridealong_sidecar_faults_total") or 0


def stream(flow: http.HTTPFlow, *pieces: bytes) -> list[bytes | list[bytes]]:
    assert flow.response and callable(flow.response.stream)
    return [flow.response.stream(piece) for piece in pieces]  # type: ignore[misc]


async def test_a_fault_while_cutting_lets_the_rest_through_raw(capture, sink, metrics, monkeypatch):
    flow = chat_flow()
    capture.requestheaders(flow)
    capture.responseheaders(flow)
    first = stream(flow, b"data: 1\n\n:")
    monkeypatch.setattr(Call, "reply_chunk", lambda *_: 1 / 0)
    assert first + stream(flow, b" ping\n\n", b"data: 3\n\n", b"") == [
        b"data: 1\n\n",
        b": ping\n\n",
        b"data: 3\n\n",
        [],
    ]
    assert faults(metrics) == 1
    await capture.response(flow)
    assert len(sink.records) == 1 and capture.in_flight == 0
    assert "ZeroDivisionError" in (sink.records[0].error or "")


@pytest.mark.parametrize("known", ["api"])
async def test_faults_in_the_api_source_let_everything_through(capture, sink, metrics, monkeypatch):
    flow = chat_flow("application/json")
    capture.requestheaders(flow)
    assert flow.request.stream is False
    flow.request.data.content = b'{"model": "m"}'
    with monkeypatch.context() as broken:
        broken.setattr(Call, "ask_in_text", lambda *_: 1 / 0)
        capture.request(flow)
    assert flow.request.data.content == b'{"model": "m"}'
    capture.request(flow)
    assert b"return_token_ids" in flow.request.data.content

    capture.responseheaders(flow)
    assert flow.response and flow.response.stream is False
    flow.response.data.content = body = b'{"choices":[{"index":0,"token_ids":[1]}]}'
    monkeypatch.setattr(Call, "reply_chunk", lambda *_: 1 / 0)
    await capture.response(flow)
    assert flow.response.data.content == body and faults(metrics) == 2
    assert "ZeroDivisionError" in (sink.records[0].error or "") and capture.in_flight == 0


async def test_no_piece_is_ever_empty_bytes_and_the_end_waits_for_the_record(capture, sink, sent):
    sink.hanging = True
    flow = chat_flow()
    capture.requestheaders(flow)
    capture.responseheaders(flow)
    nonce = flow.request.headers["x-ridealong-tap"]
    assert stream(flow, f": {nonce} {{}}\n".encode(), b"data: [DONE]\n\n", b"") == [[], [], []]
    assert callable(flow.request.stream)
    assert flow.request.stream(b"") == []

    ending = asyncio.ensure_future(capture.response(flow))
    await asyncio.sleep(0.05)
    assert len(sink.records) == 1 and sent == [] and capture.in_flight == 1
    sink.waiting.pop()()
    await ending
    assert sent == [b"data: [DONE]\n\n"] and capture.in_flight == 0


async def test_a_stream_that_does_not_end_after_its_last_event_goes_on(
    capture, sink, sent, monkeypatch
):
    monkeypatch.setattr("sidecar.capture._COMMIT_SECONDS", 0.1)
    flow = chat_flow()
    capture.requestheaders(flow)
    capture.responseheaders(flow)
    line = f": {flow.request.headers['x-ridealong-tap']} {{}}\n".encode()
    assert stream(flow, line, b"data: [DONE]\n\n") == [[], []]
    await asyncio.sleep(0.3)
    assert sent == [b"data: [DONE]\n\n"]
    assert stream(flow, b"data: 2\n\n", b"") == [b"data: 2\n\n", []]
    await capture.response(flow)
    assert sent == [b"data: [DONE]\n\n"]
    assert sink.records[0].response.body.text == "data: [DONE]\n\ndata: 2\n\n"


async def test_a_stream_with_a_length_has_the_length_of_what_is_left(capture, sink):
    flow = chat_flow()
    assert flow.response
    capture.requestheaders(flow)
    line = f": {flow.request.headers['x-ridealong-tap']} {{}}\n".encode()
    events = b"data: 1\n\ndata: [DONE]\n\n"
    flow.response.headers["content-length"] = str(len(line) + len(events))
    capture.responseheaders(flow)
    assert flow.response.stream is False
    flow.response.data.content = line + events
    await capture.response(flow)
    assert flow.response.data.content == events
    assert flow.response.headers["content-length"] == str(len(events))
    (record,) = sink.records
    assert record.tap == ["{}"] and record.response.body.text == events.decode()
    assert ("content-length", str(len(events))) in record.response.headers


async def test_one_vain_wait_for_a_hanging_disk_is_the_last(capture, sink, sent, monkeypatch):
    monkeypatch.setattr("sidecar.capture._COMMIT_SECONDS", 0.2)
    sink.hanging = True

    async def end_a_call() -> float:
        flow = chat_flow("application/json")
        assert flow.response
        flow.response.headers["content-length"] = "2"
        capture.requestheaders(flow)
        capture.responseheaders(flow)
        stream(flow, b"{}", b"")
        started = time.monotonic()
        await capture.response(flow)
        return time.monotonic() - started

    assert await end_a_call() >= 0.2
    assert await end_a_call() < 0.1
    for done in sink.waiting:
        done()
    await asyncio.sleep(0)
    assert await end_a_call() >= 0.2, "the disk has caught up: it is waited for again"
    assert sent == [b"{}"] * 3


async def test_a_fault_in_a_hook_leaves_the_flow_streaming(capture, metrics, monkeypatch):
    monkeypatch.setattr("sidecar.routing.routes.split_run", lambda _: 1 / 0)
    flow = chat_flow()
    capture.requestheaders(flow)
    capture.responseheaders(flow)
    assert flow.request.stream is True
    assert flow.response and flow.response.stream is True
    await capture.response(flow)
    assert faults(metrics) == 1


async def test_a_fault_in_the_sink_is_counted(capture, sink, metrics):
    sink.broken = True
    flow = chat_flow("application/json")
    capture.requestheaders(flow)
    capture.responseheaders(flow)
    assert stream(flow, b"{}", b"") == [b"{}", []]
    await capture.response(flow)
    assert (faults(metrics), capture.in_flight) == (1, 0)
    assert sink.lost == ["a record could not be made: RuntimeError"]


async def test_a_call_is_recorded_once(capture, sink):
    flow = chat_flow()
    capture.requestheaders(flow)
    capture.responseheaders(flow)
    stream(flow, b"data: 1\n\n", b"")
    await capture.response(flow)
    await capture.error(flow)
    capture.stop()
    assert [record.outcome for record in sink.records] == ["complete"]


async def test_an_error_after_the_sidecar_was_stopped_is_harmless(capture, sink):
    flow = chat_flow()
    capture.requestheaders(flow)
    capture.stop()
    flow.error = tflow.terr("late")
    await capture.error(flow)
    assert [record.outcome for record in sink.records] == ["sidecar_stopped"]


async def test_untapped_calls_are_counted_in_a_row(capture):
    for expected in (1, 2):
        flow = chat_flow()
        capture.requestheaders(flow)
        capture.responseheaders(flow)
        stream(flow, b"data: 1\n\n", b"")
        await capture.response(flow)
        assert capture.untapped_in_a_row == expected


def test_call_ids_sort_by_time():
    ids = [new_id() for _ in range(3)]
    assert len(set(ids)) == 3
    assert all(len(i) == 32 and i[12] == "7" and i[16] in "89ab" for i in ids)
    assert ids[0][:12] <= ids[-1][:12]
