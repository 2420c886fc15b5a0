"""Every way in really used, several of them in one process, with the same records from each."""

import base64
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from sidecar.config import InterceptConfig
from sidecar.traces.record import Exchange
from tests.sidecar.client import Connection, exchange, get, post
from tests.sidecar.fake_engine import FakeEngine
from tests.sidecar.running import RunningSidecar
from tests.sidecar.test_records import CHAT, call_of, eventually, self_signed


@pytest.fixture(scope="module")
def foreign(tmp_path_factory) -> Iterator[FakeEngine]:
    """A server with TLS that is not ours, and whose certificate only its users trust."""
    certificate, key = self_signed(tmp_path_factory.mktemp("foreign"))
    with closing(FakeEngine(ssl_certfile=certificate, ssl_keyfile=key)) as server:
        server.certificate = certificate  # type: ignore[attr-defined]
        yield server


@pytest.fixture(scope="module")
def sidecar(engine, foreign, tmp_path_factory) -> Iterator[RunningSidecar]:
    directory = tmp_path_factory.mktemp("ways")
    running = RunningSidecar(
        engine.url,
        directory / "traces",
        proxy="127.0.0.1:0",
        transparent="127.0.0.1:0",
        ca_dir=str(directory / "ca"),
        env={"SSL_CERT_FILE": foreign.certificate},
    )
    yield running
    running.stop()


@pytest.fixture(scope="module")
def ways(sidecar) -> dict[str, str]:
    found: dict[str, str] = sidecar.health()["ways"]
    return found


def client(ways: dict[str, str], run: str, **options: Any) -> httpx.Client:
    """Return an HTTP client that goes through the proxy and trusts what an agent would trust."""
    trusted = ssl.create_default_context(cafile=options.pop("trusted", ways["ca_bundle"]))
    proxy = f"http://{run}:ignored@{ways['proxy']}"
    return httpx.Client(proxy=proxy, verify=trusted, trust_env=False, timeout=20, **options)


def port_of(ways: dict[str, str], way: str) -> int:
    return int(ways[way].rpartition(":")[2])


def connect(ways: dict[str, str], target: str, *headers: str) -> Connection:
    """Open a tunnel through the proxy."""
    connection = Connection(port_of(ways, "proxy"))
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}", *headers, "", ""]
    connection.socket.sendall("\r\n".join(lines).encode())
    assert connection.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200")
    return connection


def test_plain_requests_to_an_intercepted_host(ways, sidecar, engine):
    with client(ways, "plain") as agent:
        reply = agent.post(f"http://api.openai.com{CHAT}", json={"stream": True, "events": 2})
        assert reply.content.endswith(b"data: [DONE]\n\n")
        again = agent.post("http://api.anthropic.com/v1/messages", json={"reply": "hi"})
    assert again.content == b"hi"
    call = call_of(sidecar, "plain")
    assert (call.session.way, call.outcome, call.upstream) == ("proxy", "complete", engine.url)
    assert call.tap_source == "inline" and call.request.path == CHAT
    names = {name.lower() for name, _ in call.request.headers}
    assert not names & {"proxy-authorization", "proxy-connection"}
    sent = engine.last()["headers"]
    assert sent["host"] == engine.url.removeprefix("http://")
    assert not set(sent) & {"proxy-authorization", "proxy-connection"}


def test_tls_to_an_intercepted_host(ways, sidecar):
    with client(ways, "tls") as agent:
        for number in range(2):
            reply = agent.post(f"https://api.openai.com{CHAT}", json={"reply": f"secret {number}"})
            assert reply.text == f"secret {number}"
    calls = [call for call in sidecar.calls(0) if call.session.run == "tls"]
    eventually(lambda: len([c for c in sidecar.calls(0) if c.session.run == "tls"]) == 2)
    calls = [call for call in sidecar.calls(0) if call.session.run == "tls"]
    assert {call.session.way for call in calls} == {"proxy"}
    assert all(call.response and call.response.body for call in calls)
    assert "ignored" not in repr(calls) and base64.b64encode(b"tls:ignored").decode() not in repr(
        calls
    )


