"""Credentials never reach the disk: one run with secrets in every place, and a search for them."""

import base64
import json
import string
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from sidecar.access import redact
from sidecar.access.keys import RunKeys, load_secret
from tests.sidecar.client import Connection, exchange, get, post
from tests.sidecar.test_records import CHAT, eventually
from tests.sidecar.test_redact import SECRET_NAMES

TOKEN = st.text(alphabet=string.ascii_letters + string.digits + "-_.~", min_size=12, max_size=60)
OTHER_NAMES = st.sampled_from(["x-echo", "User-Agent", "forwarded", "x-trace", "openai-project"])


@given(
    TOKEN.map(lambda token: f"QZ{token}"),
    st.sampled_from(SECRET_NAMES),
    st.sampled_from(["{}", "Bearer {}", "a=b; session={}; c=d", "Basic {}", "Sig k=1,v={}"]),
    OTHER_NAMES,
    st.text(alphabet=string.ascii_lowercase + " /:=", max_size=20),
)
def test_a_credential_is_removed_where_it_is_repeated(secret, name, form, other, text):
    fields = [(name, form.format(secret)), (other, f"{text} {secret}{text}")]
    if name.lower() == "set-cookie":
        fields[0] = (name, f"session={secret}; Path=/v1/chat/completions; HttpOnly")
    secrets = redact.Secrets(fields, "/v1/x")
    assert secret not in repr([secrets.remove(v) for _, v in redact.headers(fields)])
    assert secret not in secrets.remove(f"/files/{secret}/x?y={secret}")
    assert secret.encode() not in secrets.remove_bytes(f"bad key {secret}!".encode())
    assert secrets.remove("/v1/chat/completions HttpOnly") == "/v1/chat/completions HttpOnly"


@given(TOKEN.map(lambda token: f"QZ{token}"), st.sampled_from(["key", "access_token", "sig"]))
def test_a_query_secret_is_removed_where_it_is_repeated(secret, name):
    secrets = redact.Secrets([], f"/v1/x?a=1&{name}={secret}")
    assert secret not in secrets.remove(f"no such key: {secret}")


@given(st.binary())
def test_error_texts_quote_no_bytes(data):
    quoted = repr(b"QZSECRET" + data)
    for text in (f"Invalid header line: {quoted}", f"bytearray({quoted}) is bad", quoted + " end"):
        assert "QZSECRET" not in redact.message(text)
    assert redact.message("Connect call failed ('127.0.0.1', 80)") == (
        "Connect call failed ('127.0.0.1', 80)"
    )


@pytest.mark.parametrize("text", ["None", "EMPTY", "realtime", "/v1/messages", "dummy-key"])
def test_words_are_not_taken_for_credentials(text):
    secrets = redact.Secrets([("authorization", f"Bearer {text}")], "/v1/messages")
    assert secrets.remove(f"/v1/messages {text} x") == f"/v1/messages {text} x"


def on_disk(traces: Path) -> bytes:
    text = b""
    for shard in traces.glob("*.jsonl.zst"):
        with shard.open("rb") as file:
            reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            text += reader.read()
    return text


class Secrets:
    """Hands out secrets, each by another name, that can be found again."""

    def __init__(self) -> None:
        self.made: dict[str, str] = {}

    def __call__(self, place: str) -> str:
        self.made[place] = f"QZX{len(self.made):03d}SECRET{len(self.made):03d}XZQ"
        return self.made[place]

    def found(self, text: bytes) -> list[str]:
        """Return the places whose secret is in the text, plainly or as base64 of it."""
        return [
            place
            for place, secret in self.made.items()
            if secret.encode() in text or base64.b64encode(secret.encode())[:-4] in text
        ]


