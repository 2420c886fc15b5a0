"""The supervisor with real programs: readiness, restart, a socket that outlives its server."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from deploy.errors import UserError
from deploy.supervisor import Supervisor, free_port, listening_socket

SERVER = """
import http.server, os, socket, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = str(os.getpid()).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
if os.environ.get("LISTEN_PID") == str(os.getpid()):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket = socket.socket(fileno=3)
else:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
server.serve_forever()
"""


async def _get(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return await response.text()


async def _gone(pid: int, seconds: float = 5.0) -> bool:
    for _ in range(int(seconds / 0.05)):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        await asyncio.sleep(0.05)
    return False


async def test_a_killed_program_is_started_again_and_stop_ends_it(tmp_path: Path) -> None:
    events: list[str] = []
    supervisor = Supervisor(tmp_path, events.append)
    url = f"http://127.0.0.1:{(port := free_port())}/"
    try:
        program = await supervisor.start(
            "web", [sys.executable, "-c", SERVER, str(port)], ready_url=url
        )
        first = int(await _get(url))
        os.kill(first, signal.SIGKILL)
        for _ in range(100):
            await asyncio.sleep(0.05)
            try:
                second = int(await _get(url))
                break
            except aiohttp.ClientError:
                continue
        assert second != first
        assert program.restarts == 1
        assert any("SIGKILL" in event for event in events)
    finally:
        await supervisor.stop()
    assert await _gone(second)


async def test_requests_wait_in_the_socket_while_the_program_restarts(tmp_path: Path) -> None:
    listener = listening_socket("127.0.0.1:0")
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    supervisor = Supervisor(tmp_path, lambda event: None)
    try:
        await supervisor.start(
            "web", [sys.executable, "-c", SERVER], ready_url=url, listener=listener
        )
        first = int(await _get(url))
        os.kill(first, signal.SIGKILL)
        assert await _gone(first)
        # Nobody serves the socket now; the request is queued, not refused.
        assert int(await asyncio.wait_for(_get(url), 10)) != first
    finally:
        await supervisor.stop()
        listener.close()


async def test_a_configuration_error_is_reported_with_its_own_words(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, lambda event: None)
    script = "import sys; print('set the upstream', file=sys.stderr); sys.exit(2)"
    try:
        with pytest.raises(UserError, match=r"broken did not start .*set the upstream"):
            await supervisor.start(
                "broken",
                [sys.executable, "-c", script],
                ready_url=f"http://127.0.0.1:{free_port()}/",
            )
    finally:
        await supervisor.stop()


async def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
from pathlib import Path
from deploy.supervisor import Supervisor
async def main():
    program = await Supervisor(Path({str(tmp_path)!r})).start("sleep", ["sleep", "60"])
    print(program.process.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    child = int(await process.stdout.readline())
    process.kill()
    await process.wait()
    assert await _gone(child)


def test_an_occupied_port_is_named() -> None:
    with listening_socket("127.0.0.1:0") as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=f"can't listen on {address}"):
            listening_socket(address)
