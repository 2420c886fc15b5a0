"""Legacy completions: prompts of every form, choices of several prompts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.protocols import completions
from daemon.protocols.conversation import ServerError, Usage, dialogue
from daemon.protocols.shape import ProtocolError
from tests.daemon import samples, spoken
from tests.daemon.spoken import dump, text_of

REQUEST = dump(samples.COMPLETIONS_REQUEST)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("One", ("One",)),
        (["One", "Red"], ("One", "Red")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["One", [3]], ("One", (3,))),
        ([], ()),
        (None, ()),
    ],
)
def test_prompts(prompt, expected):
    request = completions.parse(dump({"prompt": prompt}), None, event_stream=False).request
    assert request.prompts == expected
    assert dialogue(request) is None


def test_request():
    request = completions.parse(REQUEST, None, event_stream=False).request
    assert (request.model, request.stream, request.choices, request.max_tokens) == ("m", 0, 2, 5)


def test_stream_and_whole_reply_are_the_same():
    whole = completions.parse(REQUEST, dump(samples.COMPLETIONS_REPLY), event_stream=False)
    body = spoken.stream(*samples.COMPLETIONS_STREAM, done=True)
    streamed = completions.parse(REQUEST, body, event_stream=True)
    assert streamed == whole
    # The prompts were echoed, and the choices of the second prompt come after those of the first.
    assert [text_of(whole.replies[k]) for k in range(4)] == [" two", " day", ", Red", "o"]
    assert [whole.replies[k].finish for k in range(4)] == ["stop", "length", "stop", "stop"]
    assert whole.usage == Usage(4, 8)
    assert whole.complete


def test_prompt_is_cut_off_only_where_it_was_echoed():
    request = dump({"prompt": "One"})
    reply = dump({"choices": [{"index": 0, "text": "One two"}]})
    said = completions.parse(request, reply, event_stream=False)
    assert text_of(said.replies[0]) == "One two"


def test_cut_stream():
    body = spoken.stream(samples.COMPLETIONS_STREAM[1]) + b'data: {"choi'
    said = completions.parse(REQUEST, body, event_stream=True)
    assert text_of(said.replies[0]) == " two"
    assert not said.complete and said.usage is None


def test_server_error():
    body = spoken.stream({"error": {"message": "boom", "type": "x"}}, done=True)
    said = completions.parse(REQUEST, body, event_stream=True)
    assert (said.error, said.complete) == (ServerError("boom", "x"), False)


@pytest.mark.parametrize("prompt", [3, {"a": 1}, [1, "a", 2.5], [[-1]], [["a"]]])
def test_not_a_prompt(prompt):
    with pytest.raises(ProtocolError):
        completions.parse(dump({"prompt": prompt}), None, event_stream=False)


@settings(deadline=None)
@given(spoken.requests, spoken.answers, st.booleans())
def test_any_bytes(request, response, event_stream):
    spoken.check_garbage(completions.parse, request, response, event_stream)
    spoken.check_garbage(completions.parse, REQUEST, response, event_stream)


@pytest.mark.parametrize("deep", spoken.DEEP)
def test_nested_deeply(deep):
    spoken.check_garbage(completions.parse, deep, None, False)
    spoken.check_garbage(completions.parse, REQUEST, deep, False)
