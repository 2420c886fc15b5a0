"""Every value of every sample replaced by every kind of other value: an answer or a refusal."""

import copy
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from daemon.protocols import chat, completions, messages, responses
from tests.daemon import samples, spoken
from tests.daemon.spoken import dump

SAMPLES: dict[ModuleType, tuple[Any, Any, Any]] = {
    chat: (samples.CHAT_REQUEST, samples.CHAT_REPLY, samples.CHAT_STREAM),
    completions: (
        samples.COMPLETIONS_REQUEST,
        samples.COMPLETIONS_REPLY,
        samples.COMPLETIONS_STREAM,
    ),
    responses: (samples.RESPONSES_REQUEST, samples.RESPONSES_REPLY, samples.RESPONSES_STREAM),
    messages: (samples.MESSAGES_REQUEST, samples.MESSAGES_REPLY, samples.MESSAGES_STREAM),
}
OTHERS: list[Any] = [
    *(None, True, -1, 1.5, 2**70, float("nan"), "", "x", "data:,x"),
    *([], {}, [1], ["x"], {"a": 1}, [[]], [{}], {"type": "text"}),
]


def changed(value: Any) -> Iterator[Any]:
    """Copies of a document, each with one value in it replaced."""
    yield from OTHERS
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            for other in changed(value[key]):
                one = copy.copy(value)
                one[key] = other
                yield one


@pytest.mark.parametrize("protocol", SAMPLES, ids=lambda module: module.__name__.split(".")[-1])
def test_any_value_in_any_place(protocol):
    request, reply, events = SAMPLES[protocol]
    asked = dump(request)
    for one in changed(request):
        spoken.check_garbage(protocol.parse, dump(one), None, False)
    for one in changed(reply):
        spoken.check_garbage(protocol.parse, asked, dump(one), False)
    for position, event in enumerate(events):
        rest = events[position + 1 :][:3]
        for one in changed(event):
            body = spoken.stream(*events[:position][-3:]) + b"data: " + dump(one) + b"\n\n"
            spoken.check_garbage(protocol.parse, asked, body + spoken.stream(*rest), True)
