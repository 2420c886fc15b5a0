"""Finds and adds members in the text of a JSON object, leaving every other byte as it is. Pure.

Parsing and serialising again would change spelling (order, spaces, escapes, numbers), and so what a
model server makes of it. Texts are UTF-8 bytes, with or without a byte order mark (RFC 8259); of
members with the same key the last one counts, as in Python's ``json`` and in pydantic.
"""

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\n\r"
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_space = re.compile(rb"[ \t\n\r]*+")
_key = re.compile(rb"[ \t\n\r]*+(" + _STRING + rb")[ \t\n\r]*+:[ \t\n\r]*+", re.DOTALL)
_scalar = re.compile(_STRING + rb"|[^\"\[\]{},: \t\n\r]++", re.DOTALL)
_after = re.compile(rb"[ \t\n\r]*+([,\]}])")
_PLAIN = rb'[^"\[\]{}]*+'


def _balanced(depth: int) -> bytes:
    """Return a pattern of text in which all brackets close, up to ``depth`` of them deep."""
    nested = rb"|[\[{]" + _balanced(depth - 1) + rb"[\]}]" if depth else b""
    return _PLAIN + rb"(?:(?:" + _STRING + nested + rb")" + _PLAIN + rb")*+"


# All that stands before the next bracket that closes, or that opens something deeper. Four is the
# depth of usual conversations; every bracket beyond it costs a step in Python.
_inside = re.compile(_balanced(4) + rb"([\[\]{}])", re.DOTALL)
_any = msgspec.json.Decoder(msgspec.Raw)


class Member(NamedTuple):
    """A member of a JSON object: its key, decoded, and byte offsets in the object's text.

    ``text[start:end]`` is the member from its key's first quote to its value's last byte, and
    ``text[value:end]`` its value.
    """

    key: str
    start: int
    value: int
    end: int


def value_span(text: bytes, key: str) -> tuple[int, int] | None:
    """Return where the value of a top-level ``key`` starts and ends; None without such a member.

    Raises:
        ValueError: ``text`` is not a JSON object.
    """
    _check(text)
    span = None
    for member in members(text, _start(text)):
        if member.key == key:
            span = member.value, member.end
    return span


def insert_members(text: bytes, added: bytes) -> bytes:
    """Return ``text`` with members (``b'"a":1,"b":2'``) added at its end, where they count.

    Raises:
        ValueError: ``text`` is not a JSON object.
    """
    _check(text)
    end = len(text.rstrip(_SPACE)) - 1
    empty = _skip_space(text, _start(text) + 1) == end
    return text[:end] + (b"" if empty else b",") + added + text[end:]


def replace_value(text: bytes, key: str, value: bytes) -> bytes:
    """Return ``text`` with the value of a top-level ``key`` replaced by the JSON text ``value``.

    Without such a member ``text`` comes back as it is.

    Raises:
        ValueError: ``text`` is not a JSON object.
    """
    span = value_span(text, key)
    return text if span is None else text[: span[0]] + value + text[span[1] :]


def top_level(text: bytes) -> dict[str, Member]:
    """Return the members of a JSON object by key, the last one of each.

    Raises:
        ValueError: ``text`` is not a JSON object.
    """
    _check(text)
    return {member.key: member for member in members(text, _start(text))}


def members(text: bytes, start: int) -> Iterator[Member]:
    """Yield the members of the object at ``start``, in order.

    Raises:
        ValueError: there is no object there. Its values are not checked.
    """
    if text[start : start + 1] != b"{":
        raise ValueError(f"no JSON object at byte {start}")
    position = start + 1
    closing = _skip_space(text, position)
    if text[closing : closing + 1] == b"}":
        return
    while True:
        key = _key.match(text, position)
        if key is None:
            raise ValueError(f"no member at byte {position}")
        end = value_end(text, key.end())
        yield Member(_decoded(key[1]), key.start(1), key.end(), end)
        after = _after.match(text, end)
        if after is None or after[1] == b"]":
            raise ValueError(f"no end of a member at byte {end}")
        position = after.end()
        if after[1] == b"}":
            return


def elements(text: bytes, start: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last offset of every element of the array at ``start``, in order.

    Raises:
        ValueError: there is no array there. Its elements are not checked.
    """
    if text[start : start + 1] != b"[":
        raise ValueError(f"no JSON array at byte {start}")
    position = _skip_space(text, start + 1)
    if text[position : position + 1] == b"]":
        return
    while True:
        end = value_end(text, position)
        yield position, end
        after = _after.match(text, end)
        if after is None or after[1] == b"}":
            raise ValueError(f"no end of an element at byte {end}")
        if after[1] == b"]":
            return
        position = _skip_space(text, after.end())


def value_end(text: bytes, start: int) -> int:
    """Return where the value that begins at ``start`` ends.

    Raises:
        ValueError: none begins there, or it does not end.
    """
    if text[start : start + 1] not in (b"{", b"["):
        scalar = _scalar.match(text, start)
        if scalar is None:
            raise ValueError(f"no value at byte {start}")
        return scalar.end()
    depth, position = 1, start + 1
    while depth:
        bracket = _inside.match(text, position)
        if bracket is None:
            raise ValueError(f"the value at byte {start} does not end")
        depth += 1 if bracket[1] in b"{[" else -1
        position = bracket.end()
    return position


def _check(text: bytes) -> None:
    body = text.removeprefix(_BOM)
    try:
        string = body.decode()
        try:
            _any.decode(body)
        except msgspec.DecodeError:
            # Python's json, slower, takes more: halves of surrogate pairs, as JavaScript agents
            # send them when they cut a text short, and NaN.
            json.loads(string)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if body.lstrip(_SPACE)[:1] != b"{":
        raise ValueError("not a JSON object")


def _start(text: bytes) -> int:
    return _skip_space(text, len(_BOM) if text.startswith(_BOM) else 0)


def _skip_space(text: bytes, position: int) -> int:
    space = _space.match(text, position)
    assert space is not None  # It matches the empty text too.
    return space.end()


def _decoded(quoted: bytes) -> str:
    if b"\\" in quoted:
        # As the model server's json reads it, lone surrogates included.
        return str(json.loads(quoted))
    return quoted[1:-1].decode("utf-8")
