"""``ridealong run``: the variables a program gets, its signals and its exit status."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from deploy.errors import UserError
from deploy.launch import Ways, base_url_environment, proxy_environment
from tests.sidecar.fake_engine import FakeEngine
from tests.sidecar.running import RunningSidecar
from tests.sidecar.test_records import call_of

WAYS = Ways("http://127.0.0.1:8787", "127.0.0.1:8789", "/ca/bundle.pem")


def test_base_url_variables():
    found = base_url_environment(WAYS.base_url, "r1", None, {"NO_PROXY": "a.test,localhost"})
    assert found["OPENAI_BASE_URL"] == found["OPENAI_API_BASE"] == "http://127.0.0.1:8787/r/r1/v1"
    assert found["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8787/r/r1"
    assert found["RIDEALONG_RUN"] == "r1"
    assert found["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert found["NO_PROXY"] == found["no_proxy"] == "a.test,127.0.0.1,localhost,::1"
    assert "OPENAI_API_KEY" not in found
    keyed = base_url_environment(WAYS.base_url, "r1", "key", {})
    assert keyed["OPENAI_API_KEY"] == keyed["ANTHROPIC_API_KEY"] == "key"


def test_proxy_variables():
    now = {"no_proxy": "localhost, 127.0.0.1,*.corp.test,[::1]", "NO_PROXY": "*.corp.test"}
    found = proxy_environment(WAYS, "r1", None, now)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        assert found[name] == found[name.lower()] == "http://r1:-@127.0.0.1:8789"
    assert found["NO_PROXY"] == found["no_proxy"] == "*.corp.test"
    assert found["NODE_USE_ENV_PROXY"] == "1"
    bundles = (
        "SSL_CERT_FILE REQUESTS_CA_BUNDLE CURL_CA_BUNDLE NODE_EXTRA_CA_CERTS GIT_SSL_CAINFO "
        "CARGO_HTTP_CAINFO PIP_CERT AWS_CA_BUNDLE CODEX_CA_CERTIFICATE"
    )
    assert {found[name] for name in bundles.split()} == {"/ca/bundle.pem"}
    assert "OPENAI_BASE_URL" not in found
    assert ":key@" in proxy_environment(WAYS, "r1", "key", {})["HTTP_PROXY"]


def test_a_sidecar_that_is_no_proxy():
    with pytest.raises(UserError, match=r"sidecar\.proxy"):
        proxy_environment(Ways("http://x", None, None), "r", None, {})


@pytest.fixture(scope="module")
def engine() -> Any:
    with closing(FakeEngine()) as running:
        yield running


@pytest.fixture(scope="module")
def sidecar(engine, tmp_path_factory) -> Any:
    directory = tmp_path_factory.mktemp("launch")
    running = RunningSidecar(
        engine.url, directory / "traces", proxy="127.0.0.1:0", ca_dir=str(directory / "ca")
    )
    yield running
    running.stop()


def launch(sidecar: RunningSidecar, *arguments: str) -> list[str]:
    admin = f"127.0.0.1:{sidecar.admin}"
    return [sys.executable, "-m", "deploy", "run", "--admin", admin, *arguments]


def ran(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, **options
    )


AGENT = """
import os
from httpx import post
base = {base}
print(post(base + "/chat/completions", json={{"reply": "through"}}, timeout=20).text)
"""


@pytest.mark.parametrize(
    ("mode", "base"),
    [("base-url", "os.environ['OPENAI_BASE_URL']"), ("proxy", "'https://api.openai.com/v1'")],
)
def test_an_agent_in_each_mode(sidecar, mode, base):
    agent = [sys.executable, "-c", AGENT.format(base=base)]
    done = ran(launch(sidecar, "--run", f"is-{mode}", "--mode", mode, "--", *agent))
    assert done.stdout == "through\n", done.stderr
    assert done.stderr == f"ridealong run: is-{mode}\n"
    call = call_of(sidecar, f"is-{mode}")
    assert call.session.way == mode.replace("-", "_")


def test_a_run_id_of_its_own(sidecar):
    program = [sys.executable, "-c", "import os; print(os.environ['RIDEALONG_RUN'])"]
    runs = {ran(launch(sidecar, *program)).stdout for _ in range(2)}
    assert len(runs) == 2 and all(run.startswith("run-") for run in runs)


def test_arguments_and_input_reach_the_program(sidecar):
    code = "import sys, json; print(json.dumps([sys.argv[1:], sys.stdin.read()]))"
    done = ran(
        launch(sidecar, "--", sys.executable, "-c", code, "--run", "x", "--", "-v"), input="in"
    )
    assert json.loads(done.stdout) == [["--run", "x", "--", "-v"], "in"]


def test_the_exit_status(sidecar):
    assert ran(launch(sidecar, "sh", "-c", "exit 3")).returncode == 3
    assert ran(launch(sidecar, "sh", "-c", "kill -9 $$")).returncode == 128 + 9


def test_programs_that_can_not_be_started(sidecar, tmp_path):
    done = ran(launch(sidecar, "--", "no-such-program"))
    assert done.returncode == 127 and "no-such-program: No such file" in done.stderr
    done = ran(launch(sidecar, "--", str(tmp_path)))
    assert done.returncode == 126 and "Permission denied" in done.stderr


COUNTS = """
import signal, sys, time
def count(number, _):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        time.sleep(0.2)
        sys.exit(7)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, count)
print("ready", flush=True)
while True:
    time.sleep(1)
"""


def test_signals_are_passed_on_once(sidecar):
    with subprocess.Popen(
        launch(sidecar, "--", sys.executable, "-c", COUNTS),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as wrapper:
        assert wrapper.stdout is not None
        assert wrapper.stdout.readline() == "ready\n"
        for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGTERM"):
            wrapper.send_signal(getattr(signal, name))
            assert wrapper.stdout.readline() == f"{name}\n"
        assert wrapper.wait(20) == 7
        assert wrapper.stdout.read() == ""


def test_ctrl_c_reaches_the_program_once(sidecar):
    """At a terminal the kernel sends it to both."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, launch(sidecar, "--", sys.executable, "-c", COUNTS))
    try:
        seen = _read_until(terminal, b"ready")
        os.write(terminal, b"\x03")
        seen = _read_until(terminal, b"SIGINT")
        time.sleep(0.5)
        os.kill(pid, signal.SIGTERM)
        seen += _read_until(terminal, b"SIGTERM")
        assert seen.count(b"SIGINT") == 1
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    finally:
        os.close(terminal)


def _read_until(terminal: int, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        seen += os.read(terminal, 4096)
    return seen


def test_the_program_ends_with_a_killed_launcher(sidecar, tmp_path):
    marker = tmp_path / "pid"
    script = f"echo $$ > {marker}; exec sleep 60"
    wrapper = subprocess.Popen(launch(sidecar, "--", "sh", "-c", script))
    _wait(lambda: marker.exists() and marker.read_text().strip())
    pid = int(marker.read_text())
    wrapper.kill()
    wrapper.wait()
    _wait(lambda: not Path(f"/proc/{pid}").exists() or "Z" in _state(pid))


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def _wait(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--admin", "127.0.0.1:1", "--", "true"], "ridealong sidecar"),
        (["--run", "a/b", "--", "true"], "letters, digits"),
        (["--"], "COMMAND"),
    ],
)
def test_what_the_user_can_put_right_is_one_line(arguments, message):
    done = ran([sys.executable, "-m", "deploy", "run", *arguments])
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
