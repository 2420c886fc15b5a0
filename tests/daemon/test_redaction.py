import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.ingest import Ingester
from daemon.redaction import LEFT_OUT, REDACTED, Redactor
from daemon.state import State
from deploy.cli import main
from deploy.errors import UserError
from tests.daemon.recorded import append, exchange

SECRET = "sk-[A-Z]{8}"


@given(st.text(), st.text(), st.from_regex(SECRET, fullmatch=True))
def test_what_a_pattern_finds_is_gone_and_all_else_stays(before, after, secret):
    redactor = Redactor(["nowhere!+", SECRET])
    assert redactor.redact(f"{before} {secret} {after}") == f"{before} {REDACTED} {after}"
    assert redactor.finds({"a": [1, None, (f"{before}{secret}",)]})
    assert redactor.finds({secret: 1})
    assert not redactor.finds([before.replace("sk-", ""), 1.5])


@given(st.text())
def test_no_pattern_changes_nothing(text):
    assert Redactor().redact(text) == text and not Redactor().finds(text)


@pytest.mark.parametrize(
    ("pattern", "message"), [("(", "regular expression"), ("a*", "everywhere")]
)
def test_patterns_that_can_not_be_meant(pattern, message):
    with pytest.raises(UserError, match=f"pattern 2.*{message}"):
        Redactor(["fine", pattern])


def recorded(text: str, reply: str, name: str):
    return exchange(name, messages=[{"role": "user", "content": text}], reply=reply)


async def test_calls_with_such_texts_are_not_trained(tmp_path):
    traces = tmp_path / "traces"
    traces.mkdir()
    append(
        traces / "a",
        [
            [
                recorded("my key is sk-ABCDEFGH", "yes", "asked"),
                recorded("hello", "take sk-ABCDEFGH", "said"),
                recorded("hello", "yes", "clean"),
            ]
        ],
    )
    state = State(tmp_path / "daemon.db")
    await Ingester(traces, state, (), Redactor([SECRET])).catch_up()
    found = {r["id"]: (r["status"], r["reason"]) for r in state.rows("SELECT * FROM calls")}
    state.close()
    assert found == {
        "asked": ("left_out", LEFT_OUT),
        "said": ("left_out", LEFT_OUT),
        "clean": ("waiting", ""),
    }


def test_the_traces_commands_show_and_export_no_such_text(tmp_path, capsys):
    traces = tmp_path / "traces"
    traces.mkdir()
    append(traces / "a", [[recorded("my key is sk-ABCDEFGH", "it is sk-ABCDEFGH", "secret")]])
    config = tmp_path / "r.toml"
    config.write_text(f"[daemon]\nredact = [{json.dumps(SECRET)}]\n")
    for command in (["show", "secret"], ["export"], ["export", "--format", "openai"]):
        arguments = ["traces", *command, str(traces), "--config", str(config)]
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        assert "ABCDEFGH" not in shown
        assert REDACTED in shown
