"""The sidecar program: reads its configuration, runs until a signal, leaves nothing behind."""

import asyncio
import importlib.metadata
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from deploy.errors import UserError
from sidecar.access import ca, tls
from sidecar.access.admission import Access
from sidecar.access.keys import RunKeys, load_secret
from sidecar.access.limits import Guard, RequestLimits
from sidecar.capture import Capture
from sidecar.config import SidecarConfig
from sidecar.operations import logs
from sidecar.operations.admin import Admin
from sidecar.operations.metrics import Metrics
from sidecar.operations.ready import Readiness
from sidecar.operations.reload import Reloader
from sidecar.operations.status import Status
from sidecar.proxy import Proxy, pass_reset_on, write_to_client
from sidecar.routing import addresses
from sidecar.routing.addresses import Address, Upstream
from sidecar.routing.health import Failover, watch
from sidecar.routing.intercept import Interception
from sidecar.routing.local import LocalCapture
from sidecar.routing.router import Router
from sidecar.routing.upstreams import Health, Targets, parse_targets
from sidecar.routing.ways import NoLoops, Ways, open_listeners
from sidecar.tokens.sources import Sources
from sidecar.tokens.tapclient import TapClient
from sidecar.traces.record import SidecarStarted
from sidecar.traces.recovery import Leftovers, close_leftovers
from sidecar.traces.retention import Limits
from sidecar.traces.shards import new_series
from sidecar.traces.writer import Writer

_log = logging.getLogger(__name__)

_CLOSE_SECONDS = 60.0
_LOCAL_CHECK_SECONDS = 60.0


def run(config: SidecarConfig, reread: Callable[[], SidecarConfig] | None = None) -> int:
    """Run the sidecar until SIGTERM or SIGINT; a second signal cuts the draining short.

    ``reread`` returns the configuration as it is now, for SIGHUP; it may raise ``UserError``.

    Returns the exit status.

    Raises:
        UserError: a wrong address, an occupied port, a traces path that is no folder.
    """
    logs.configure(config.log_format)
    access = _access(config)

    targets = parse_targets(config, os.environ, _read)
    upstream = targets.default.replicas[0]
    admin = addresses.parse_loopback("sidecar.admin", config.admin)
    directory = Path(config.traces)
    if directory.exists() and not directory.is_dir():
        raise UserError(f"sidecar.traces {directory} is not a folder: move it away or name another")

    with ExitStack() as stack:
        listeners = open_listeners(config, upstream.origin, stack)
        admin_sock = stack.enter_context(addresses.bind("sidecar.admin", admin))
        own = [listener.address for listener in listeners] + [addresses.local_address(admin_sock)]
        for replica in targets.replicas():
            if any(_same(replica.address, address) for address in own):
                raise UserError(
                    f"the upstream {replica.url} is the sidecar itself: give the model server's "
                    "address, or listen on another port"
                )
        interception = Interception(config.intercept, targets.addresses(), own[:-1])
        authority = None
        if len(listeners) > 1 or config.local:
            authority = ca.ensure(config.ca_dir, os.environ.get("SSL_CERT_FILE"))
        series = new_series()
        writer = Writer(
            directory,
            series,
            rotate_bytes=config.rotate_mib << 20,
            rotate_seconds=config.rotate_seconds,
            queue_bytes=config.queue_mib << 20,
            limits=Limits(config.retain_days, int(config.retain_gib * 2**30)),
        )
        writer.start(lambda: _started(directory, series, upstream))
        ways = Ways(listeners, interception, authority, config.local)
        try:
            asyncio.run(_serve(config, reread, access, targets, ways, writer, admin_sock))
        finally:
            writer.close(_CLOSE_SECONDS)
    return 0


