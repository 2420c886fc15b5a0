"""Framing of server-sent events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.protocols.sse import Event, events


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_line_ends(end):
    body = end.join([b"event: a", b"data: 1", b"", b"data: 2", b"", b""])
    assert events(body) == [Event("a", "1"), Event("message", "2")]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b": comment\n\ndata: 1\n\n", ["1"]),
        (b"data: 1\ndata: 2\n\n", ["1\n2"]),
        (b"data:1\n\n", ["1"]),
        (b"data:  1\n\n", [" 1"]),
        (b"data\n\n", [""]),
        (b"id: 3\nretry: 5\ndata: 1\n\n", ["1"]),
        (b"event: lonely\n\ndata: 1\n\n", ["1"]),
        (b"data: 1", ["1"]),
        (b"data: 1\n", ["1"]),
        (b"\xef\xbb\xbfdata: 1\n\n", ["1"]),
        (b"\n\n\n", []),
        (b"", []),
        ("data: a\u2028b\u0085c\n\n".encode(), ["a\u2028b\u0085c"]),
        (b"data: \xff\n\n", ["\ufffd"]),
    ],
)
def test_fields(body, expected):
    assert [event.data for event in events(body)] == expected


text = st.text(st.characters(exclude_characters="\r\n\x00", codec="utf-8"), max_size=20)


@given(
    st.lists(st.lists(text, min_size=1, max_size=3), max_size=5),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.booleans(),
)
def test_round_trip(payloads, end, last_blank):
    body = b""
    for data in payloads:
        body += b": tap" + end
        body += b"".join(b"data: " + line.encode() + end for line in data) + end
    if not last_blank:
        body = body.removesuffix(end)
    assert [e.data for e in events(body)] == ["\n".join(data) for data in payloads]
