"""Readiness, metrics and logs of a running sidecar."""

import json
import logging
import os
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request

from sidecar.operations.logs import JsonFormatter
from tests.sidecar.client import Connection, post
from tests.sidecar.running import RunningSidecar
from tests.sidecar.test_records import CHAT, eventually
from tests.sidecar.test_writer import small_disk  # noqa: F401  (a fixture)


def ready(sidecar: RunningSidecar) -> tuple[int, list[str]]:
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{sidecar.admin}/readyz", timeout=10
        ) as reply:
            return reply.status, json.load(reply)["reasons"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["reasons"]


def test_ready_until_it_ends(engine, start):
    sidecar = start(engine.url)
    assert ready(sidecar) == (200, [])
    connection = Connection(sidecar.port)
    connection.socket.sendall(post(CHAT, {"stream": True, "events": 100, "delay": 0.05}))
    connection.read_until(b'"token":0}')
    sidecar.process.send_signal(signal.SIGTERM)
    eventually(lambda: ready(sidecar)[0] == 503)
    assert "is ending" in ready(sidecar)[1][0]
    connection.close()


def test_not_ready_without_the_model_server(start):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sidecar = start(f"http://127.0.0.1:{port}")
    status, (reason,) = ready(sidecar)
    assert status == 503 and f"http://127.0.0.1:{port}" in reason
    with socket.create_server(("127.0.0.1", port)):
        assert ready(sidecar) == (200, [])


def test_not_ready_without_a_disk(engine, small_disk):  # noqa: F811
    traces = small_disk / "traces"
    sidecar = RunningSidecar(engine.url, traces, key_file=str(small_disk / "s"))
    try:
        eventually(lambda: ready(sidecar) == (200, []))
        with (small_disk / "ballast").open("wb") as ballast:
            size = os.statvfs(small_disk)
            ballast.write(bytes(size.f_bavail * size.f_frsize))
        status, (reason,) = ready(sidecar)
        assert status == 503 and "No space left" in reason
        (small_disk / "ballast").unlink()
        assert ready(sidecar) == (200, [])
        assert not [path for path in traces.iterdir() if path.name.startswith(".ready")]
    finally:
        sidecar.stop()


def test_metrics_tell_calls_and_what_they_waited_for(engine, start):
    sidecar = start(engine.url, token_source="tap")
    connection = Connection(sidecar.port)
    for number in range(3):
        connection.ask(post(CHAT, {"stream": number == 0, "events": 3, "first_delay": 0.3}))
    connection.ask(post("/files", {}))
    sidecar.calls(4)
    prefix = "ridealong_sidecar"

    def metric(name, **labels):
        text = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        return sidecar.metric(f"{prefix}_{name}" + (f"{{{text}}}" if text else ""))

    labels = {"route": "chat", "outcome": "complete", "token_source": "inline"}
    eventually(lambda: metric("calls_total", **labels) == 3)
    other = {"route": "other", "outcome": "complete", "token_source": "none"}
    assert metric("calls_total", **other) == 1
    for phase in ("request", "reply_head", "reply_end"):
        assert metric("added_seconds_count", phase=phase) == 3
        # The model server's own 0.3 s are no part of it.
        assert 0 < metric("added_seconds_sum", phase=phase) < 0.5
    assert metric("records_lost_total") == metric("queue_bytes") == 0
    assert metric("body_bytes_total", direction="request") > 0


def test_json_logs(start):
    sidecar = start("http://127.0.0.1:1", log_format="json")
    eventually(sidecar.errors)
    status, errors = sidecar.stop()
    assert status == 0
    lines = [json.loads(line) for line in errors.splitlines()]
    assert {line["level"] for line in lines} == {"warning", "info"}
    assert all(line["logger"].startswith("sidecar.") and line["time"] for line in lines)


def test_an_exception_is_one_json_line():
    try:
        {}["é\n"]
    except KeyError:
        record = logging.LogRecord(
            "sidecar.x", logging.ERROR, __file__, 1, "%s\nfailed", ("it",), sys.exc_info()
        )
    line = JsonFormatter().format(record)
    assert "\n" not in line
    entry = json.loads(line)
    assert entry["message"] == "it\nfailed" and "KeyError" in entry["exception"]
    assert entry["level"] == "error"


def test_a_second_probe_does_not_pile_up_on_a_disk_that_hangs(tmp_path, monkeypatch):
    import asyncio

    from sidecar.config import SidecarConfig
    from sidecar.operations import ready as module
    from sidecar.routing.upstreams import parse_targets

    hangs = threading.Event()
    started = []

    def write(folder):
        started.append(folder)
        hangs.wait(10)

    monkeypatch.setattr(module, "_write", write)
    monkeypatch.setattr(module, "_SECONDS", 0.1)

    async def ask():
        targets = parse_targets(SidecarConfig(upstream="http://127.0.0.1:1"), {}, str)
        readiness = module.Readiness(targets, tmp_path, lambda: True)
        found = [await readiness.reasons() for _ in range(3)]
        hangs.set()
        return found

    found = asyncio.run(ask())
    assert len(started) == 1
    assert all("does not answer" in reasons[0] for reasons in found)
