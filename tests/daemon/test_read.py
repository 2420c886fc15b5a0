"""Whole exchanges of every protocol: codings, statuses, and the calls that the daemon sees."""

import gzip
import zlib
from typing import Any

import brotli
import msgspec
import pytest
import zstandard

from daemon import exchange as exchanges
from daemon.protocols.conversation import ServerError, Usage
from daemon.protocols.read import read, read_request
from daemon.protocols.shape import ProtocolError
from sidecar.traces.record import Body, Exchange, Outcome, Request, Response, Route, Session
from tests.daemon import samples, spoken
from tests.daemon.recorded import tap_lines
from tests.daemon.spoken import dump

SAMPLES: dict[Route, tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]] = {
    "chat": (samples.CHAT_REQUEST | {"n": 1}, samples.CHAT_REPLY, samples.CHAT_STREAM),
    "completions": (
        samples.COMPLETIONS_REQUEST,
        samples.COMPLETIONS_REPLY,
        samples.COMPLETIONS_STREAM,
    ),
    "responses": (samples.RESPONSES_REQUEST, samples.RESPONSES_REPLY, samples.RESPONSES_STREAM),
    "messages": (samples.MESSAGES_REQUEST, samples.MESSAGES_REPLY, samples.MESSAGES_STREAM),
}
EVERY_ROUTE = pytest.mark.parametrize("route", list(SAMPLES))
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])


def recorded(
    route: Route,
    request: bytes,
    response: bytes | None,
    *,
    status: int = 200,
    streamed: bool = False,
    request_coding: str | None = None,
    response_coding: str | None = None,
    tap: list[str] | None = None,
    outcome: Outcome = "complete",
) -> Exchange:
    kind = "text/event-stream; charset=utf-8" if streamed else "application/json"

    def headers(codings):
        return [("Content-Type", kind)] + ([("content-encoding", codings)] if codings else [])

    return Exchange(
        id="1",
        route=route,
        session=Session(run="run-1", peer="127.0.0.1:5000"),
        upstream="http://127.0.0.1:8000",
        request=Request("POST", "/v1", headers(request_coding), Body.of(request)),
        started=1.0,
        ended=2.0,
        outcome=outcome,
        response=None
        if response is None
        else Response(status, headers(response_coding), Body.of(response)),
        tap=tap or [],
    )


def sample(route: Route, streamed: bool, **fields: Any) -> Exchange:
    request, reply, events = SAMPLES[route]
    # Only the OpenAI protocols of before Responses end their streams with [DONE].
    body = spoken.stream(*events, done=route in ("chat", "completions"))
    return recorded(
        route, dump(request), body if streamed else dump(reply), streamed=streamed, **fields
    )


def zstd(body: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(body)


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


PACKERS = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "DEFLATE": raw_deflate,
    "br": brotli.compress,
    "zstd": zstd,
    "gzip, zstd": lambda body: zstd(gzip.compress(body)),
    "identity, br": brotli.compress,
}


@pytest.mark.parametrize("codings", PACKERS)
@EVERY_ROUTE
def test_compressed_bodies(route, codings):
    request, reply, _ = SAMPLES[route]
    pack = PACKERS[codings]
    plain = recorded(route, dump(request), dump(reply))
    packed = recorded(
        route,
        pack(dump(request)),
        pack(dump(reply)),
        request_coding=codings,
        response_coding=codings,
    )
    assert read(packed) == read(plain)
    assert read(packed).complete
    assert read_request(packed) == read(plain).request


@EVERY_ROUTE
def test_cut_and_compressed_stream(route):
    request, _, events = SAMPLES[route]
    packed = gzip.compress(spoken.stream(*events), compresslevel=0)
    said = read(
        recorded(
            route,
            dump(request),
            packed[: len(packed) * 2 // 3],
            streamed=True,
            response_coding="gzip",
            outcome="cancelled",
        )
    )
    assert said.replies and not said.complete


@pytest.mark.parametrize("codings", ["compress", "gzip"])
def test_bodies_that_can_not_be_decoded(codings):
    with pytest.raises(ProtocolError):
        read(recorded("chat", b'{"messages": []}', b"{}", request_coding=codings))


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (dump({"error": {"message": "boom", "type": "x"}}), ServerError("boom", "x")),
        (b"<html>502 Bad Gateway</html>\n", ServerError("<html>502 Bad Gateway</html>")),
        (b"", ServerError("HTTP 502")),
        (b"\x1f\x8b nonsense", ServerError("HTTP 502")),
    ],
)
@EVERY_ROUTE
def test_error_statuses(route, body, error):
    packed = "gzip" if body.startswith(b"\x1f") else None
    request = dump(SAMPLES[route][0])
    said = read(recorded(route, request, body, status=502, response_coding=packed))
    assert (said.error, said.complete, said.replies) == (error, False, {})
    assert said.request.model == "m"


