"""Run keys, TLS and reloading, at a running sidecar."""

import asyncio
import json
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from deploy.errors import UserError
from sidecar.access import tls
from sidecar.access.keys import RunKeys, load_secret
from sidecar.config import SidecarConfig
from sidecar.program import run
from tests.sidecar.client import Connection, exchange, get, post
from tests.sidecar.fake_engine import FakeEngine
from tests.sidecar.running import RunningSidecar
from tests.sidecar.test_records import CHAT, call_of, eventually, self_signed


@pytest.fixture(scope="module")
def locked(engine, tmp_path_factory) -> RunningSidecar:
    running = RunningSidecar(
        engine.url, tmp_path_factory.mktemp("locked") / "traces", require_key=True
    )
    yield running
    running.stop()


def keys(sidecar: RunningSidecar) -> RunKeys:
    return RunKeys(load_secret(sidecar.traces.with_name("run-keys.secret")))


def asked(engine: FakeEngine) -> int:
    """Return how many requests of agents the engine has seen."""
    return sum(request["path"] != "/ridealong/engine" for request in engine.requests)


def refused(reply: bytes, status: int) -> dict:
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), reply
    assert b"connection: close" in head
    return json.loads(body)["error"]


@pytest.mark.parametrize("form", ["authorization: Bearer {}", "X-Api-Key: {}"])
def test_a_key_names_the_run_and_stays_here(locked, engine, form):
    key = keys(locked).issue("keyed")
    _, body = Connection(locked.port).ask(post(CHAT, {"reply": "hi"}, form.format(key), "X-A: b"))
    assert body == b"hi"
    seen = engine.requests[-1]["headers"]
    assert seen["x-a"] == "b"
    assert not {"authorization", "x-api-key"} & seen.keys() and key not in repr(seen)
    call = call_of(locked, "keyed")
    assert call.tap_source == "inline" and key not in repr(call)


def test_the_agents_own_key_passes_beside_the_run_key(locked, engine):
    key = keys(locked).issue("both")
    headers = (f"x-api-key: {key}", "Authorization: Bearer sk-real")
    Connection(locked.port).ask(post(f"/r/both{CHAT}", {}, *headers))
    seen = engine.requests[-1]["headers"]
    assert seen["authorization"] == "Bearer sk-real" and "x-api-key" not in seen


def test_refusals_reach_no_upstream_and_leave_no_record(locked, engine):
    ours, before = keys(locked), asked(engine)

    def ask(path, *headers):
        return exchange(locked.port, post(path, {"padding": "x" * 200_000}, *headers))

    assert "ridealong key RUN" in refused(ask(f"/r/free{CHAT}"), 401)["message"]
    assert refused(ask(f"/r/free{CHAT}", "authorization: Bearer sk-1"), 401)
    forged = RunKeys(b"x" * 32).issue("free")
    assert refused(ask(f"/r/free{CHAT}", f"x-api-key: {forged}"), 401)
    other = ask(f"/r/free{CHAT}", f"x-api-key: {ours.issue('other')}")
    assert "run other" in refused(other, 403)["message"]
    assert refused(ask("/pause", f"x-api-key: {ours.issue('free')}"), 403)
    assert refused(exchange(locked.port, get("/v1/models")), 401)
    assert asked(engine) == before
    Connection(locked.port).ask(post(CHAT, {}, f"x-api-key: {ours.issue('end')}"))
    call_of(locked, "end")
    assert "free" not in [call.session.run for call in locked.calls(1)]
    assert locked.metric('ridealong_sidecar_refused_total{status="403"}') == 2


def test_a_refused_body_is_not_kept(locked):
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 200000000\r\n\r\n".encode()
    before = resident(locked)
    connection = Connection(locked.port)
    connection.socket.sendall(head)
    for _ in range(200):
        connection.socket.sendall(bytes(1_000_000))
    assert connection.reply()[0].startswith(b"HTTP/1.1 401")
    assert resident(locked) - before < 50_000_000


def resident(sidecar: RunningSidecar) -> int:
    fields = Path(f"/proc/{sidecar.process.pid}/statm").read_text().split()
    return int(fields[1]) * 4096


def test_sdks_show_the_message(locked):
    client = openai.OpenAI(base_url=f"{locked.url}/v1", api_key="sk-1", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="ridealong key RUN"):
        client.chat.completions.create(model="m", messages=[])
    other = anthropic.Anthropic(base_url=locked.url, api_key="sk-1", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError, match="ridealong key RUN"):
        other.messages.create(model="m", max_tokens=1, messages=[])


def test_a_forged_key_is_refused_where_none_is_needed(engine, start, tmp_path):
    load_secret(tmp_path / "run-keys.secret")
    sidecar = start(engine.url)
    before = asked(engine)
    reply = exchange(sidecar.port, post(CHAT, {}, "x-api-key: ridealong-a-0123"))
    assert refused(reply, 401) and asked(engine) == before
    key = keys(sidecar).issue("voluntary")
    Connection(sidecar.port).ask(post(CHAT, {}, f"x-api-key: {key}"))
    assert call_of(sidecar, "voluntary").outcome == "complete"