async def _serve(
    config: SidecarConfig,
    reread: Callable[[], SidecarConfig] | None,
    access: Access,
    targets: Targets,
    ways: Ways,
    writer: Writer,
    admin_sock: socket.socket,
) -> None:
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)

    metrics = Metrics(writer)
    servers = [r.url for target in targets.all if target.tap for r in target.replicas]
    client = TapClient(servers, api=config.token_source == "auto")
    health = Health()
    capture = Capture(
        Router(targets, ways.interception, health),
        Sources(config.token_source, client.sources),
        writer,
        client,
        write_to_client,
        pass_reset_on,
        metrics,
        access,
    )
    guard = Guard(_limits(config), metrics.refused)
    local = LocalCapture(config.local) if config.local else None
    proxy = Proxy(
        capture,
        [
            guard,
            Failover(capture, health, config.connect_seconds),
            NoLoops(ways.listeners),
            *([local] if local else []),
        ],
        read_hosts=ways.interception.patterns(),
        key_folder=ways.authority.key_folder if ways.authority else None,
        tls_upstream=any(replica.scheme == "https" for replica in targets.replicas()),
        timeout_seconds=config.timeout_seconds,
    )
    status = Status(targets, ways, client.sources, writer, capture, health, local)
    ready = Readiness(targets, Path(config.traces), lambda: proxy.listening)
    admin = Admin(status.health, ready.reasons, metrics)
    watches = [asyncio.create_task(watch(targets, health, config.health_seconds))]

    def apply(new: SidecarConfig) -> None:
        replacement = _access(new)
        for listener in ways.listeners:
            if listener.tls is not None:
                tls.load(listener.tls, new.tls_certificate, new.tls_key)
        capture.access, guard.limits = replacement, _limits(new)
        logs.configure(new.log_format)

    reloader = Reloader(config, reread or (lambda: config), apply)
    hang_up = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, hang_up.set)
    watches.append(asyncio.create_task(_reload(hang_up, reloader)))

    def tap_answer(available: bool) -> None:
        status.tap_available = available
        metrics.tap_available.set(float(available))

    await admin.start(admin_sock)
    try:
        await proxy.start(ways.listeners)
        if local is not None:
            await local.start()
            watches.append(asyncio.create_task(local.watch(_LOCAL_CHECK_SECONDS)))
        print(
            f"sidecar: {ways.base_url} -> {targets.default.replicas[0].url}, traces in "
            f"{config.traces}, health at http://{addresses.local_address(admin_sock)}/healthz"
            + "".join(f", {way} at {address}" for way, address in ways.others().items()),
            flush=True,
        )
        if config.token_source in ("auto", "tap"):
            watches.append(asyncio.create_task(client.watch(tap_answer)))
        await _run_until(signals, reloader, proxy, capture)
    finally:
        for task in watches:
            task.cancel()
        if local is not None:
            await local.stop()
        await proxy.stop()
        await admin.close()
        await client.close()


async def _run_until(
    signals: "asyncio.Queue[signal.Signals]", reloader: Reloader, proxy: Proxy, capture: Capture
) -> None:
    """Run until a signal comes and calls in flight have ended, or a second one comes."""
    first = await signals.get()
    seconds = reloader.config.drain_seconds
    _log.info(
        "%s: no new connections, %d calls in flight have %g s to end",
        first.name,
        capture.in_flight,
        seconds,
    )
    drain = asyncio.create_task(proxy.drain(seconds))
    force = asyncio.create_task(signals.get())
    await asyncio.wait({drain, force}, return_when=asyncio.FIRST_COMPLETED)
    drain.cancel()
    force.cancel()


async def _reload(hang_up: asyncio.Event, reloader: Reloader) -> None:
    while True:
        await hang_up.wait()
        hang_up.clear()
        await asyncio.to_thread(reloader.reload)


def _access(config: SidecarConfig) -> Access:
    """Return who may do what.

    Raises:
        UserError: the secret of the run keys can't be had; only where they are required.
    """
    path = Path(config.key_file).expanduser()
    if not config.require_key and not path.exists():
        return Access(RunKeys(os.urandom(32)), False)  # No key has been issued yet.
    try:
        secret = load_secret(path)
    except UserError as error:
        if config.require_key:
            raise
        _log.warning("run keys are not accepted: %s", error)
        secret = os.urandom(32)
    return Access(RunKeys(secret), config.require_key)


def _limits(config: SidecarConfig) -> RequestLimits:
    return RequestLimits(
        head_bytes=config.max_header_kib << 10,
        head_fields=config.max_header_fields,
        body_bytes=config.max_body_mib << 20,
    )


def _started(directory: Path, series: str, upstream: Upstream) -> SidecarStarted:
    try:
        left = close_leftovers(directory, series)
    except OSError as error:
        _log.warning("the shards of earlier sidecars can't be checked: %s", error)
        left = Leftovers()
    if left.unclosed:
        _log.warning(
            "%d shards were not closed by the sidecars that wrote them, which were killed; at "
            "least %d records are lost",
            len(left.unclosed),
            left.lost,
        )
    return SidecarStarted(
        at=time.time(),
        sidecar=f"{socket.gethostname()} {os.getpid()}",
        upstream=upstream.url,
        ridealong=_version(),
        torn=list(left.torn),
        lost=left.lost,
    )


def _version() -> str:
    try:
        return importlib.metadata.version("ridealong")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _read(path: str) -> str:
    return Path(path).expanduser().read_text(encoding="utf-8")


def _same(upstream: Address, own: Address) -> bool:
    return upstream.port == own.port and upstream.host in ("localhost", own.host)