def test_not_a_model_call():
    with pytest.raises(ProtocolError):
        read(recorded("other", b"{}", b"{}"))


def test_body_that_is_no_base64():
    broken = recorded("chat", b"{}", b"{}")
    broken = msgspec.structs.replace(
        broken, request=msgspec.structs.replace(broken.request, body=Body(b64="a"))
    )
    with pytest.raises(ProtocolError):
        read(broken)


@EVERY_ROUTE
def test_half_a_document_gives_the_request_alone(route):
    request, reply, _ = SAMPLES[route]
    said = read(recorded(route, dump(request), dump(reply)[:-9], outcome="cancelled"))
    assert said.request.model == "m" and said.replies == {}


# The daemon's entries


def tokens(count: int) -> list[int]:
    return list(range(10, 10 + count))


def tap_of(route: Route, outputs: int = 9) -> list[str]:
    """The tap that fits the usage of the route's samples; ``outputs``: of the last choice."""
    if route == "completions":
        return [
            line
            for k, last in ((0, 2), (1, outputs - 7))
            for line in tap_lines([1, 2], [tokens(2), tokens(last)], request=k)
        ]
    prompt = {"chat": 3, "responses": 3, "messages": 6}[route]
    return tap_lines(tokens(prompt), [tokens(outputs)])


@EVERY_ROUTE
@STREAMED
def test_calls_of_every_protocol_are_checked(route, streamed):
    entries = exchanges.read(sample(route, streamed, tap=tap_of(route)))
    assert {entry.check for entry in entries} == {"passed"}
    assert [entry.left_out for entry in entries] == [None] * (4 if route == "completions" else 1)
    for entry in entries:
        assert entry.call is not None
        assert (entry.call.dialogue is None) == (route == "completions")
        assert (entry.call.reply is None) == (route == "completions")


@EVERY_ROUTE
@STREAMED
def test_counts_that_differ_fail(route, streamed):
    for outputs in (8, 10):
        entries = exchanges.read(sample(route, streamed, tap=tap_of(route, outputs)))
        assert {entry.left_out for entry in entries} == {"check failed: output count"}


@EVERY_ROUTE
def test_cancelled_stream_is_not_miscounted(route):
    request, _, events = SAMPLES[route]
    body = spoken.stream(*events[: len(events) // 2])
    cut = recorded(
        route, dump(request), body, streamed=True, tap=tap_of(route), outcome="cancelled"
    )
    for entry in exchanges.read(cut):
        assert (entry.check, entry.left_out) == ("passed", "cancelled")


def test_reply_with_a_server_error_is_not_trained():
    request, _, events = SAMPLES["chat"]
    body = spoken.stream(*events, {"error": {"message": "boom"}}, done=True)
    broken = recorded("chat", dump(request), body, streamed=True, tap=tap_of("chat"))
    (entry,) = exchanges.read(broken)
    assert (entry.check, entry.left_out) == ("failed", "check failed: server error")
    assert entry.call is not None and entry.call.left_out == entry.left_out


def test_prompt_of_completions_with_one_choice_has_its_reply():
    request = dump({"model": "m", "prompt": "One"})
    reply = dump(
        {
            "choices": [{"index": 0, "text": " two", "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 2},
        }
    )
    (entry,) = exchanges.read(recorded("completions", request, reply, tap=tap_lines([1], [[2, 3]])))
    assert entry.check == "passed" and entry.call and entry.call.reply
    assert entry.call.reply.finish == "stop"
    assert read(recorded("completions", request, reply)).usage == Usage(1, 2)