def test_the_command_prints_a_key(tmp_path):
    def ridealong(*arguments):
        command = [sys.executable, "-m", "deploy", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    option = f"sidecar.key_file={tmp_path}/s"
    printed = ridealong("key", "run-7", "--set", option)
    assert printed.returncode == 0
    assert "SIGHUP" in printed.stderr
    assert RunKeys(load_secret(tmp_path / "s")).verify(printed.stdout.strip()) == "run-7"
    assert ridealong("key", "run-7", "--set", option).stderr == ""
    wrong = ridealong("key", "run 7", "--set", option)
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and "run id" in wrong.stderr


def test_the_proxy_asks_for_the_key_too(engine, start, tmp_path):
    sidecar = start(engine.url, require_key=True, proxy="127.0.0.1:0", ca_dir=str(tmp_path / "ca"))
    port = int(sidecar.health()["ways"]["proxy"].rpartition(":")[2])
    host = engine.url.removeprefix("http://")

    def proxied(credentials: str, url: str = engine.url) -> httpx.Response:
        proxy = f"http://{credentials}127.0.0.1:{port}"
        with httpx.Client(proxy=proxy) as client:
            return client.post(f"{url}{CHAT}", json={"reply": "hi"})

    before = asked(engine)
    assert proxied("").status_code == proxied("run-5:x@").status_code == 401
    connect = f"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    reply = exchange(port, connect)
    assert refused(reply, 407) and b"proxy-authenticate: Basic" in reply
    other_name = engine.url.replace("127.0.0.1", "127.1")
    assert proxied("", other_name).status_code == 407
    assert asked(engine) == before
    assert proxied(f"run-5:{keys(sidecar).issue('run-5')}@", other_name).text == "hi"
    assert proxied(f"run-5:{keys(sidecar).issue('run-5')}@").text == "hi"
    assert call_of(sidecar, "run-5").session.way == "proxy"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "sidecar.tls_certificate, sidecar.tls_key and sidecar.require_key"),
        (("tls_certificate", "tls_key"), "sidecar.require_key"),
        (("require_key",), "sidecar.tls_certificate"),
        (("require_key", "tls_key"), "sidecar.tls_certificate is missing"),
    ],
)
def test_other_machines_come_in_with_tls_and_keys_only(tmp_path, names, message):
    certificate, key = self_signed(tmp_path)
    options = {"tls_certificate": certificate, "tls_key": key, "require_key": True}
    chosen = {name: options[name] for name in names}
    secret = str(tmp_path / "s")
    with pytest.raises(UserError, match=message):
        run(SidecarConfig(listen="0.0.0.0:0", key_file=secret, **chosen))


def test_required_keys_need_a_secret(tmp_path):
    (tmp_path / "s").touch(mode=0o644)
    with pytest.raises(UserError, match="chmod 600"):
        run(SidecarConfig(require_key=True, key_file=str(tmp_path / "s")))


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        ("cert.pem", "nowhere.pem", r"tls_key .*nowhere.pem can't be read"),
        ("other.pem", "key.pem", "the key is not the certificate's"),
        ("cert.pem", "cert.pem", "not a certificate with its unencrypted key"),
        ("text", "key.pem", r"tls_certificate .*text is not a PEM file"),
    ],
)
def test_tls_files_that_can_not_be_used(tmp_path, certificate, key, message):
    (tmp_path / "second").mkdir()
    self_signed(tmp_path)
    other, _ = self_signed(tmp_path / "second")
    Path(other).rename(tmp_path / "other.pem")
    (tmp_path / "text").write_text("text")
    with pytest.raises(UserError, match=message) as error:
        tls.server_context(str(tmp_path / certificate), str(tmp_path / key))
    assert "\n" not in str(error.value)


@pytest.fixture
def outside(engine, start, tmp_path):
    certificate, key = self_signed(tmp_path)
    sidecar = start(
        engine.url,
        listen="0.0.0.0:0",
        tls_certificate=certificate,
        tls_key=key,
        require_key=True,
    )
    context = ssl.create_default_context(cafile=certificate)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return sidecar, context


def test_tls_from_outside(outside, engine):
    sidecar, context = outside
    url = f"https://127.0.0.1:{sidecar.port}"
    headers = {"authorization": f"Bearer {keys(sidecar).issue('far')}"}
    with httpx.Client(verify=context, headers=headers, base_url=url) as client:
        reply = client.post(CHAT, json={"reply": "é" * 100_000})
        assert reply.text == "é" * 100_000
        assert client.get("/v1/models").status_code == 404
        with client.stream("POST", CHAT, json={"stream": True, "events": 5}) as stream:
            assert b"".join(stream.iter_bytes()).endswith(b"[DONE]\n\n")
        assert client.post(CHAT, json={}, headers={"authorization": "Bearer x"}).status_code == 401
        assert client.post(CHAT, content=b"", headers={"x": "y" * 300_000}).status_code == 431
    assert not [line for line in sidecar.errors() if "crashed" in line]
    calls = [call for call in sidecar.calls(3) if call.session.run == "far"]
    assert len(calls) == 3
    assert all(call.session.peer.startswith("127.0.0.1:") for call in calls)


