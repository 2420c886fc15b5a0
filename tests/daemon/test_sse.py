"""Framing of server-sent events."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from daemon.protocols.sse import Event, Parser, events


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


@settings(deadline=None)
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


# Bytes that framing turns on, dense enough that every combination comes up.
PIECES = [
    *(
        b"\r",
        b"\n",
        b"\r\n",
        b"\xef\xbb\xbf",
        b":",
        b" ",
        b"data",
        b"data: ",
        b"event: x",
        b"id: 1",
    ),
    *("é".encode(), "\u2028".encode(), b"\x85", b"\xff", b"\x00", b"\x0b", b"1"),
]
raw = st.lists(st.sampled_from(PIECES), max_size=30).map(b"".join)


def read_in_chunks(body: bytes, size: int) -> list[Event]:
    parser = Parser()
    found = []
    for start in range(0, len(body), size):
        found += parser.feed(body[start : start + size])
        found += parser.feed(b"")
    return found + parser.close()


@settings(deadline=None)
@given(raw, st.integers(1, 7))
@example(b"data: 1\r\ndata: 2\r\n\r\ndata: 3", 1)
@example(b"data: 1\r\ndata: 2\r\n\r\ndata: 3", 8)
def test_chunks_do_not_matter(body, size):
    assert read_in_chunks(body, size) == events(body)


def reference(body: bytes) -> list[Event]:
    """The standard's rules once more, over the whole body and with no state kept between lines."""
    found = []
    name, data = "", []
    for line in [*re.split(rb"\r\n|\r|\n", re.sub(rb"\A\xef\xbb\xbf", b"", body)), b""]:
        field = re.fullmatch(rb"(data|event)(?:: ?(.*))?", line, re.DOTALL)
        if line == b"":
            if data:
                found.append(Event(name or "message", "\n".join(data)))
            name, data = "", []
        elif field:
            value = (field[2] or b"").decode("utf-8", "replace")
            if field[1] == b"data":
                data.append(value)
            else:
                name = value
    return found


@settings(deadline=None)
@given(raw)
def test_follows_the_standard(body):
    assert events(body) == reference(body)


def test_an_event_comes_as_soon_as_its_blank_line_does():
    parser = Parser()
    assert parser.feed(b"data: 1\n") == []
    assert parser.feed(b"\r") == [Event("message", "1")]
    assert parser.feed(b"\ndata: 2") == []
    assert parser.close() == [Event("message", "2")]
