"""Where requests go, under which model name and with whose credentials."""

import asyncio
import gzip
import json
import logging
import socket
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import brotli
import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from deploy.errors import UserError
from sidecar.bodies import body
from sidecar.config import InterceptConfig, SidecarConfig, UpstreamConfig
from sidecar.routing.addresses import Address, Upstream, parse_upstream
from sidecar.routing.health import watch
from sidecar.routing.intercept import Interception
from sidecar.routing.routes import is_responses_upgrade, upstream_target
from sidecar.routing.upstreams import Health, Target, parse_targets
from tests.sidecar.client import Connection, exchange, post
from tests.sidecar.fake_engine import FakeEngine
from tests.sidecar.running import RunningSidecar
from tests.sidecar.test_records import CHAT, call_of, eventually
from tokenization.tap import wire


def upstreams(*entries: dict[str, object]) -> SidecarConfig:
    return SidecarConfig(
        upstream="http://default", upstreams=msgspec.convert(entries, list[UpstreamConfig])
    )


def target(**options) -> Target:
    config = upstreams({"urls": ["http://one"], **options})
    return parse_targets(config, {}, str).all[0]


@pytest.mark.parametrize(
    ("prefix", "asked", "sent"),
    [
        ("", "/v1/chat/completions", "/v1/chat/completions"),
        ("", "/chat/completions?x=1", "/v1/chat/completions?x=1"),
        ("", "/v1/v1/messages?beta=true", "/v1/messages?beta=true"),
        ("", "/messages/count_tokens", "/v1/messages/count_tokens"),
        ("", "/models", "/v1/models"),
        ("", "/v1/models/a/b", "/v1/models/a/b"),
        ("", "/responses/resp_1/cancel", "/v1/responses/resp_1/cancel"),
        ("/v1", "/v1/chat/completions", "/v1/chat/completions"),
        ("/v1", "/responses", "/v1/responses"),
        ("/team/a", "/messages", "/team/a/v1/messages"),
        ("/api/paas/v4", "/v1/chat/completions", "/api/paas/v4/chat/completions"),
        ("/v1", "/health", "/v1/health"),
        ("", "/v1/embeddings", "/v1/embeddings"),
        ("", "/embeddings", "/embeddings"),
        ("", "/v1/v1/embeddings", "/v1/v1/embeddings"),
        ("", "/", "/"),
        ("/p", "*", "*"),
        ("", "", ""),
    ],
)
def test_one_v1(prefix, asked, sent):
    assert upstream_target(prefix, asked) == sent


@given(st.text(alphabet="/v1abr?=", max_size=20))
def test_what_is_no_model_call_only_gets_the_prefix(rest):
    path = f"/{rest}"
    if upstream_target("", path) == path:
        return
    for known in ("/models", "/messages", "/responses", "/completions"):
        assert known not in path, "only these are put right"
    raise AssertionError(path)


def test_upgrades_on_responses():
    assert is_responses_upgrade("GET", "/v1/responses?x", "WebSocket")
    assert not is_responses_upgrade("GET", "/v1/responses", None)
    assert not is_responses_upgrade("GET", "/v1/realtime", "websocket")


def test_choice_by_path_and_model():
    config = upstreams(
        {"name": "claude", "urls": ["http://a"], "paths": ["/v1/messages*"]},
        {"name": "big", "urls": ["http://b"], "models": ["big-*", "huge"]},
    )
    targets = parse_targets(config, {}, str)
    assert [t.name for t in targets.all] == ["claude", "big", "default"]
    assert targets.choose("/v1/messages/count_tokens", "huge").name == "claude"
    assert targets.choose("/v1/chat/completions", "big-1").name == "big"
    assert targets.choose("/v1/chat/completions", "small").name == "default"
    assert targets.choose("/v1/models", None).name == "default"
    assert not targets.reads_model("/v1/messages")
    assert targets.reads_model("/v1/chat/completions")
    assert [r.address.host for r in targets.replicas()] == ["a", "b", "default"]


def test_a_target_that_takes_everything_is_the_default():
    targets = parse_targets(upstreams({"urls": ["http://a/x"]}), {}, str)
    assert targets.default.name == "http://a:80/x" and len(targets.all) == 1
    assert not targets.reads_model("/any")


def test_renaming():
    chosen = target(rename={"gpt-*": "mine", "gpt-5": "five", "same": "same"})
    assert chosen.renamed("gpt-5") == "five", "an exact name counts first"
    assert chosen.renamed("gpt-4o") == "mine"
    assert chosen.renamed("claude") is None and chosen.renamed("same") is None
    assert target().renamed("gpt-5") is None


