import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.routing.routes import last_event, route, split_run


@pytest.mark.parametrize(
    ("method", "target", "expected"),
    [
        ("POST", "/v1/chat/completions", "chat"),
        ("POST", "/v1/completions", "completions"),
        ("POST", "/v1/responses?x=1", "responses"),
        ("POST", "/v1/messages?beta=true", "messages"),
        ("POST", "/chat/completions", "chat"),
        ("POST", "/v1/v1/messages", "messages"),
        ("GET", "/v1/responses", "other"),
        ("POST", "/v1/messages/count_tokens", "other"),
        ("POST", "/v1/embeddings", "other"),
        ("GET", "/v1/models", "other"),
        ("POST", "*", "other"),
        ("POST", "", "other"),
    ],
)
def test_route(method, target, expected):
    assert route(method, target) == expected


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/r/run-1.a_b/v1/messages?x=/r/y/", ("run-1.a_b", "/v1/messages?x=/r/y/")),
        ("/r/1/", ("1", "/")),
        ("/r/1", ("1", "/")),
        ("/r/1?q", ("1", "/?q")),
        ("/r//v1/messages", (None, "/r//v1/messages")),
        ("/r/-x/v1/messages", (None, "/r/-x/v1/messages")),
        ("/r/a%2Fb/v1", (None, "/r/a%2Fb/v1")),
        (f"/r/{'a' * 129}/v1", (None, f"/r/{'a' * 129}/v1")),
        ("/v1/r/x/", (None, "/v1/r/x/")),
    ],
)
def test_split_run(target, expected):
    assert split_run(target) == expected


@given(st.text(alphabet="abcXYZ019._-", min_size=1, max_size=128), st.text(alphabet="ab/?=&%."))
def test_a_run_prefix_never_changes_what_follows_it(run, rest):
    found, target = split_run(f"/r/{run}/{rest}")
    assert (found, target) in [(run, f"/{rest}"), (None, f"/r/{run}/{rest}")]
    assert (found is None) == (not run[0].isalnum())


@pytest.mark.parametrize(
    ("call", "text", "expected"),
    [
        ("chat", b"data: {}\n\ndata: [DONE]\n\n", 10),
        ("completions", b"data: [DONE]\n\n", 0),
        ("chat", b'data: {"text":"data: [DONE]"}\n\n', -1),
        ("messages", b"event: message_stop\ndata: {}\n\n", 0),
        ("messages", b"event: message_delta\ndata: {}\n\n", -1),
        ("responses", b"\nevent: response.completed\n", 1),
        ("other", b"data: [DONE]\n\n", -1),
        ("chat", b'data: {"c":"data: [DONE]"}\n\ndata: [DONE]\n\n', 28),
    ],
)
def test_last_event(call, text, expected):
    assert last_event(call, text) == expected


def test_a_piece_that_begins_within_a_line():
    text = b'data: [DONE]"}\n\ndata: [DONE]\n\n'
    assert last_event("chat", text, at_line_start=False) == 16
