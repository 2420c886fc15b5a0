"""The sidecar program: reads its configuration, runs until a signal, leaves nothing behind."""

import asyncio
import importlib.metadata
import logging
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

from deploy.errors import UserError
from sidecar import addresses
from sidecar.addresses import Address, Upstream
from sidecar.admin import Admin
from sidecar.capture import Capture
from sidecar.config import SidecarConfig
from sidecar.metrics import Metrics
from sidecar.proxy import Proxy, write_to_client
from sidecar.record import SidecarStarted
from sidecar.shards import new_series, torn_shards
from sidecar.tapclient import TapClient
from sidecar.writer import Writer

_log = logging.getLogger(__name__)

_CLOSE_SECONDS = 10.0


def run(config: SidecarConfig) -> int:
    """Run the sidecar until SIGTERM or SIGINT; a second signal cuts the draining short.

    Returns the exit status.

    Raises:
        UserError: a wrong address, an occupied port, a traces path that is no folder.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("sidecar").setLevel(logging.INFO)

    upstream = addresses.parse_upstream(config.upstream)
    listen = addresses.parse_loopback("sidecar.listen", config.listen)
    admin = addresses.parse_loopback("sidecar.admin", config.admin)
    if _same(upstream.address, listen) or _same(upstream.address, admin):
        raise UserError(
            f"sidecar.upstream {config.upstream} is the sidecar itself: give the model server's "
            "address, or listen on another port"
        )
    directory = Path(config.traces)
    if directory.exists() and not directory.is_dir():
        raise UserError(f"sidecar.traces {directory} is not a folder: move it away or name another")

    sock = addresses.inherited_socket() or addresses.bind("sidecar.listen", listen)
    with sock, addresses.bind("sidecar.admin", admin) as admin_sock:
        series = new_series()
        writer = Writer(
            directory,
            series,
            rotate_bytes=config.rotate_mib << 20,
            rotate_seconds=config.rotate_seconds,
            queue_bytes=config.queue_mib << 20,
        )
        writer.start(lambda: _started(directory, series, upstream))
        try:
            asyncio.run(_serve(config, upstream, writer, sock, admin_sock))
        finally:
            writer.close(_CLOSE_SECONDS)
    return 0


async def _serve(
    config: SidecarConfig,
    upstream: Upstream,
    writer: Writer,
    sock: socket.socket,
    admin_sock: socket.socket,
) -> None:
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)

    metrics = Metrics(writer)
    client = TapClient(upstream.url)
    capture = Capture(
        upstream.url, upstream.prefix, config.tap, writer, client, write_to_client, metrics
    )
    proxy = Proxy(upstream, capture)
    status = _Status(upstream, config.tap, writer, capture)
    admin = Admin(status.health, metrics)
    watch = None

    def tap_answer(available: bool) -> None:
        status.tap_available = available
        metrics.tap_available.set(float(available))

    await admin.start(admin_sock)
    try:
        await proxy.start(sock)
        print(
            f"sidecar: http://{addresses.local_address(sock)} -> {upstream.url}, traces in "
            f"{config.traces}, health at http://{addresses.local_address(admin_sock)}/healthz",
            flush=True,
        )
        if config.tap:
            watch = asyncio.create_task(client.watch(tap_answer))
        first = await signals.get()
        _log.info(
            "%s: no new connections, %d calls in flight have %g s to end",
            first.name,
            capture.in_flight,
            config.drain_seconds,
        )
        drain = asyncio.create_task(proxy.drain(config.drain_seconds))
        force = asyncio.create_task(signals.get())
        await asyncio.wait({drain, force}, return_when=asyncio.FIRST_COMPLETED)
        drain.cancel()
        force.cancel()
    finally:
        if watch is not None:
            watch.cancel()
        await proxy.stop()
        await admin.close()
        await client.close()


class _Status:
    """What ``/healthz`` answers."""

    def __init__(self, upstream: Upstream, tap: bool, writer: Writer, capture: Capture) -> None:
        self.tap_available: bool | None = None
        self._upstream = upstream
        self._tap = tap
        self._writer = writer
        self._capture = capture
        self._since = time.time()

    def health(self) -> dict[str, Any]:
        writer = self._writer
        reasons = self._reasons()
        return {
            "status": "degraded" if reasons else "ok",
            "reasons": reasons,
            "upstream": self._upstream.url,
            "tap_available": self.tap_available,
            "in_flight": self._capture.in_flight,
            "records_written": writer.written,
            "records_lost": writer.lost,
            "queue_bytes": writer.queued_bytes,
            "uptime_seconds": round(time.time() - self._since, 3),
        }

    def _reasons(self) -> list[str]:
        reasons = []
        if self._writer.failure is not None:
            reasons.append(f"trace shards can't be written: {self._writer.failure}")
        if self._writer.lost:
            reasons.append(f"{self._writer.lost} records lost")
        if self._tap and self.tap_available is False:
            reasons.append("the model server runs without the token tap: no tokens are captured")
        elif self._capture.untapped_in_a_row:
            reasons.append(
                f"the last {self._capture.untapped_in_a_row} model calls came without tokens"
            )
        return reasons


def _started(directory: Path, series: str, upstream: Upstream) -> SidecarStarted:
    try:
        torn = torn_shards(directory, series)
    except OSError as error:
        _log.warning("the shards of earlier sidecars can't be checked: %s", error)
        torn = []
    return SidecarStarted(
        at=time.time(),
        sidecar=f"{socket.gethostname()} {os.getpid()}",
        upstream=upstream.url,
        ridealong=_version(),
        torn=torn,
    )


def _version() -> str:
    try:
        return importlib.metadata.version("ridealong")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _same(upstream: Address, own: Address) -> bool:
    return upstream.port == own.port and upstream.host in ("localhost", own.host)