def test_no_credential_reaches_the_disk(start, raw_server, engine, tmp_path):
    secret = Secrets()
    run_keys = RunKeys(load_secret(tmp_path / "run-keys.secret"))
    sidecar = start(
        raw_server.url, token_source="none", proxy="127.0.0.1:0", ca_dir=str(tmp_path / "ca")
    )
    headers = [f"{name}: {secret(f'header {name}')}" for name in SECRET_NAMES]
    headers += [
        f"Authorization: Bearer {secret('bearer')}",
        f"Authorization: Basic {base64.b64encode(f'u:{secret("basic")}'.encode()).decode()}",
        f"Cookie: a=b; session={secret('cookie')}",
        f"Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.{secret('protocol')}",
        f"Referer: https://u:{secret('userinfo')}@h/?token={secret('referer')}",
        f"X-Copy: {secret.made['bearer']} {secret.made['cookie']}",
    ]
    query = f"?a=b&api_key={secret('query')}&next=https%3A%2F%2Fh%2F&sig={secret('signature')}"

    def answer(status: bytes, body: bytes) -> None:
        lines = [
            b"HTTP/1.1 " + status,
            b"Content-Type: application/json",
            f"Set-Cookie: sid={secret('set-cookie')}; Path=/v1; HttpOnly".encode(),
            f"X-Auth-Token: {secret('reply token')}".encode(),
            f"Location: https://h/?access_token={secret('location')}".encode(),
            f"X-Echo: {secret.made['bearer']}".encode(),
            b"Content-Length: %d" % len(body),
            b"Connection: close",
        ]
        raw_server.reset = False
        raw_server.answer = [b"\r\n".join(lines) + b"\r\n\r\n" + body]

    done = 0

    def ask(path: str) -> None:
        nonlocal done
        exchange(sidecar.port, post(path + query, {"model": "m"}, *headers, "Connection: close"))
        done += 1

    answer(b"200 OK", b"{}")
    for path in (f"/r/run{CHAT}", "/v1/messages", "/v1/models"):
        ask(path)
    error = json.dumps({"error": f"wrong key {secret.made['bearer']}"}).encode()
    answer(b"401 Unauthorized", error)
    ask(CHAT)
    # Replies that mitmproxy complains of, with what it complains of.
    for line in (
        f"Set-Cookie {secret('no colon')}",
        f"Bad Name {secret('bad name')}: x",
        "Content-Length: none",
    ):
        raw_server.answer = [f"HTTP/1.1 200 OK\r\n{line}\r\n\r\n".encode()]
        ask(CHAT)
    raw_server.answer = [f"NONSENSE {secret('status line')}\r\n\r\n".encode()]
    ask(CHAT)
    # Requests that are refused leave nothing.
    bad = f"X Bad {secret('refused header')}"
    exchange(sidecar.port, post(CHAT, {}, bad, *headers))
    key = run_keys.issue("keyed")
    secret.made["run key"] = key
    forged = key[:-1] + ("0" if key[-1] != "0" else "1")
    secret.made["forged key"] = forged
    raw_server.answer = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"]
    exchange(sidecar.port, post(CHAT, {}, f"x-api-key: {forged}"))
    exchange(sidecar.port, post(CHAT, {}, f"x-api-key: {key}", "Connection: close"))
    # By the proxy.
    proxy = int(sidecar.health()["ways"]["proxy"].rpartition(":")[2])
    credentials = base64.b64encode(f"run-9:{secret('proxy password')}".encode()).decode()
    target = raw_server.url + f"{CHAT}?key={secret('proxied query')}"
    request = post(target, {}, f"Proxy-Authorization: Basic {credentials}", "Connection: close")
    exchange(proxy, request)
    calls = sidecar.calls(done + 2)
    assert {"run", "keyed", "run-9"} <= {call.session.run for call in calls}
    status, log = sidecar.stop()
    assert status == 0
    disk = on_disk(sidecar.traces)
    assert b'"x-copy"' in disk.lower() and b"REDACTED" in disk
    assert secret.found(disk) == [], disk[max(0, disk.find(b"QZX") - 300) :][:400]
    assert secret.found(log.encode()) == []
    assert b"wrong key REDACTED" in disk


def test_no_credential_of_a_cancelled_call_reaches_the_disk(sidecar, engine):
    secret = Secrets()
    connection = Connection(sidecar.port)
    ask = {"stream": True, "events": 100, "delay": 0.05}
    header = f"Authorization: Bearer {secret('bearer')}"
    connection.socket.sendall(post(f"/r/pulled{CHAT}?key={secret('query')}", ask, header))
    connection.read_until(b'"token":1}')
    connection.close()
    eventually(lambda: "pulled" in [call.session.run for call in sidecar.calls(0)])
    assert secret.found(on_disk(sidecar.traces)) == []
    assert Connection(sidecar.port).ask(get("/nowhere"))[0].startswith(b"HTTP/1.1 404")
