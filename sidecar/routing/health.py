"""Replicas: which are well, and another one where a connection is refused.

A request goes to another replica only while nothing of it has been sent: the connection is tried
before mitmproxy opens it. What fails later is the agent's to see, as it would be without us.
"""

import asyncio
import contextlib
import logging

import aiohttp
from mitmproxy.proxy.server_hooks import ServerConnectionHookData

from sidecar.capture import Capture
from sidecar.routing.addresses import Address, Upstream
from sidecar.routing.upstreams import Health, Target, Targets

_log = logging.getLogger(__name__)

_CHECK = aiohttp.ClientTimeout(total=5)


class Failover:
    """mitmproxy addon that picks the replica for a new connection."""

    def __init__(self, capture: Capture, health: Health, connect_seconds: float) -> None:
        self._capture = capture
        self._health = health
        self._seconds = connect_seconds

    async def server_connect(self, data: ServerConnectionHookData) -> None:
        """mitmproxy's hook: a connection is about to be opened."""
        replicas = self._capture.replicas(data.client.id)
        if len(replicas) < 2:
            return
        for replica in replicas:
            reachable = await _reachable(replica.address, self._seconds)
            if self._health.connected(replica, reachable):
                _report(replica, self._health.well(replica))
            if reachable:
                if data.server.address != (replica.address.host, replica.address.port):
                    data.server.address = (replica.address.host, replica.address.port)
                    data.server.sni = replica.address.host
                    self._capture.redirect(data.client.id, replica)
                return


async def watch(targets: Targets, health: Health, seconds: float) -> None:
    """Ask all replicas for ever how they are."""
    async with (
        aiohttp.ClientSession(timeout=_CHECK) as session,
        asyncio.TaskGroup() as tasks,
    ):
        for target in targets.all:
            if len(target.replicas) > 1:
                for replica in target.replicas:
                    tasks.create_task(_watch(session, target, replica, health, seconds))


async def _watch(
    session: aiohttp.ClientSession,
    target: Target,
    replica: Upstream,
    health: Health,
    seconds: float,
) -> None:
    while True:
        well = False
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.get(replica.url + target.health_path) as reply:
                # vLLM answers 503 when its engine has died; other servers may not know the path.
                well = reply.status < 500
        if health.checked(replica, well):
            _report(replica, health.well(replica))
        await asyncio.sleep(seconds)


async def _reachable(address: Address, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except OSError:  # TimeoutError is one.
        return False
    writer.close()
    return True


def _report(replica: Upstream, well: bool) -> None:
    if well:
        _log.warning("the replica %s is well again", replica.url)
    else:
        _log.warning("the replica %s does not answer: its calls go to others", replica.url)
