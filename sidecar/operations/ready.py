"""Whether the sidecar can do its work now: what ``/readyz`` answers.

Other than ``/healthz``, which tells of a process that should not be restarted, this is for whoever
starts an agent only when its calls will be answered and recorded.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from sidecar.routing.addresses import Address
from sidecar.routing.upstreams import Target, Targets

_SECONDS = 2.0
# A block: a full disk may still take a name.
_PROBE_BYTES = 4096


class Readiness:
    """Checks anew each time it is asked."""

    def __init__(self, targets: Targets, traces: Path, listening: Callable[[], bool]) -> None:
        """``listening``: connections are being accepted."""
        self._targets = targets
        self._traces = traces
        self._listening = listening
        self._writing: asyncio.Future[str | None] | None = None

    async def reasons(self) -> list[str]:
        """Return why it is not ready; empty: it is. Takes a few seconds at most."""
        found = [] if self._listening() else ["no connections are accepted: the sidecar is ending"]
        disk, *upstreams = await asyncio.gather(
            self._disk(), *(_upstream(target) for target in self._targets.all)
        )
        return found + [reason for reason in (disk, *upstreams) if reason is not None]

    async def _disk(self) -> str | None:
        """Write a little. A disk that hangs holds up one thread, however often this is asked."""
        if self._writing is None or self._writing.done():
            loop = asyncio.get_running_loop()
            self._writing = loop.run_in_executor(None, _write, self._traces)
        done, _ = await asyncio.wait({self._writing}, timeout=_SECONDS)
        if done:
            return self._writing.result()
        return f"the disk does not answer: {self._traces}"


async def _upstream(target: Target) -> str | None:
    answers = await asyncio.gather(*(_connects(replica.address) for replica in target.replicas))
    if any(answers):
        return None
    urls = ", ".join(replica.url for replica in target.replicas)
    return f"the model server can't be reached: {urls}"


async def _connects(address: Address) -> bool:
    try:
        async with asyncio.timeout(_SECONDS):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except OSError:  # TimeoutError is one.
        return False
    writer.close()
    return True


def _write(folder: Path) -> str | None:
    path = folder / f".ready-{os.getpid()}"
    try:
        try:
            path.write_bytes(bytes(_PROBE_BYTES))
        finally:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
    except OSError as error:
        return f"trace shards can't be written to {folder}: {os.strerror(error.errno or 0)}"
    return None
