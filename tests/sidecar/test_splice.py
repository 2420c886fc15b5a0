"""What is asked of vLLM beside what the client asks, and that nothing else of a request moves."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.tokens.splice import splice
from sidecar.traces.record import Route

IDS = "return_token_ids"
BODY = '{"model": "m",  "messages":[{"role":"user","content":"\\u0041 \\"logprobs\\": true é"}]'


ASK_IDS = ',"return_token_ids":true'
ASK_LOGPROBS = ',"logprobs":true'
OWN_TOP = ',"logprobs":true,"top_logprobs":5'
OFF = ',"echo":false,"use_beam_search":null'
BOTH = {IDS, "logprobs"}


# What the client's request ends with, what it ends with then, and what was added.
@pytest.mark.parametrize(
    ("route", "end", "expected", "added"),
    [
        ("chat", "}", ASK_IDS + ASK_LOGPROBS + "}", BOTH),
        ("chat", "}\n", ASK_IDS + ASK_LOGPROBS + "}\n", BOTH),
        ("completions", "}", ASK_IDS + ',"logprobs":0}', BOTH),
        ("chat", OFF + "}", OFF + ASK_IDS + ASK_LOGPROBS + "}", BOTH),
        # In place where the client names the field.
        ("chat", ', "logprobs" : false}', f', "logprobs" : true{ASK_IDS}}}', BOTH),
        ("chat", ',"logprobs":null}', ASK_LOGPROBS + ASK_IDS + "}", BOTH),
        ("chat", f',"{IDS}":false }}', f',"{IDS}":true {ASK_LOGPROBS}}}', BOTH),
        ("completions", ',"logprobs":null}', f',"logprobs":0{ASK_IDS}}}', BOTH),
        ("chat", ',"top_logprobs":0}', f',"top_logprobs":0{ASK_IDS}{ASK_LOGPROBS}}}', BOTH),
        # vLLM reports no log-probs with a null here.
        ("chat", ',"top_logprobs":null}', f',"top_logprobs":0{ASK_IDS}{ASK_LOGPROBS}}}', BOTH),
        (
            "chat",
            ASK_LOGPROBS + ',"top_logprobs":null}',
            ASK_LOGPROBS + f',"top_logprobs":0{ASK_IDS}}}',
            BOTH,
        ),
        # What the client has asked for is not touched.
        ("chat", ASK_LOGPROBS + "}", ASK_LOGPROBS + ASK_IDS + "}", {IDS}),
        ("chat", OWN_TOP + "}", OWN_TOP + ASK_IDS + "}", {IDS}),
        ("completions", ',"logprobs":5}', f',"logprobs":5{ASK_IDS}}}', {IDS}),
        ("completions", ',"logprobs":0}', f',"logprobs":0{ASK_IDS}}}', {IDS}),
        ("chat", ASK_IDS + "}", ASK_IDS + ASK_LOGPROBS + "}", {"logprobs"}),
        ("chat", ASK_IDS + ASK_LOGPROBS + "}", ASK_IDS + ASK_LOGPROBS + "}", set()),
    ],
)
def test_asks(route: Route, end: str, expected: str, added: set[str]) -> None:
    spliced = splice(route, (BODY + end).encode())
    assert spliced is not None
    assert spliced.text.decode() == BODY + expected
    assert spliced.added == added


@pytest.mark.parametrize(
    ("route", "end"),
    [
        ("responses", "}"),
        ("messages", "}"),
        ("other", "}"),
        ("chat", ""),
        ("chat", "}}"),
        # With these vLLM's reply would say something else.
        ("completions", ',"echo":true}'),
        ("chat", ',"use_beam_search":true}'),
        # These vLLM refuses, and has to go on refusing.
        ("chat", ',"top_logprobs":5}'),
        ("chat", ',"top_logprobs":"0"}'),
        ("chat", ',"top_logprobs":false}'),
        ("chat", ',"logprob_token_ids":[1]}'),
        ("completions", ',"logprob_token_ids":[1]}'),
        ("chat", ',"logprobs":"maybe"}'),
        ("chat", ',"logprobs":0}'),
        ("completions", ',"logprobs":true}'),
        ("completions", ',"logprobs":"1"}'),
        ("chat", ',"return_token_ids":1}'),
        ("chat", ',"logprobs":' + "[" * 990 + "]" * 990 + "}"),
        ("completions", ',"logprobs":' + "1" * 5000 + "}"),
    ],
)
def test_leaves_alone(route: Route, end: str) -> None:
    assert splice(route, (BODY + end).encode()) is None


NAMES = st.sampled_from(["logprobs", "top_logprobs", IDS, "echo", "logprob_token_ids", "n"])
VALUES: st.SearchStrategy[Any] = st.sampled_from([None, True, False, 0, 1, 0.0, "x", [], [1], {}])


@given(st.sampled_from(["chat", "completions"]), st.lists(st.tuples(NAMES, VALUES), max_size=5))
def test_a_request_differs_in_the_added_fields_only(
    route: Route, fields: list[tuple[str, Any]]
) -> None:
    text = "{" + ", ".join(f'"{name}" : {json.dumps(value)}' for name, value in fields) + "}"
    spliced = splice(route, text.encode())
    if spliced is None:
        return
    before, after = json.loads(text), json.loads(spliced.text)
    changed = {name for name in after if name not in before or after[name] != before[name]}
    assert changed <= spliced.added | {"top_logprobs"}
    assert after[IDS] is True
    assert after["logprobs"] is not False and after["logprobs"] is not None
    assert ("top_logprobs" not in changed) or "logprobs" in spliced.added


@given(st.binary(max_size=60))
def test_takes_any_bytes(text: bytes) -> None:
    assert splice("chat", text) is None or text.strip()[:1] in (b"{", b"\xef")