AGENT = [("Authorization", "Bearer agent"), ("X-Api-Key", "agent"), ("accept", "x")]


def test_credentials(tmp_path):
    assert target().with_credentials(AGENT) == AGENT
    assert target(credentials="drop").with_credentials(AGENT) == [("accept", "x")]
    config = upstreams(
        {"urls": ["http://a"], "credentials": "replace", "credential_env": "KEY"},
        {
            "urls": ["http://b"],
            "credentials": "replace",
            "credential_file": "f",
            "credential_header": "x-api-key",
        },
    )
    targets = parse_targets(config, {"KEY": " k1\n"}, {"f": "k2\n"}.__getitem__)
    first, second = (t.with_credentials(AGENT) for t in targets.all[:2])
    assert first == [("accept", "x"), ("authorization", "Bearer k1")]
    assert second == [("accept", "x"), ("x-api-key", "k2")]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"urls": ["h:1"]}, "sidecar.upstreams 'h:1'"),
        ({"urls": ["http://a", "https://b"]}, "all http or all https"),
        ({"urls": ["http://a"], "paths": ["v1"]}, "slash"),
        ({"urls": ["http://a"], "credentials": "replace"}, "credential_env"),
        ({"urls": ["http://a"], "credential_env": "X"}, "replace"),
        ({"urls": ["http://a"], "credentials": "replace", "credential_env": "X"}, "variable X"),
        ({"urls": ["http://a"], "credentials": "replace", "credential_file": "/nowhere"}, "read"),
    ],
)
def test_a_wrong_upstream_is_one_line(entry, message):
    with pytest.raises(UserError) as error:
        parse_targets(upstreams(entry), {}, lambda path: Path(path).read_text())
    assert message in str(error.value) and "\n" not in str(error.value)


def test_two_of_one_name():
    entry = {"name": "x", "urls": ["http://a"], "paths": ["/a"]}
    with pytest.raises(UserError, match="named x"):
        parse_targets(upstreams(entry, entry), {}, str)


REPLICAS = tuple(parse_upstream(f"http://r{number}") for number in range(4))


def test_the_same_caller_gets_the_same_replica():
    health, group = Health(), Target("g", REPLICAS)
    keys = [f"run-{number}" for number in range(4000)]
    first = {key: health.order(group, key)[0] for key in keys}
    assert first == {key: health.order(group, key)[0] for key in keys}
    share = Counter(first.values())
    assert all(800 < share[replica] < 1200 for replica in REPLICAS), share
    gone = REPLICAS[1]
    assert health.connected(gone, False) and not health.connected(gone, False)
    moved = {key: health.order(group, key) for key in keys}
    assert all(len(order) == 4 and order[-1] == gone for order in moved.values())
    kept = [key for key in keys if first[key] != gone]
    assert all(moved[key][0] == first[key] for key in kept), "only its own callers move"
    after = Counter(moved[key][0] for key in keys if first[key] == gone)
    assert len(after) == 3 and min(after.values()) > 200, "and they spread over the others"
    health.checked(gone, True)
    assert first == {key: health.order(group, key)[0] for key in keys}


def test_what_is_known_of_a_replica():
    health, (one, *_) = Health(), REPLICAS
    assert health.checked(one, False) and not health.well(one)
    assert not health.connected(one, True), "a failing server takes connections, too"
    assert not health.well(one)
    assert health.checked(one, True) and health.well(one)
    assert health.connected(one, False)
    assert not health.checked(one, False), "nothing new"
    assert health.checked(one, True) and health.well(one)


@pytest.mark.parametrize(
    ("host", "name", "found"),
    [
        ("api.openai.com", "api.openai.com:443", True),
        ("api.openai.com", "API.openai.com:8080", True),
        ("api.openai.com", "api.openai.com.evil.test:443", False),
        ("api.openai.com", "xapi.openai.com:443", False),
        ("api.openai.com", "apixopenai.com:443", False),
        ("api.openai.com", "api.openai.com.:443", True),
        ("api.openai.com", "api.openai.com..:443", False),
        ("*.example.com", "a.b.example.com:443", True),
        ("*.example.com", "example.com:443", False),
        ("10.0.0.5:8000", "10.0.0.5:8000", True),
        ("10.0.0.5:8000", "10.0.0.5:80", False),
        ("[::1]:8000", "::1:8000", True),
        ("*", "anything:1", True),
    ],
)
def test_intercepted_hosts(host, name, found):
    hosts = Interception([InterceptConfig(host)], [], [])
    assert (hosts.destination([name]) == "routes") == found


