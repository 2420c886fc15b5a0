"""mitmproxy's local capture: connections of named programs, taken by eBPF. For experts.

It fails open: when its helper process can't work or dies, connections go past the sidecar and
nothing is reported. So it is checked with a probe, a program of ours whose connection must arrive,
before the sidecar is ready and from time to time after.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from mitmproxy import ctx
from mitmproxy.connection import Client
from mitmproxy.proxy.mode_servers import LocalRedirectorInstance, ServerInstance
from mitmproxy.proxy.mode_specs import LocalMode
from mitmproxy_rs.local import LocalRedirector

from deploy.errors import UserError

_PROBE_SECONDS = 5.0
# The helper takes a moment to learn of the probe: it tries again until it is ended.
_PROBE = """
import socket, sys, time
while True:
    socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5).close()
    time.sleep(0.1)
"""
# mitmproxy starts its helper through sudo, even as root.
_SUDO = '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"\n'


class LocalCapture:
    """Addon that captures programs named by ``specs``: process names or pids."""

    def __init__(self, specs: list[str]) -> None:
        """Raises UserError: a spec can't be right, or this machine can't capture."""
        self.failure: str | None = None
        """Why nothing is captured."""
        self._spec = ",".join(specs)
        self._seen: asyncio.Event | None = None
        self._instance: LocalRedirectorInstance | None = None
        self._path: tempfile.TemporaryDirectory[str] | None = None
        reason = LocalRedirector.unavailable_reason()
        if reason is not None:
            raise UserError(f"sidecar.local: {reason}")
        try:
            LocalRedirector.describe_spec(self._spec)
        except ValueError as error:
            raise UserError(f"sidecar.local {self._spec}: {error}") from None

    async def start(self) -> None:
        """Begin to capture; needs mitmproxy to run.

        Raises:
            UserError: it does not work here.
        """
        self._provide_sudo()
        manager = ctx.master.addons.get("proxyserver")
        instance: ServerInstance[Any] = ServerInstance.make(f"local:{self._spec}", manager)
        assert isinstance(instance, LocalRedirectorInstance)
        self._instance = instance
        try:
            await instance.start()
        except Exception as error:
            raise UserError(f"sidecar.local: mitmproxy can't capture here: {error}") from None
        if not await self.works():
            raise UserError(
                "sidecar.local: a probe's connection went past the sidecar; local capture needs "
                "root, Linux 6.8, cgroup2 at /sys/fs/cgroup and /dev/net/tun"
            )

    async def watch(self, seconds: float) -> None:
        """Check for ever."""
        while True:
            await asyncio.sleep(seconds)
            works = await self.works()
            self.failure = None if works else "local capture has failed: restart the sidecar"

    async def works(self) -> bool:
        """Say whether the connection of a probe arrives at mitmproxy."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            probe = await asyncio.create_subprocess_exec(
                sys.executable, "-S", "-c", _PROBE, str(server.getsockname()[1]),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            self._seen = asyncio.Event()
            try:
                self._intercept(f"{self._spec},{probe.pid}")
                async with asyncio.timeout(_PROBE_SECONDS):
                    await self._seen.wait()
            except (TimeoutError, OSError):
                return False
            finally:
                self._seen = None
                with contextlib.suppress(OSError):
                    self._intercept(self._spec)
                if probe.returncode is None:
                    probe.kill()
                    await probe.wait()
        return True

    def client_connected(self, client: Client) -> None:
        """mitmproxy's hook."""
        if self._seen is not None and isinstance(client.proxy_mode, LocalMode):
            self._seen.set()

    async def stop(self) -> None:
        """Capture nothing more."""
        if self._instance is not None and self._instance.is_running:
            with contextlib.suppress(OSError):  # Its helper may be gone.
                await self._instance.stop()
        redirector = LocalRedirectorInstance._server
        if redirector is not None:
            # Left to the interpreter's end, its thread crashes that.
            redirector.close()
            await redirector.wait_closed()
            LocalRedirectorInstance._server = None
        if self._path is not None:
            self._path.cleanup()

    def _intercept(self, spec: str) -> None:
        redirector = LocalRedirectorInstance._server
        assert redirector is not None
        redirector.set_intercept(f"{spec},!{os.getpid()}")

    def _provide_sudo(self) -> None:
        if os.geteuid() != 0 or shutil.which("sudo"):
            return
        self._path = tempfile.TemporaryDirectory(prefix="ridealong-")
        sudo = Path(self._path.name) / "sudo"
        sudo.write_text(_SUDO)
        sudo.chmod(0o755)
        os.environ["PATH"] = f"{self._path.name}{os.pathsep}{os.environ['PATH']}"
