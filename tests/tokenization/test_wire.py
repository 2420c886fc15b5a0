"""Only tap lines that make sense decode."""

import json
import math

import pytest

from tests.daemon.recorded import tap_lines
from tokenization import checks
from tokenization.tap import wire

SOUND = [json.loads(line) for line in tap_lines([1, 2], [[4]])]
"""A prompt, a tok and an end event."""


def decode(*events: object) -> list[wire.EngineRequest]:
    return wire.decode([json.dumps(event) for event in events])


def test_sound_lines_decode():
    (request,) = decode(*SOUND)
    assert request.prompt_ids == [1, 2]
    output = request.outputs[0]
    assert (output.ids, output.versions, output.reported) == ([4], ["v0"], 1)
    (request,) = decode(SOUND[0], {**SOUND[1], "lp": [None], "v": wire.UNKNOWN_VERSION})
    assert math.isnan(request.outputs[0].logprobs[0])


@pytest.mark.parametrize(
    ("event", "changes"),
    [
        (0, {"ids": [-1]}),
        (0, {"ids": [2**31]}),
        (0, {"ids": [True]}),
        (0, {"ids": [1.5]}),
        (0, {"ids": "12"}),
        (0, {"ids": None}),
        (0, {"params": []}),
        (0, {"r": -1}),
        (0, {"r": "0"}),
        (0, {"id": 7}),
        (1, {"ids": ["4"]}),
        (1, {"lp": [0.5]}),
        (1, {"lp": ["-1"]}),
        (1, {"lp": [True]}),
        (1, {"lp": [-1e39]}),
        (1, {"lp": -1.0}),
        (1, {"v": "v"}),
        (1, {"v": "v1\n"}),
        (1, {"v": "v\u0661"}),
        (1, {"v": "v1234567890"}),
        (1, {"v": 1}),
        (1, {"i": -1}),
        (1, {"i": True}),
        (2, {"n": -1}),
        (2, {"n": 1.0e3 + 0.5}),
        (2, {"n": None}),
        (2, {"finish": 3}),
        (1, {"e": "new"}),
        (1, {"r": 1}),
    ],
)
def test_nonsense_is_an_error(event, changes):
    events = [dict(e) for e in SOUND]
    events[event] |= changes
    with pytest.raises(wire.TapError):
        decode(*events)


def test_lines_that_are_no_events():
    deep = "[" * 100_000
    for line in ("{", "[]", "1", "{}", deep, f'{{"e":"prompt","r":0,"params":{{"a":{deep}'):
        with pytest.raises(wire.TapError, match="unreadable tap line"):
            wire.decode([line])


def test_second_prompt_or_end():
    with pytest.raises(wire.TapError, match="two prompts"):
        decode(*SOUND, SOUND[0])
    with pytest.raises(wire.TapError, match="two ends"):
        decode(*SOUND, SOUND[2])


def test_version_numbers_are_ascii_and_short():
    assert checks.version_number("v12") == 12
    assert [checks.version_number(v) for v in ("v\u0661", "v1234567890", "v1\n")] == [None] * 3
