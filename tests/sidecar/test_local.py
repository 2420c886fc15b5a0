"""Local capture, where this machine can; and that it never pretends."""

import os
import shutil
import subprocess

import pytest

from deploy.errors import UserError
from sidecar.routing.local import LocalCapture
from tests.sidecar.running import RunningSidecar
from tests.sidecar.test_records import CHAT, call_of

NAME = "rdl-agent"


def inside(mounts: str) -> list[str]:
    """Return what runs a program with other mounts than the rest of this machine."""
    return ["unshare", "--mount", "sh", "-ec", f'{mounts}; exec "$@"', "-"]


@pytest.fixture(autouse=True)
def root() -> None:
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("curl"):
        pytest.skip("local capture needs root, and this test unshare and curl")


def test_a_program_is_captured_by_name(engine, tmp_path):
    agent = tmp_path / NAME
    shutil.copy(str(shutil.which("curl")), agent)
    prefix = inside("mount -t cgroup2 none /sys/fs/cgroup")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("cgroup2 can't be mounted here")
    try:
        sidecar = RunningSidecar(
            engine.url,
            tmp_path / "traces",
            prefix=prefix,
            local=[NAME],
            ca_dir=str(tmp_path / "ca"),
        )
    except RuntimeError as error:
        if "past the sidecar" in str(error) or "can't capture here" in str(error):
            pytest.skip(f"no eBPF here: {error}")
        raise
    try:
        ask = ["-sS", "--max-time", "20", "--data", '{"reply": "taken"}']
        plain = [str(agent), *ask, f"{engine.url}/r/local{CHAT}"]
        done = subprocess.run(plain, capture_output=True, text=True, check=False)
        assert done.stdout == "taken", done.stderr
        assert call_of(sidecar, "local").session.way == "local"
        assert sidecar.health()["ways"]["local"] == NAME
        other = ["curl", *ask, f"{engine.url}{CHAT}"]
        assert subprocess.run(other, capture_output=True, check=False).stdout == b"taken"
        assert len(sidecar.calls(1)) == 1, "only the named program is captured"
    finally:
        status, errors = sidecar.stop()
    assert status == 0, errors


def test_capture_that_does_not_work_is_no_sidecar(engine, tmp_path):
    """mitmproxy itself says that it runs, and lets everything past."""
    prefix = inside("mount -t tmpfs none /sys/fs/cgroup")
    with pytest.raises(RuntimeError, match=r"sidecar\.local"):
        RunningSidecar(
            engine.url,
            tmp_path / "traces",
            prefix=prefix,
            local=[NAME],
            ca_dir=str(tmp_path / "ca"),
        )


def test_a_spec_that_can_not_be():
    with pytest.raises(UserError, match=r"sidecar\.local"):
        LocalCapture(["a,,b", "!"])
