"""Cutting on hand-made streams: framing, chunking, what can't be read.

That the rest is what vLLM sends to others is shown with vLLM's own code in
``tests/serving/test_api_source.py``.
"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.tokens import apitokens
from sidecar.tokens.apitokens import BodyCutter, SseCutter
from sidecar.tokens.splice import Field
from sidecar.tokens.strip import Cutter
from tests.sidecar.test_strip import chunks_of, run

ADDED: frozenset[Field] = frozenset({"return_token_ids", "logprobs"})
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
CUTS = st.lists(st.integers(min_value=0), max_size=40)

FIRST = b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":%s}'  # noqa: E501
TEXT = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"\\"token_ids\\":[1]"},"logprobs":%s,"finish_reason":null,"token_ids":%s}]}'  # noqa: E501
TOKEN = b'data: {"id":"c","object":"o","created":1,"model":"m","choices":[{"index":0,"delta":{"content":%s},"logprobs":%s,"finish_reason":null,"token_ids":%s}]}'  # noqa: E501
EMPTY = b'data: {"id":"c","choices":[{"index":0,"delta":{},"logprobs":%s,"finish_reason":null,"token_ids":%s}]}'  # noqa: E501
LAST = b'data: {"id":"c","choices":[{"index":0,"delta":{},"logprobs":%s,"finish_reason":"stop","stop_reason":null,"token_ids":%s}]}'  # noqa: E501
USAGE = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":2}}'
LOGPROBS = b'{"content":[{"token":"}]\\"","logprob":-0.5,"bytes":[97],"top_logprobs":[]}]}'

# (an event's line as it comes, as it goes on), None: the event is dropped.
EVENTS = st.sampled_from(
    [
        (FIRST % b"[1, 2]", FIRST % b"null"),
        (TEXT % (LOGPROBS, b"[3]"), TEXT % (b"null", b"null")),
        (TEXT % (b"null", b"null"), TEXT % (b"null", b"null")),
        (TOKEN % (b'"x"', LOGPROBS, b"[6]"), TOKEN % (b'"x"', b"null", b"null")),
        (EMPTY % (LOGPROBS, b"[4]"), None),
        (EMPTY % (b"null", b"null"), EMPTY % (b"null", b"null")),
        (LAST % (LOGPROBS, b"[5]"), LAST % (b"null", b"null")),
        (USAGE, USAGE),
        (b"data: [DONE]", b"data: [DONE]"),
        (b": keep-alive", b": keep-alive"),
        (b"data", b"data"),
        (b"data:", b"data:"),
        (b"dat\xff: x", b"dat\xff: x"),
        (b"event: ping", b"event: ping"),
    ]
)


@given(st.lists(EVENTS, max_size=8), ENDS, CUTS)
def test_a_stream_in_any_pieces(
    events: list[tuple[bytes, bytes | None]], end: bytes, cuts: list[int]
) -> None:
    raw = b"".join(before + end + end for before, _ in events)
    plain = b"".join(after + end + end for _, after in events if after is not None)
    cutter = SseCutter(ADDED)
    assert run(cutter, chunks_of(raw, cuts)) == plain
    assert all("error" not in json.loads(line) for line in cutter.lines)
    expected: list[bytes] = []
    for before, _ in events:
        expected += [
            token for token in (b"[1, 2]", b"[3]", b"[4]", b"[5]", b"[6]") if token in before
        ]
    found = []
    for line in map(json.loads, cutter.lines):
        found += [line.get("prompt_token_ids")] + [c.get("token_ids") for c in line["choices"]]
    assert [ids for ids in found if ids] == [json.loads(token) for token in expected]


@given(st.binary(max_size=80), CUTS)
def test_what_is_no_event_goes_on(data: bytes, cuts: list[int]) -> None:
    assert run(SseCutter(ADDED), chunks_of(data, cuts)) == data


@pytest.mark.parametrize("payload", [b"{", b"[1]", b'{"choices":[1]}', b'{"choices":{}}', b"x"])
@pytest.mark.parametrize("kind", ["stream", "body"])
def test_what_cannot_be_read_goes_on_and_marks_the_call(payload: bytes, kind: str) -> None:
    cutter: Cutter = SseCutter(ADDED) if kind == "stream" else BodyCutter(ADDED)
    data = b"data: " + payload + b"\n\n" if kind == "stream" else payload
    assert run(cutter, [data]) == data
    assert [list(json.loads(line)) for line in cutter.lines] == [["error"]]


def test_only_an_event_that_is_not_over_is_held_back() -> None:
    cutter = SseCutter(ADDED)
    assert cutter.feed(b": ping") == b": ping"
    assert cutter.feed(b"\n\nda") == b"\n\n" and cutter.held == b"da"
    event = TEXT % (b"null", b"[7]")
    assert cutter.feed(event[2:]) == b"" and cutter.held == event
    assert cutter.feed(b"\n\n") == TEXT % (b"null", b"null") + b"\n\n"
    assert cutter.held == b""
    cutter.feed(event)
    assert cutter.finish() == event and cutter.held == b""  # Torn: as it came.


@pytest.mark.parametrize("added", [set(), {"logprobs"}, {"return_token_ids"}])
def test_what_the_client_asked_for_stays(added: set[Field]) -> None:
    cutter = SseCutter(frozenset(added))
    event = EMPTY % (LOGPROBS, b"[8]") + b"\n\n"
    expected = EMPTY % (b"null" if "logprobs" in added else LOGPROBS, b"[8]") + b"\n\n"
    assert run(cutter, [event]) == (b"" if "return_token_ids" in added else expected)
    (line,) = map(json.loads, cutter.lines)
    assert line["choices"][0]["token_ids"] == [8] and line["choices"][0]["logprobs"]["content"]


def test_a_body_is_held_until_its_end() -> None:
    body = b' {"id":"c","choices":[{"index":0,"logprobs":%s,"finish_reason":"stop","token_ids":%s}],"usage":{},"prompt_token_ids":%s}\n'  # noqa: E501
    cutter = BodyCutter(ADDED)
    raw = body % (LOGPROBS, b"[3,4]", b"[1,2]")
    assert [cutter.feed(raw[:9]), cutter.feed(raw[9:])] == [b"", b""] and cutter.held == raw
    assert cutter.finish() == body % (b"null", b"null", b"null")
    assert cutter.held == b""
    assert json.loads(cutter.lines[0]) == {
        "id": "c",
        "prompt_token_ids": [1, 2],
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "token_ids": [3, 4],
                "logprobs": json.loads(LOGPROBS),
            }
        ],
    }


def test_an_error_body_goes_on() -> None:
    body = b'{"error":{"message":"no","token_ids":[1]}}'
    cutter = BodyCutter(ADDED)
    assert run(cutter, [body]) == body and cutter.lines == []


NULL_OR = st.none() | st.sampled_from(["[1,2]", "{}", "x", [7], {"a": []}, {}])
CHOICE = st.dictionaries(
    st.sampled_from(
        ["index", "delta", "logprobs", "finish_reason", "token_ids", "prompt_token_ids", "é"]
    ),
    NULL_OR,
)
REPLY = st.fixed_dictionaries(
    {},
    optional={
        "id": st.text(max_size=3),
        "choices": st.lists(CHOICE, max_size=3),
        "prompt_token_ids": NULL_OR,
        "token_ids": NULL_OR,
        "usage": NULL_OR,
    },
)
FIELDS: st.SearchStrategy[frozenset[Field]] = st.sampled_from(
    [ADDED, frozenset[Field]({"logprobs"}), frozenset[Field]({"return_token_ids"})]
)


@given(REPLY, st.booleans(), FIELDS)
def test_the_fast_way_cuts_as_the_general_one_does(
    reply: dict[str, object], ascii_only: bool, added: frozenset[Field]
) -> None:
    text = json.dumps(reply, separators=(",", ":"), ensure_ascii=ascii_only).encode()
    fast, general = apitokens._cut_compact(text, added), apitokens._cut_any(text, added)
    if fast is None:
        assert ascii_only  # The key is spelled with an escape.
        return
    assert (fast.text, fast.line, fast.ours) == (general.text, general.line, general.ours)


TOKEN_LOGPROB: st.SearchStrategy[dict[str, object]] = st.builds(
    lambda token, logprob, of_bytes, top: {
        "token": token,
        "logprob": logprob,
        "bytes": of_bytes,
        "top_logprobs": top,
    },
    st.text(max_size=4),
    st.floats(-20, 0) | st.just(-9999),
    st.none() | st.lists(st.integers(0, 255), max_size=4),
    st.sampled_from([[], [{}]]),
)


@given(
    st.text(max_size=8),
    st.none() | st.lists(TOKEN_LOGPROB, max_size=2),
    st.none() | st.lists(st.integers(0, 200_000), max_size=3),
    st.sampled_from([None, None, "stop"]),
    st.booleans(),
    FIELDS,
)
def test_a_token_alone_is_cut_as_one_in_pieces(
    content: str,
    logprobs: list[dict[str, object]] | None,
    ids: list[int] | None,
    finish: str | None,
    ascii_only: bool,
    added: frozenset[Field],
) -> None:
    choice = {
        "index": 0,
        "delta": {"content": content},
        "logprobs": None if logprobs is None else {"content": logprobs},
        "finish_reason": finish,
        "token_ids": ids,
    }
    reply = {"id": "c", "object": "o", "created": 1, "model": "m", "choices": [choice]}
    text = json.dumps(reply, separators=(",", ":"), ensure_ascii=ascii_only).encode()
    event = b"data: " + text + b"\n\n"
    usual = finish is None and logprobs != [] and not any(p["top_logprobs"] for p in logprobs or ())
    assert (apitokens._token.fullmatch(event) is not None) == usual
    alone, pieces = SseCutter(added), SseCutter(added)
    assert alone.feed(event) == pieces.feed(event[:7]) + pieces.feed(event[7:])
    assert alone.lines == pieces.lines


@pytest.mark.parametrize(
    "wrong", [b'"\xff"', b'"\n"', b'"\\x"', b'"\\u12"', b'"', b"x", b"nul", b'"a","content":"b"']
)
def test_a_token_that_is_no_json_goes_on(wrong: bytes) -> None:
    event = TOKEN % (wrong, b"null", b"[7]") + b"\n\n"
    alone, pieces = SseCutter(ADDED), SseCutter(ADDED)
    assert alone.feed(event) == pieces.feed(event[:7]) + pieces.feed(event[7:])
    assert alone.lines == pieces.lines


@pytest.mark.parametrize(
    "text",
    [
        b'{"id": "c"}',
        b'{"id":"c","id":"d"}',
        b'{"choices":[{"index":0,"index":1}]}',
        b'{"choices":[ {}]}',
        b'{"token_\\u0069ds":[1]}',
        b'\xef\xbb\xbf{"id":"c"}',
        b'{"id":"\xff"}',
        b'{"id":"c"} ',
    ],
)
def test_the_fast_way_leaves_text_that_is_spelled_otherwise_alone(text: bytes) -> None:
    assert apitokens._cut_compact(text, ADDED) is None
