"""The suite's own parts, checked without any harness: these run with ``make test``."""

import json
import socket
import time
import urllib.error
import urllib.request
from contextlib import closing

import pytest

from daemon.protocols import chat, messages, responses
from daemon.protocols.conversation import Text, ToolCall
from tests.harnesses import install
from tests.harnesses.findings import Findings
from tests.harnesses.model_server import (
    CLOSING,
    COMMAND,
    PREFACE,
    Fault,
    ModelServer,
    Say,
    arguments,
)
from tests.harnesses.relay import Relay

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
ASKS = {
    "chat": {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}],
    },
    "responses": {
        "input": "hi",
        "tools": [{"type": "function", "name": "bash", "parameters": SCHEMA}],
    },
    "messages": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "tools": [{"name": "bash", "input_schema": SCHEMA}],
    },
}
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
READERS = {"chat": chat, "responses": responses, "messages": messages}


@pytest.fixture(scope="module")
def server():
    with closing(ModelServer()) as running:
        yield running


def post(server: ModelServer, protocol: str, stream: bool) -> tuple[bytes, bytes]:
    body = json.dumps({"model": "m", "stream": stream} | ASKS[protocol]).encode()
    with urllib.request.urlopen(server.url + PATHS[protocol], body, timeout=10) as reply:
        return body, reply.read()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("protocol", ASKS)
def test_what_the_server_says_is_of_its_protocol(server, protocol, stream):
    server.play()
    asked, answer = post(server, protocol, stream)
    said = READERS[protocol].parse(asked, answer, event_stream=stream)
    assert said.complete and said.error is None
    text, call = said.replies[0].message.parts
    assert isinstance(text, Text) and text.text == PREFACE
    assert isinstance(call, ToolCall) and call.name == "bash"
    assert json.loads(call.arguments) == {"command": COMMAND}
    assert server.asks[0].stream == stream and server.asks[0].gone is None


def test_without_tools_it_closes(server):
    server.play(lambda ask: Say(CLOSING))
    _, answer = post(server, "chat", False)
    assert json.loads(answer)["choices"][0]["message"]["content"] == CLOSING


def test_faults_befall_the_calls_in_turn(server):
    server.play(faults=[Fault("status", 429), Fault("reset"), Fault("break"), None])
    with pytest.raises(urllib.error.HTTPError, match="429"):
        post(server, "chat", True)
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        post(server, "chat", True)
    with pytest.raises(ConnectionError):
        post(server, "chat", True)
    assert b"[DONE]" in post(server, "chat", True)[1]


def test_arguments_fit_the_schema():
    schema = {
        "properties": {
            "cmd": {"type": "array"},
            "quiet": {"type": "boolean"},
            "why": {"type": "string"},
        },
        "required": ["cmd", "quiet", "why"],
    }
    assert arguments(schema, "ls") == {"cmd": ["bash", "-lc", "ls"], "quiet": False, "why": "x"}


@pytest.mark.parametrize("reset", [True, False])
def test_relay_and_server_see_the_client_go(server, reset):
    server.play(lambda ask: Say("word " * 100, pause=0.05))
    relay = Relay(int(server.url.rpartition(":")[2]))
    body = json.dumps({"stream": True} | ASKS["chat"]).encode()
    client = socket.create_connection(("127.0.0.1", relay.port))
    client.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
        % (len(body), body)
    )
    assert client.recv(12) == b"HTTP/1.1 200"
    if reset:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    deadline = time.monotonic() + 5
    while server.asks[0].gone is None and time.monotonic() < deadline:
        time.sleep(0.005)
    relay.close()
    assert len(relay.hung_up) == 1 and server.asks[0].gone >= relay.hung_up[0]


def test_a_missing_node_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("RIDEALONG_HARNESSES", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(install.InstallError, match=r"install Node\.js"):
        install.install("pi")
    assert install.main(["pi"]) == 1
    assert install.main(["no such program"]) == 2


def test_what_is_installed_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("RIDEALONG_HARNESSES", str(tmp_path))
    folder = install.folder("pi")
    folder.mkdir()
    (folder / ".installed").write_text("\n".join(install.PROGRAMS["pi"].packages))
    assert install.install("pi") == folder


def test_versions_are_those_of_the_pins():
    assert install.version("claude-code") in install.PROGRAMS["claude-code"].packages[0]
    assert install.version("node-sdks", "@anthropic-ai/sdk") == "1.14.0"
    assert install.version("smolagents") == "1.26.0"


def test_table(tmp_path):
    table = Findings({"pi": "1.0"}, ["tool", "session"])
    table.note("pi", "tool", "works")
    assert not table.complete(["tool", "session"])
    table.note("pi", "session", "found")
    table.note("pi", "session", "twice")
    with pytest.raises(KeyError):
        table.note("pi", "colour", "red")
    table.write(tmp_path / "table.md")
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[-3:] == [
        "| harness | version | tool | session |",
        "| --- | --- | --- | --- |",
        "| pi | 1.0 | works | found; twice |",
    ]