def test_the_first_intercept_entry_counts_and_upstreams_always_do():
    entries = [InterceptConfig("a.test:1", "original"), InterceptConfig("*.test")]
    hosts = Interception(entries, [Address("m.example", 8000)], [Address("127.0.0.1", 9)])
    assert hosts.destination(["a.test:1"]) == "original"
    assert hosts.destination(["10.0.0.1:443", "b.test:443"]) == "routes"
    assert hosts.destination(["m.example:8000"]) == "routes"
    assert hosts.destination(["localhost:9"]) == "routes"
    local = Interception([], [Address("localhost", 8000)], [])
    assert local.destination(["127.0.0.1:8000"]) == "routes"
    assert hosts.destination(["m.example:80"]) is None
    with pytest.raises(UserError, match=r"api\.openai\.com"):
        Interception([InterceptConfig("https://x")], [], [])


ENCODERS = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.compress,
    "identity": bytes,
}


@given(st.dictionaries(st.text(max_size=4), st.text(max_size=9)), st.text(max_size=9))
@pytest.mark.parametrize("encoding", ENCODERS)
def test_the_model_is_read_and_replaced_in_the_text(encoding, fields, new):
    text = json.dumps({**fields, "model": "old", "x": [1.0, {"model": "inner"}]}).encode()
    read = body.read(ENCODERS[encoding](text), encoding.upper())
    assert read is not None and read.model == "old"
    changed = body.with_model(read, new)
    assert json.loads(changed) == json.loads(text) | {"model": new}
    assert changed == text.replace(b'"model": "old"', b'"model": ' + json.dumps(new).encode())


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b"{", b'{"model": ', b"\xff", b'{"model": "a"} x']
)
def test_what_can_not_be_read_is_left_alone(content):
    for encoding in ("", "gzip", "unheard-of"):
        assert body.read(content, encoding) is None


def test_a_model_that_is_no_text():
    read = body.read(b'{"model": 7}', "")
    assert read is not None and read.model is None


@pytest.fixture(scope="module")
def other() -> Iterator[FakeEngine]:
    with closing(FakeEngine()) as running:
        yield running


@pytest.fixture(scope="module")
def routed(engine, other, tmp_path_factory) -> Iterator[RunningSidecar]:
    running = RunningSidecar(
        "http://127.0.0.1:1",
        tmp_path_factory.mktemp("routed") / "traces",
        upstreams=[
            UpstreamConfig([other.url], name="messages", paths=["/v1/messages"]),
            UpstreamConfig([f"{other.url}/prefix"], name="big", models=["big*"]),
            UpstreamConfig([engine.url], name="rest", rename={"gpt*": "mine"}),
        ],
    )
    yield running
    running.stop()


def reply_of(port: int, ask: dict[str, object], *headers: str, path: str = CHAT) -> bytes:
    return Connection(port).ask(post(path, ask, *headers))[1]


def test_requests_go_by_path_and_by_model(engine, other, routed):
    sidecar = routed
    connection = Connection(sidecar.port)
    for run, path, ask in (
        ("p", "/messages", {}),
        ("m", CHAT, {"model": "big-1", "stream": True}),
        ("d", CHAT, {"model": "small"}),
    ):
        assert b"HTTP/1.1 200" in connection.ask(post(f"/r/{run}{path}", ask))[0]
    assert call_of(sidecar, "p").upstream == other.url
    assert call_of(sidecar, "p").request.path == "/v1/messages"
    big = call_of(sidecar, "m")
    assert (big.upstream, big.request.path) == (f"{other.url}/prefix", f"/prefix{CHAT}")
    assert big.tap_source == "inline" and big.renamed is None
    assert call_of(sidecar, "d").upstream == engine.url
    assert set(sidecar.health()["upstreams"]) == {"messages", "big", "rest"}


@pytest.mark.parametrize("encoding", ENCODERS)
@pytest.mark.parametrize("chunked", [False, True])
def test_a_renamed_model(engine, routed, encoding, chunked):
    for model, seen in (("gpt-5", b'"mine"'), ("other", b'"other"')):
        run = f"{model}-{encoding}-{chunked}"
        text = b'{ "reply":"ok" ,\t"model" : "%s"}' % model.encode()
        sent = ENCODERS[encoding](text)
        framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(sent)}"
        lines = [f"POST /r/{run}{CHAT} HTTP/1.1", "Host: x", framing]
        lines += [f"Content-Encoding: {encoding}", "", ""]
        content = b"%x\r\n%b\r\n0\r\n\r\n" % (len(sent), sent) if chunked else sent
        request = "\r\n".join(lines).encode() + content
        if model == "other" and encoding != "identity":
            # The engine can't read it; that it came as it was sent is what is looked at.
            connection = Connection(routed.port)
            connection.socket.sendall(request)
            eventually(lambda sent=sent: engine.last()["body"] == sent)
            connection.close()
            assert engine.last()["headers"]["content-encoding"] == encoding
            continue
        assert Connection(routed.port).ask(request)[1] == b"ok"
        arrived = engine.last()
        assert arrived["body"] == text.replace(b'"%s"' % model.encode(), seen)
        call = call_of(routed, run)
        assert call.request.body and call.request.body.raw() == sent
        assert call.renamed == (("gpt-5", "mine") if model == "gpt-5" else None)


