"""Deletes old shards, by age and by the folder's size, and never one that is still needed.

The daemon puts an empty file ``<shard>.consumed`` beside a shard that it does not need any more.
Only such shards are deleted. Without a daemon there are no such files, and nothing is.
"""

import contextlib
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from sidecar.traces.shards import SUFFIX

_log = logging.getLogger(__name__)

CONSUMED = ".consumed"
_DAY = 86_400.0


@dataclass(frozen=True)
class Limits:
    """What may lie in the folder of shards; 0 stands for no limit."""

    days: float = 0.0
    """Age of a shard's last record."""
    bytes: int = 0
    """Size of all shards."""

    @property
    def any(self) -> bool:
        return self.days > 0 or self.bytes > 0


@dataclass(frozen=True)
class ShardFile:
    """One shard of the folder, as retention sees it."""

    name: str
    size: int
    modified: float
    consumed: bool


def choose(shards: list[ShardFile], limits: Limits, now: float) -> tuple[list[str], list[str]]:
    """Return the names of the shards to delete, and of those that exceed the limits and must stay.

    ``shards`` is sorted, the oldest first; ``now`` and ``modified`` are Unix seconds.
    """
    delete: list[str] = []
    kept_over_limit: list[str] = []
    size = sum(shard.size for shard in shards)
    for shard in shards:
        old = limits.days > 0 and now - shard.modified > limits.days * _DAY
        if not old and not 0 < limits.bytes < size:
            continue
        if shard.consumed:
            delete.append(shard.name)
            size -= shard.size
        else:
            kept_over_limit.append(shard.name)
    return delete, kept_over_limit


def clean(directory: Path, limits: Limits) -> list[str]:
    """Delete what exceeds the limits and has been consumed; return the names.

    Raises:
        OSError: a shard can't be deleted.
    """
    if not limits.any:
        return []
    delete, stay = choose(_list(directory), limits, time.time())
    for name in delete:
        # The marker last: without it the shard would be kept for ever.
        (directory / name).unlink(missing_ok=True)
    _drop_orphans(directory)
    if delete:
        _log.info("%d shards deleted from %s, the last one %s", len(delete), directory, delete[-1])
    if stay:
        _log.warning(
            "%d shards in %s exceed sidecar.retain_days or retain_gib and stay: no daemon has "
            "consumed them yet (the oldest is %s)",
            len(stay),
            directory,
            stay[0],
        )
    return delete


def _list(directory: Path) -> list[ShardFile]:
    shards = []
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        with contextlib.suppress(OSError):
            status = path.stat()
            consumed = path.with_name(path.name + CONSUMED).exists()
            shards.append(ShardFile(path.name, status.st_size, status.st_mtime, consumed))
    return shards


def _drop_orphans(directory: Path) -> None:
    for marker in directory.glob(f"*{SUFFIX}{CONSUMED}"):
        if not marker.with_name(marker.name.removesuffix(CONSUMED)).exists():
            marker.unlink(missing_ok=True)
