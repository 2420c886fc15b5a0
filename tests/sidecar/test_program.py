"""Starting, ending and dying."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from deploy.errors import UserError
from sidecar.config import SidecarConfig
from sidecar.program import run
from sidecar.traces.record import Exchange, RecordsLost, SidecarStarted
from tests.sidecar.client import Connection, post
from tests.sidecar.running import RunningSidecar, records
from tests.sidecar.test_records import CHAT, call_of, eventually
from tests.sidecar.test_writer import small_disk  # noqa: F401  (a fixture)


def test_it_starts_fast_and_without_torch():
    code = (
        "import time, sys; t = time.process_time(); import sidecar.program; "
        "print(time.process_time() - t); "
        "print([m for m in ('torch', 'transformers', 'vllm', 'ray', 'numpy') if m in sys.modules])"
    )
    seconds, heavy = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    print(f"import sidecar.program: {float(seconds):.2f} s of CPU")
    assert heavy == "[]"
    assert float(seconds) < 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"listen": "0.0.0.0:8787"}, "127.0.0.1"),
        ({"admin": "192.168.0.1:1"}, "sidecar.admin"),
        ({"upstream": "localhost"}, "http://127.0.0.1:8000"),
        ({"upstream": "http://localhost:7", "listen": "127.0.0.1:7"}, "the sidecar itself"),
        ({"traces": __file__}, "not a folder"),
    ],
)
def test_what_the_user_can_put_right_is_one_line(options, message):
    with pytest.raises(UserError) as error:
        run(SidecarConfig(**options))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["listen", "admin"])
def test_an_occupied_port(key, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"}
        options = free | {key: f"127.0.0.1:{taken.getsockname()[1]}"}
        with pytest.raises(UserError, match=f"sidecar.{key}.*in use"):
            run(SidecarConfig(traces=str(tmp_path / "t"), **options))
    assert not (tmp_path / "t").exists()


def test_an_unreachable_upstream_is_one_warning_and_no_obstacle(start):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sidecar = start(f"http://127.0.0.1:{port}")
    assert sidecar.health()["tap_available"] is None
    status, errors = sidecar.stop()
    assert status == 0
    (line,) = [line for line in errors.splitlines() if "WARNING" in line]
    assert "can't be reached" in line


def test_sigterm_lets_streams_end_and_refuses_new_connections(engine, start):
    sidecar = start(engine.url)
    streaming, idle = Connection(sidecar.port), Connection(sidecar.port)
    idle.ask(post(CHAT, {}))
    ask = {"stream": True, "events": 20, "delay": 0.05}
    streaming.socket.sendall(post(f"/r/last{CHAT}", ask))
    streaming.read_until(b'"token":0}')
    sidecar.process.send_signal(signal.SIGTERM)
    assert idle.read_to_end() == b"", "idle connections are closed"
    with pytest.raises(ConnectionRefusedError):
        Connection(sidecar.port)
    assert b"[DONE]\n\n\r\n0\r\n\r\n" in streaming.read_to_end()
    assert sidecar.stop()[0] == 0
    assert call_of(sidecar, "last").outcome == "complete"


def test_many_connections_at_once_wait_their_turn(start, engine):
    """A full queue of waiting connections would cost each further one a second or more."""
    sidecar = start(engine.url)
    sidecar.process.send_signal(signal.SIGSTOP)
    try:
        waiting = [socket.create_connection(("127.0.0.1", sidecar.port), 0.5) for _ in range(300)]
    finally:
        sidecar.process.send_signal(signal.SIGCONT)
    for connection in waiting:
        connection.close()


@pytest.mark.parametrize("drain_seconds", [0.2, 60])
def test_draining_ends_in_time_or_with_a_second_signal(engine, start, drain_seconds):
    sidecar = start(engine.url, drain_seconds=drain_seconds)
    connection = Connection(sidecar.port)
    ask = {"stream": True, "events": 100, "delay": 0.05}
    connection.socket.sendall(post(f"/r/cut{CHAT}", ask))
    connection.read_until(b'"token":2}')
    started = time.monotonic()
    sidecar.process.send_signal(signal.SIGTERM)
    if drain_seconds > 1:
        time.sleep(0.3)
        assert sidecar.process.poll() is None
        sidecar.process.send_signal(signal.SIGTERM)
    assert sidecar.stop()[0] == 0
    assert time.monotonic() - started < 5
    call = call_of(sidecar, "cut")
    assert call.outcome == "sidecar_stopped"
    assert len(call.tap) >= 4 and call.tap_source == "inline"
    assert call.response and call.response.body and b'"token":2}' in call.response.body.raw()


def test_kill_minus_nine_loses_no_completed_call_and_refuses_nobody(engine, start, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        done = []
        for life in range(3):
            sidecar = start(engine.url, listening=listening)
            assert sidecar.port == listening.getsockname()[1]
            for number in range(4):
                run_id = f"life-{life}-{number}"
                connection = Connection(sidecar.port)
                ask = {"stream": number % 2 == 0}
                connection.socket.sendall(post(f"/r/{run_id}{CHAT}", ask))
                if number % 2 == 0:
                    connection.read_until(b"data: [DONE]\n\n")
                else:
                    connection.reply()
                done.append(run_id)
            sidecar.kill()
            waiting = Connection(listening.getsockname()[1])
            waiting.socket.sendall(post(f"/r/waits-{life}{CHAT}", {"reply": "late"}))
            sidecar = start(engine.url, listening=listening)
            assert waiting.reply()[1] == b"late"
            done.append(f"waits-{life}")
            sidecar.kill()
    found = [r.session.run for r in records(tmp_path / "traces") if isinstance(r, Exchange)]
    assert sorted(found) == sorted(done)


def test_a_torn_shard_is_reported_by_the_next_sidecar(engine, start, tmp_path):
    sidecar = start(engine.url)
    Connection(sidecar.port).ask(post(CHAT, {}))
    sidecar.kill()
    (shard,) = (tmp_path / "traces").iterdir()
    os.truncate(shard, shard.stat().st_size - 3)
    sidecar = start(engine.url)
    Connection(sidecar.port).ask(post(f"/r/next{CHAT}", {}))
    call_of(sidecar, "next")
    started = [r for r in records(tmp_path / "traces") if isinstance(r, SidecarStarted)]
    assert [r.torn for r in started] == [[], [shard.name]]
    assert [r.lost for r in started] == [0, 1]


def test_traffic_goes_on_over_a_full_disk(engine, small_disk, tmp_path):  # noqa: F811
    traces = small_disk / "traces"
    sidecar = RunningSidecar(engine.url, traces, queue_mib=1)
    try:
        connection = Connection(sidecar.port)
        connection.ask(post(f"/r/before{CHAT}", {}))
        (small_disk / "ballast").write_bytes(bytes(240_000))
        ask = {"reply": os.urandom(150_000).hex()}
        for number in range(8):
            _, body = connection.ask(post(f"/r/full-{number}{CHAT}", ask))
            assert body.decode() == ask["reply"]
        eventually(lambda: sidecar.health()["status"] == "degraded")
        assert "No space left" in sidecar.health()["reasons"][0]
        assert sidecar.metric("ridealong_sidecar_degraded") == 1
        assert sidecar.metric("ridealong_sidecar_write_errors_total") >= 1
        lost = sidecar.health()["records_lost"]
        assert lost > 0

        (small_disk / "ballast").unlink()
        subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
        eventually(lambda: sidecar.metric("ridealong_sidecar_degraded") == 0)
        connection.ask(post(f"/r/after{CHAT}", {}))
    finally:
        status, errors = sidecar.stop()
    assert status == 0 and errors.count("can't be written") == 1
    found = records(traces)
    calls = [r.session.run for r in found if isinstance(r, Exchange)]
    assert calls[0] == "before" and calls[-1] == "after"
    assert len(calls) == 10 - lost
    assert sum(r.count for r in found if isinstance(r, RecordsLost)) == lost
