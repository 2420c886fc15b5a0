"""Tells the sidecars which shards the daemon does not need any more, so that they may be deleted.

A shard is consumed when it was closed and read to its end, and every run with calls in it has been
decided on and trained, or left out for good. The mark is an empty file beside the shard
(``sidecar.traces.retention``).
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from daemon.state import State
from sidecar.traces.retention import CONSUMED
from sidecar.traces.shards import is_closed

logger = logging.getLogger(__name__)


class Marker:
    """Marks the shards of one folder."""

    def __init__(self, traces: Path, state: State) -> None:
        self._traces = traces
        self._state = state
        self._marked: set[str] = set()
        self._failed = False

    def mark(self, sizes: Mapping[str, int]) -> None:
        """Mark what has been consumed; ``sizes`` are the shards of the folder.

        A folder that can't be written is reported once: its shards stay, which costs space only.
        """
        offsets, needed = self._state.offsets(), self._state.needed_shards()
        for name, size in sizes.items():
            if name in self._marked or name in needed or offsets.get(name) != size:
                continue
            try:
                path = self._traces / name
                if is_closed(path):
                    path.with_name(name + CONSUMED).touch(mode=0o600)
                    self._marked.add(name)
            except OSError as error:
                if not self._failed:
                    logger.warning("consumed shards can't be marked, so they stay: %s", error)
                self._failed = True