def test_connect_to_port_80_with_plain_http_inside(ways, sidecar):
    credentials = base64.b64encode(b"undici:x").decode()
    tunnel = connect(ways, "api.openai.com:80", f"Proxy-Authorization: Basic {credentials}")
    assert tunnel.ask(post(CHAT, {"reply": "inside"}))[1] == b"inside"
    tunnel.close()
    assert call_of(sidecar, "undici").session.way == "proxy"


def test_curl(ways, sidecar):
    environment = {
        "PATH": os.environ["PATH"],
        "HTTPS_PROXY": f"http://curl:x@{ways['proxy']}",
        "CURL_CA_BUNDLE": ways["ca_bundle"],
    }
    data = '{"reply": "curled"}'
    command = ["curl", "-sS", "--data", data, f"https://api.openai.com{CHAT}"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.stdout == "curled", found.stderr
    assert call_of(sidecar, "curl").response


def test_other_tls_passes_with_its_own_certificate_unrecorded(ways, sidecar, foreign):
    before = len(sidecar.calls(0))
    tunnel = connect(ways, f"127.0.0.1:{foreign.port}")
    context = ssl.create_default_context(cafile=foreign.certificate)
    with context.wrap_socket(tunnel.socket, server_hostname="127.0.0.1") as secure:
        seen = ssl.DER_cert_to_PEM_cert(secure.getpeercert(binary_form=True) or b"")
        secure.sendall(post(CHAT, {"reply": "private"}, "Connection: close"))
        received = b""
        while piece := secure.recv(65536):
            received += piece
    assert received.endswith(b"private")
    assert seen.strip() == Path(foreign.certificate).read_text().strip()
    assert "x-ridealong-tap" not in foreign.last()["headers"]
    with client(ways, "marker") as agent:
        agent.post(f"http://api.openai.com{CHAT}", json={})
    call_of(sidecar, "marker")
    assert len(sidecar.calls(0)) == before + 1


def test_other_plain_http_passes_unrecorded(ways, sidecar):
    with closing(FakeEngine(tap=False)) as other, client(ways, "other") as agent:
        reply = agent.post(f"{other.url}/files", content=b"abc" * 100_000)
        assert reply.content == b"cba" * 100_000
        reply = agent.post(f"{other.url}{CHAT}", json={"stream": True})
        assert reply.content.endswith(b"[DONE]\n\n")
        sent = other.last()["headers"]
        assert sent["host"] == other.url.removeprefix("http://")
        assert not set(sent) & {"proxy-authorization", "x-ridealong-tap", "proxy-connection"}
    assert not [call for call in sidecar.calls(0) if call.session.run == "other"]


def test_what_passes_unread_ends_before_the_sidecar_does(start, engine):
    sidecar = start(engine.url, proxy="127.0.0.1:0", drain_seconds=20)
    ways = sidecar.health()["ways"]
    ask = {"stream": True, "events": 20, "delay": 0.1}
    with closing(FakeEngine(tap=False)) as other:
        target = f"127.0.0.1:{other.port}"
        tunnel, plain = connect(ways, target), Connection(port_of(ways, "proxy"))
        tunnel.socket.sendall(post(CHAT, ask))
        plain.socket.sendall(post(CHAT, ask).replace(b"POST ", f"POST http://{target}".encode(), 1))
        plain.read_until(b'"token":2}')
        sidecar.process.send_signal(signal.SIGTERM)
        for connection in (tunnel, plain):
            assert b"[DONE]\n\n\r\n0\r\n\r\n" in connection.read_to_end()
    assert sidecar.process.wait(timeout=10) == 0


def test_the_proxys_address_as_base_url_is_no_loop(ways):
    port = port_of(ways, "proxy")
    for host in ("127.0.0.1", "localhost"):
        request = post(CHAT, {"reply": "ok"}).replace(b"model.test", f"{host}:{port}".encode())
        assert Connection(port).ask(request)[1] == b"ok"


def test_no_loop_under_another_name(ways):
    name, port = socket.gethostname(), port_of(ways, "proxy")
    try:
        if socket.gethostbyname(name) != "127.0.0.1":
            pytest.skip("this machine's name is not its loopback address")
    except OSError:
        pytest.skip("this machine's name has no address")
    assert exchange(port, f"GET http://{name}:{port}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode()) == b""


def test_original_destination(engine, foreign, start, tmp_path):
    sidecar = start(
        engine.url,
        proxy="127.0.0.1:0",
        ca_dir=str(tmp_path / "ca"),
        intercept=[InterceptConfig(f"127.0.0.1:{foreign.port}", "original")],
        env={"SSL_CERT_FILE": foreign.certificate},
    )
    ways = sidecar.health()["ways"]
    with client(ways, "kept") as agent:
        reply = agent.post(f"{foreign.url}/chat/completions?x=1", json={"reply": "theirs"})
    assert reply.text == "theirs"
    call = call_of(sidecar, "kept")
    assert (call.upstream, call.request.path) == (foreign.url, "/chat/completions?x=1")
    assert call.response and call.response.body and call.response.body.text == "theirs"
    sent = foreign.last()
    assert sent["path"] == "/chat/completions" and "x-ridealong-tap" not in sent["headers"]
    assert sent["headers"]["accept-encoding"] == agent.headers["accept-encoding"]


def test_an_abort_inside_a_tunnel_reaches_the_engine(ways, engine):
    seen = len(engine.disconnects)
    with (
        client(ways, "abort") as agent,
        agent.stream(
            "POST", f"https://api.openai.com{CHAT}", json={"stream": True, "events": 99, "delay": 1}
        ) as reply,
    ):
        next(reply.iter_bytes())
    eventually(lambda: len(engine.disconnects) > seen)


def comparable(call: Exchange) -> dict[str, Any]:
    """Return a record without what differs between any two calls."""
    fields: dict[str, Any] = msgspec.to_builtins(call)
    for name in ("id", "started", "ended", "first_byte"):
        fields.pop(name)
    fields["session"] = {"run": call.session.run is not None}
    fields["request"]["headers"] = [
        [name.lower(), value]
        for name, value in fields["request"]["headers"]
        if name.lower() not in ("host", "proxy-connection")
    ]
    fields["response"]["headers"] = [h for h in fields["response"]["headers"] if h[0] != "date"]
    return fields


def test_the_same_records_from_each_way_at_once(ways, sidecar):
    ask = {"stream": True, "events": 5, "delay": 0.02}
    options: dict[str, Any] = {"headers": {"x-api-key": "k", "accept": "*/*"}}
    clients = {
        "same-base": (httpx.Client(trust_env=False, **options), f"{ways['base_url']}/r/same-base"),
        "same-plain": (client(ways, "same-plain", **options), "http://api.openai.com"),
        "same-tls": (client(ways, "same-tls", **options), "https://api.openai.com"),
    }
    bodies = {}

    def run(name: str) -> None:
        agent, url = clients[name]
        bodies[name] = agent.post(f"{url}{CHAT}", json=ask).content

    threads = [threading.Thread(target=run, args=(name,)) for name in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(bodies) == len(clients) and len(set(bodies.values())) == 1
    found = [comparable(call_of(sidecar, name)) for name in clients]
    assert len(found[0]["tap"]) == 7
    for other in found[1:]:
        assert other == found[0]
    ways_seen = [call_of(sidecar, name).session.way for name in clients]
    assert ways_seen == ["base_url", "proxy", "proxy"]


def test_the_authority_is_kept_and_its_key_is_secret(ways, engine, start):
    bundle = Path(ways["ca_bundle"])
    directory = bundle.parent
    key_folder = directory / "key"
    assert key_folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in key_folder.iterdir()} == {0o600}
    assert bundle.stat().st_mode & 0o777 == 0o644
    certificate = Path(ways["ca_certificate"]).read_text()
    assert "PRIVATE" not in certificate and certificate in bundle.read_text()
    assert sorted(path.name for path in directory.iterdir()) == ["bundle.pem", "ca.pem", "key"]
    again = start(engine.url, proxy="127.0.0.1:0", ca_dir=str(directory))
    assert Path(again.health()["ways"]["ca_certificate"]).read_text() == certificate


def test_base_url_alone_needs_no_authority(engine, start, tmp_path):
    sidecar = start(engine.url, ca_dir=str(tmp_path / "ca"))
    assert set(sidecar.health()["ways"]) == {"base_url"}
    assert not (tmp_path / "ca").exists()


NETWORK = "ridealong-test"
SCRIPT = Path(__file__).parents[2] / "deploy" / "transparent.sh"
HOST, PEER = "10.213.77.1", "10.213.77.2"
HOST6, PEER6 = "fd5a:77::1", "fd5a:77::2"


def netns(*command: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    inside = ["ip", "netns", "exec", NETWORK, *command]
    return subprocess.run(inside, capture_output=True, text=True, check=check)


def rules() -> str:
    return netns("iptables-save", "-t", "nat").stdout


@pytest.fixture(scope="module")
def network() -> Iterator[str]:
    """A network namespace with one cable to this one, as a pod has."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("iptables"):
        pytest.skip("a network namespace needs root, ip and iptables")
    script = f"""
        ip netns add {NETWORK}
        ip link add rdl-host type veth peer name rdl-peer netns {NETWORK}
        ip addr add {HOST}/30 dev rdl-host
        ip addr add {HOST6}/64 dev rdl-host nodad
        ip link set rdl-host up
        ip netns exec {NETWORK} ip addr add {PEER}/30 dev rdl-peer
        ip netns exec {NETWORK} ip addr add {PEER6}/64 dev rdl-peer nodad
        ip netns exec {NETWORK} ip link set rdl-peer up
        ip netns exec {NETWORK} ip link set lo up
    """
    try:
        made = subprocess.run(["sh", "-ec", script], capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"no network namespace here: {made.stderr}")
        if netns("iptables", "-t", "nat", "-L", check=False).returncode:
            pytest.skip("iptables does not work here")
        yield NETWORK
    finally:
        subprocess.run(["ip", "netns", "del", NETWORK], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", "rdl-host"], capture_output=True, check=False)


class Public:
    """A folder whose files agents, who run as another user, can read."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp())
        self.path.chmod(0o755)

    def copy(self, path: Path) -> str:
        """Copy a file there; return where it is."""
        copy = shutil.copy(path, self.path)
        os.chmod(copy, 0o644)
        return str(copy)


@pytest.fixture(scope="module")
def public() -> Iterator[Public]:
    folder = Public()
    yield folder
    shutil.rmtree(folder.path)


@pytest.fixture(scope="module")
def far_engine(network) -> Iterator[FakeEngine]:
    with closing(FakeEngine(host=HOST)) as running:
        yield running


@pytest.fixture(scope="module")
def pod(network, far_engine, public, tmp_path_factory) -> Iterator[RunningSidecar]:
    """A sidecar in the namespace; it runs as root, the agents as somebody else."""
    directory = tmp_path_factory.mktemp("pod")
    running = RunningSidecar(
        far_engine.url,
        directory / "traces",
        prefix=["ip", "netns", "exec", NETWORK],
        proxy="127.0.0.1:8789",
        transparent="127.0.0.1:15001",
        ca_dir=str(directory / "ca"),
    )
    running.bundle = public.copy(directory / "ca" / "bundle.pem")  # type: ignore[attr-defined]
    ports = f"80,443,{far_engine.port}"
    netns(str(SCRIPT), "up", "--exclude-uid", "0", "--ports", ports)
    yield running
    netns(str(SCRIPT), "down")
    running.stop()


def agent_curl(*arguments: str) -> str:
    """Run curl as an agent in the namespace: another user, no variables, no proxy."""
    command = ["setpriv", "--reuid", "65534", "--clear-groups", "curl", "-sS", "--max-time", "20"]
    done = netns(*command, *arguments, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_transparent_rules_can_be_repeated_and_taken_back(network):
    before = rules()
    for _ in range(2):
        netns(str(SCRIPT), "up", "--exclude-uid", "1337", "--port", "15009")
    assert rules().count("-j RIDEALONG") == 1 and rules().count("15009") == 1
    for _ in range(2):
        netns(str(SCRIPT), "down")
    assert "RIDEALONG" not in rules()
    assert before.count("\n-A") == rules().count("\n-A")
    wrong = netns(str(SCRIPT), "up", "--exclude-uid", "1337", "--ports", "80;443", check=False)
    assert wrong.returncode == 2 and "number" in wrong.stderr and "RIDEALONG" not in rules()


def test_transparent(pod, far_engine):
    ask = json.dumps({"stream": True, "events": 3})
    plain = agent_curl("--data", ask, f"{far_engine.url}/r/clear{CHAT}")
    assert plain.endswith("data: [DONE]\n\n")
    tls = agent_curl(
        "--cacert", pod.bundle, "--resolve", f"api.openai.com:443:{HOST}",
        "--data", ask, f"https://api.openai.com/r/veiled{CHAT}",
    )  # fmt: skip
    assert tls == plain
    proxied = agent_curl(
        "--proxy", "http://asked:x@127.0.0.1:8789", "--data", ask, f"http://api.openai.com{CHAT}"
    )
    assert proxied == plain
    base_url = agent_curl("--data", ask, f"http://127.0.0.1:{pod.port}/r/based{CHAT}")
    assert base_url == plain
    runs = ("clear", "veiled", "asked", "based")
    calls = [call_of(pod, run) for run in runs]
    ways_seen = [call.session.way for call in calls]
    assert ways_seen == ["transparent", "transparent", "proxy", "base_url"]
    assert calls[0].session.peer.startswith(PEER)
    found = [comparable(call) for call in calls]
    assert all(other == found[0] for other in found[1:])
    assert {call.tap_source for call in calls} == {"inline"}


def test_transparent_over_ipv6(pod, public, tmp_path):
    if netns("ip6tables", "-t", "nat", "-L", check=False).returncode:
        pytest.skip("ip6tables does not work here")
    ask = json.dumps({"reply": "six"})
    with closing(FakeEngine(host=HOST6, port=80)) as other:
        # By its address it is nobody's; by its Host header it is intercepted.
        assert agent_curl("--data", ask, f"{other.url}{CHAT}") == "six"
        assert "x-ridealong-tap" not in other.last()["headers"]
        seen = len(other.requests)
        named = ["--resolve", f"api.openai.com:80:[{HOST6}]"]
        url = f"http://api.openai.com/r/six{CHAT}"
        assert agent_curl(*named, "--data", ask, url) == "six"
        assert len(other.requests) == seen, "the model server has answered"
    call = call_of(pod, "six")
    assert call.session.way == "transparent" and call.session.peer.startswith(PEER6)


def test_transparent_leaves_others_alone(pod, public, tmp_path):
    certificate, key = self_signed(tmp_path, HOST)
    other = FakeEngine(host=HOST, port=443, ssl_certfile=certificate, ssl_keyfile=key)
    plain = FakeEngine(host=HOST, port=80)
    with closing(other), closing(plain):
        before = len(pod.calls(0))
        data = '{"reply": "own"}'
        trusted = public.copy(Path(certificate))
        assert agent_curl("--cacert", trusted, "--data", data, f"https://{HOST}{CHAT}") == "own"
        assert agent_curl("--data", data, f"http://{HOST}{CHAT}") == "own"
        assert "x-ridealong-tap" not in other.last()["headers"]
        assert "x-ridealong-tap" not in plain.last()["headers"]
        assert len(pod.calls(0)) == before


def test_get_passes_in_every_way(ways):
    assert (
        Connection(port_of(ways, "base_url")).ask(get("/v1/models"))[0].startswith(b"HTTP/1.1 404")
    )
    with client(ways, "models") as agent:
        assert agent.get("https://api.openai.com/v1/models").status_code == 404