def test_credentials_are_replaced_for_the_pull_too(start):
    with closing(FakeEngine()) as engine:
        sidecar = start(
            engine.url,
            env={"THE_KEY": "sk-ours"},
            upstreams=[
                UpstreamConfig([engine.url], credentials="replace", credential_env="THE_KEY")
            ],
        )
        connection = Connection(sidecar.port)
        ask = {"stream": True, "events": 9, "delay": 0.2}
        connection.socket.sendall(post(f"/r/pull{CHAT}", ask, "Authorization: Bearer agent"))
        connection.read_until(b'"token":0}')
        connection.close()
        assert call_of(sidecar, "pull").tap_source == "pulled"
        asked = [
            r["headers"].get("authorization")
            for r in engine.requests
            if r["path"] == CHAT or r["path"].startswith(wire.PULL_PATH)
        ]
        assert asked == ["Bearer sk-ours", "Bearer sk-ours"]
        assert "sk-ours" not in repr(sidecar.calls(1))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def test_a_call_goes_to_another_replica_while_nothing_of_it_was_sent(engine, other, start):
    dead = f"http://127.0.0.1:{free_port()}"
    replicas = UpstreamConfig([engine.url, dead, f"{other.url}/prefix"], name="three")
    sidecar = start(engine.url, upstreams=[replicas], health_seconds=60)
    for number in range(12):
        answer = reply_of(sidecar.port, {"reply": "ok"}, path=f"/r/{number}{CHAT}")
        assert answer == b"ok"
    calls = sidecar.calls(12)
    where = Counter(call.upstream for call in calls)
    assert set(where) == {engine.url, f"{other.url}/prefix"}
    for call in calls:
        prefixed = call.upstream.endswith("/prefix")
        assert call.request.path == (f"/prefix{CHAT}" if prefixed else CHAT)
    eventually(lambda: any(dead in reason for reason in sidecar.health()["reasons"]))
    hosts = {r["headers"]["host"] for r in other.requests[-3:]}
    assert hosts == {other.url.removeprefix("http://")}


def test_a_replica_that_breaks_off_is_not_tried_elsewhere(engine, raw_server, start):
    raw_server.answer, raw_server.reset = [b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"], False
    checks, before = len(raw_server.requests), len(engine.requests)
    group = UpstreamConfig([raw_server.url, engine.url], health_path="/nowhere")
    sidecar = start(engine.url, upstreams=[group], health_seconds=60)
    # The only health check finds it well: the call goes there for certain.
    eventually(lambda: len(raw_server.requests) > checks)
    raw_server.answer = []
    chosen = Target("g", tuple(map(parse_upstream, group.urls)))
    run = next(
        f"n{n}" for n in range(99) if Health().order(chosen, f"n{n}")[0].url == raw_server.url
    )
    assert exchange(sidecar.port, post(f"/r/{run}{CHAT}", {})) == b""
    call = call_of(sidecar, run)
    assert (call.upstream, call.outcome) == (raw_server.url, "upstream_error")
    assert not [r for r in engine.requests[before:] if r["path"] == CHAT]


def test_no_replica_answers(start):
    dead = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    sidecar = start(dead[0], upstreams=[UpstreamConfig(dead)], health_seconds=60)
    assert exchange(sidecar.port, post(f"/r/none{CHAT}", {})) == b""
    assert call_of(sidecar, "none").outcome == "upstream_error"


async def test_replicas_are_watched(engine, caplog):
    down = parse_upstream(f"http://127.0.0.1:{free_port()}")
    group = Target("g", (parse_upstream(engine.url), down), health_path="/ridealong/engine")
    alone = Target("alone", (Upstream("http", Address("127.0.0.1", 1), ""),))
    health = Health()

    class Both:
        all = (group, alone)

    with caplog.at_level(logging.WARNING):
        task = asyncio.create_task(watch(Both, health, 0.05))  # type: ignore[arg-type]
        async with asyncio.timeout(5):
            while health.well(down):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        task.cancel()
    assert health.well(group.replicas[0]) and health.well(alone.replicas[0])
    assert len(caplog.records) == 1, "only news is reported"
