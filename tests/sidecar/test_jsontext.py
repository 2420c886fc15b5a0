"""Members are found and added in a JSON text as Python's parser reads it; nothing else moves."""

import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sidecar.bodies import jsontext

KEYS = st.sampled_from(["model", "mod", "a", "", 'q"', "back\\", "ü", "{", "}", ",", ":", "\ud800"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(alphabet='ab"\\[]{}:, \n\té€𝄞', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)
SPACES = st.sampled_from(["", " ", "\n\t ", "\r\n"])


@st.composite
def spelled(draw: st.DrawFn, value: Any) -> str:
    """``value`` as JSON in one of its many spellings."""
    space = draw(SPACES)
    if isinstance(value, dict):
        pairs = [f"{draw(quoted(k))}{space}:{space}{draw(spelled(v))}" for k, v in value.items()]
        return "{" + space + f"{space},{space}".join(pairs) + space + "}"
    if isinstance(value, list):
        return "[" + space + f"{space},".join(draw(spelled(item)) for item in value) + space + "]"
    if isinstance(value, str):
        return draw(quoted(value))
    return json.dumps(value)


@st.composite
def quoted(draw: st.DrawFn, text: str) -> str:
    escape_all = draw(st.booleans())
    if escape_all and all(ord(character) < 0x10000 for character in text):
        return '"' + "".join(f"\\u{ord(character):04x}" for character in text) + '"'
    return json.dumps(text, ensure_ascii=draw(st.booleans()) or "\ud800" in text)


@st.composite
def objects(draw: st.DrawFn) -> bytes:
    """Text of an object, whose keys may repeat, with what may stand around it."""
    pairs = draw(st.lists(st.tuples(KEYS, VALUES), max_size=6))
    space = draw(SPACES)
    members = f"{space},{space}".join(
        f"{draw(quoted(key))}{space}:{space}{draw(spelled(value))}" for key, value in pairs
    )
    text = f"{draw(SPACES)}{{{space}{members}{space}}}{draw(SPACES)}"
    return (b"\xef\xbb\xbf" if draw(st.booleans()) else b"") + text.encode()


@given(objects(), KEYS)
def test_finds_the_member_that_counts(text: bytes, key: str) -> None:
    known = json.loads(text)
    span = jsontext.value_span(text, key)
    if key not in known:
        assert span is None
        return
    assert span is not None
    assert json.loads(text[span[0] : span[1]]) == known[key]
    assert text[span[0] : span[1]].strip() == text[span[0] : span[1]]


@given(objects(), st.dictionaries(st.sampled_from(["model", "new", "x"]), VALUES, min_size=1))
def test_adds_members_that_count_and_leaves_the_rest(text: bytes, added: dict[str, Any]) -> None:
    longer = jsontext.insert_members(text, json.dumps(added).encode()[1:-1])
    assert json.loads(longer) == json.loads(text) | added
    end = len(text.rstrip()) - 1
    assert longer.startswith(text[:end]) and longer.endswith(text[end:])


@given(objects(), KEYS, VALUES)
def test_replaces_one_value(text: bytes, key: str, value: Any) -> None:
    changed = jsontext.replace_value(text, key, json.dumps(value).encode())
    known = json.loads(text)
    assert json.loads(changed) == (known | {key: value} if key in known else known)


@given(st.binary(max_size=40) | st.text(alphabet='{}[]":,\\au0 1', max_size=20).map(str.encode))
def test_refuses_what_is_no_object(text: bytes) -> None:
    with contextlib.suppress(ValueError, RecursionError):
        assume(not isinstance(json.loads(text), dict))
    with pytest.raises(ValueError):
        jsontext.value_span(text, "a")
    with pytest.raises(ValueError):
        jsontext.insert_members(text, b'"a":1')


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'"a"',
        b"{",
        b'{"a":1}}',
        b'{"a":1,}',
        b'{"a" 1}',
        b'{"a":"\xff"}',
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        '{"a":1}'.encode("utf-16"),
    ],
)
def test_refuses(text: bytes) -> None:
    with pytest.raises(ValueError):
        jsontext.value_span(text, "a")


def test_an_escaped_key_is_the_same_key() -> None:
    text = b'{"model":"a","mod\\u0065l":"b","m":{"model":"c"}}'
    assert jsontext.replace_value(text, "model", b'"x"') == (
        b'{"model":"a","mod\\u0065l":"x","m":{"model":"c"}}'
    )


@given(st.lists(VALUES, max_size=4).flatmap(spelled))
def test_elements(text: str) -> None:
    raw = text.encode()
    found = [json.loads(raw[start:end]) for start, end in jsontext.elements(raw, 0)]
    assert found == json.loads(raw)


@pytest.mark.parametrize("depth", range(1, 12))
def test_any_depth(depth: int) -> None:
    value = b'{"]":[' * depth + b"1" + b'],"[":"}"}' * depth
    text = b'{"a":' + value + b',"b":' + value + b"}"
    assert jsontext.replace_value(text, "b", b"2") == b'{"a":' + value + b',"b":2}'


def test_a_long_conversation_is_scanned_in_milliseconds() -> None:
    turns = [{"role": "user", "content": 'say "hi" \\ {[' * 40} for _ in range(2_000)]
    text = json.dumps({"messages": turns, "model": "m"}).encode()
    assert len(text) > 1_000_000
    began = time.process_time()
    span = jsontext.value_span(text, "model")
    assert span is not None and text[span[0] : span[1]] == b'"m"'
    assert time.process_time() - began < 1