async def test_cancelling_over_tls_reaches_the_engine(outside, engine):
    sidecar, context = outside
    url = f"https://127.0.0.1:{sidecar.port}{CHAT}"
    headers = {"x-api-key": keys(sidecar).issue("cut")}
    seen = len(engine.disconnects)
    async with httpx.AsyncClient(verify=context, headers=headers) as client:
        ask = {"stream": True, "events": 200, "delay": 0.05}
        async with client.stream("POST", url, json=ask) as stream:
            async for chunk in stream.aiter_bytes():
                assert b"token" in chunk
                break
    closed = time.monotonic()
    await asyncio.to_thread(eventually, lambda: len(engine.disconnects) > seen)
    assert engine.disconnects[-1] - closed < 2
    assert call_of(sidecar, "cut").outcome == "cancelled"


def test_plain_http_and_old_tls_are_not_spoken_there(outside):
    sidecar, context = outside
    assert b"200" not in exchange(sidecar.port, get("/"))
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"https://127.0.0.1:{sidecar.port}/", verify=context)


def test_ending_at_once_leaves_nothing_behind(outside, engine):
    sidecar, context = outside
    headers = {"x-api-key": keys(sidecar).issue("drain")}
    url = f"https://127.0.0.1:{sidecar.port}{CHAT}"
    with httpx.Client(verify=context, headers=headers) as client:
        client.post(url, json={})
        sidecar.process.send_signal(signal.SIGTERM)
        status, errors = sidecar.stop()  # A second signal.
    assert status == 0 and "crashed" not in errors and "Traceback" not in errors


def configured(tmp_path: Path, engine: FakeEngine, **options: object) -> Path:
    file = tmp_path / "r.toml"
    lines = ["[sidecar]", f'upstream = "{engine.url}"']
    lines += [f"{key} = {json.dumps(value)}" for key, value in options.items()]
    file.write_text("\n".join(lines) + "\n")
    return file


def test_sighup_reads_the_configuration_again(engine, start, tmp_path):
    options = {
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "traces": str(tmp_path / "traces"),
        "key_file": str(tmp_path / "run-keys.secret"),
    }
    file = configured(tmp_path, engine, **options)
    sidecar = start(engine.url, config_file=file)
    assert not Path(options["key_file"]).exists()

    def reload(text: str) -> None:
        sidecar.process.send_signal(signal.SIGHUP)
        eventually(lambda: any(text in line for line in sidecar.errors()))

    def status() -> bytes:
        reply = exchange(sidecar.port, post(CHAT, {}, "Connection: close"))
        return reply.split(b" ", 2)[1]

    assert status() == b"200"
    connection = Connection(sidecar.port)
    connection.socket.sendall(post(f"/r/on{CHAT}", {"stream": True, "events": 60, "delay": 0.05}))
    connection.read_until(b'"token":0}')
    configured(tmp_path, engine, **options, require_key=True, rotate_mib=7)
    reload("changed: require_key")
    assert any("after a restart: rotate_mib" in line for line in sidecar.errors())
    assert status() == b"401"

    file.write_text("[sidecar\n")
    reload("the configuration stays as it was")
    assert status() == b"401"
    configured(tmp_path, engine, **options, require_key=True, max_body_mib="many")
    reload("max_body_mib")
    Path(options["key_file"]).chmod(0o644)
    configured(tmp_path, engine, **options, require_key=True, max_body_mib=1)
    reload("chmod 600")
    assert status() == b"401"
    Path(options["key_file"]).chmod(0o600)
    configured(tmp_path, engine, **options, max_header_kib=1, log_format="json")
    reload('"message": "configuration read again')
    assert status() == b"200"
    big = post(CHAT, {}, "X: " + "a" * 2000)
    assert exchange(sidecar.port, big).startswith(b"HTTP/1.1 431")
    assert connection.read_until(b"[DONE]\n\n"), "streams go on"


def test_new_certificates_are_taken_on_sighup(engine, start, tmp_path):
    certificate, key = self_signed(tmp_path)
    sidecar = start(engine.url, tls_certificate=certificate, tls_key=key)

    def served() -> str:
        return ssl.get_server_certificate(("127.0.0.1", sidecar.port))

    first = served()
    self_signed(tmp_path)
    assert served() == first
    sidecar.process.send_signal(signal.SIGHUP)
    eventually(lambda: served() != first)
    second = served()
    Path(key).write_text("gone")
    sidecar.process.send_signal(signal.SIGHUP)
    eventually(lambda: any("not a PEM file" in line for line in sidecar.errors()))
    assert served() == second
