"""What earlier sidecars left behind when they were killed: found, counted once, and closed.

A shard without end mark and without writer belongs to a sidecar that did not end by itself. The
next one to start in the folder cuts an incomplete last frame off, writes the end mark, and reports
what is known to be lost: the lines of that frame, and the records its writer had taken by then and
never wrote. A backlog that built up after the last frame leaves no trace: the count is the least
that was lost.
"""

import contextlib
import fcntl
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from sidecar.traces.shards import SUFFIX, Tail, end_mark, is_closed, read_tail

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Leftovers:
    """What was found in a folder."""

    unclosed: tuple[str, ...] = ()
    """Names of the shards that have been closed now."""
    torn: tuple[str, ...] = ()
    """Those of them whose last frame was incomplete."""
    lost: int = 0
    """Records that are known to be missing from them."""


def close_leftovers(directory: Path, series: str) -> Leftovers:
    """Close what dead sidecars left in ``directory``; ``series`` is the caller's own.

    A shard that can't be read or written is left alone. Several sidecars may start at once: a
    shard's lock decides which of them counts it.

    Raises:
        OSError: the folder can't be listed.
    """
    paths = sorted(directory.glob(f"*{SUFFIX}"))
    unclosed, torn, lost = [], [], 0
    for path, following in zip(paths, [*paths[1:], None], strict=False):
        if _series(path) == series:
            continue
        try:
            tail = _close(path)
        except OSError as error:
            # A file that can't be opened is the daemon's to report; the sidecar has to start.
            _log.warning("shard %s of an earlier sidecar can't be closed: %s", path.name, error)
            continue
        if tail is None:
            continue
        unclosed.append(path.name)
        if tail.torn:
            torn.append(path.name)
        lost += max(0, _taken(path, tail, following) - tail.next)
    return Leftovers(tuple(unclosed), tuple(torn), lost)


def _close(path: Path) -> Tail | None:
    """Write a shard's end mark if its writer has died without; return how it had ended."""
    if is_closed(path):
        return None
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None  # It has a writer.
        tail = read_tail(path)
        mark = end_mark(tail.next)
        if not tail.closed:
            # The mark first: between the two calls nothing is lost either.
            os.pwrite(fd, mark, tail.whole)
            os.ftruncate(fd, tail.whole + len(mark))
            os.fdatasync(fd)
            return tail
        os.ftruncate(fd, tail.whole)
        return None
    finally:
        os.close(fd)


def _taken(path: Path, tail: Tail, following: Path | None) -> int:
    """Return the number up to which the shard's writer had taken records, at least.

    What a next shard of the same series begins with was not lost: it went there.
    """
    if following is not None and _series(following) == _series(path):
        with contextlib.suppress(OSError):
            after = read_tail(following)
            return min(tail.taken, after.first) if after.taken else tail.taken
    return tail.taken


def _series(path: Path) -> str:
    return path.name.rpartition("-")[0]
