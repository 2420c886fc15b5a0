"""Follows the folder of trace shards: says when to look again, and what lies there.

File events are fast but get lost (network file systems, full queues), so the folder is also polled.
"""

import asyncio
import contextlib
import logging
import stat
from dataclasses import dataclass, field
from pathlib import Path

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from deploy.errors import UserError
from sidecar.traces.shards import SUFFIX

logger = logging.getLogger(__name__)


@dataclass
class Listing:
    """The shards of a folder, oldest first: name → size in bytes, and name → why it can't be read.

    A name that is not UTF-8 is listed with its odd bytes escaped.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)


def list_shards(directory: Path) -> Listing:
    """List the shards of a folder; empty when it is missing."""
    listing = Listing()
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        try:
            path.name.encode()
            status = path.stat()
        except UnicodeEncodeError:
            name = path.name.encode(errors="surrogateescape").decode(errors="backslashreplace")
            listing.unreadable[name] = "its name is not UTF-8"
        except FileNotFoundError:
            pass  # deleted since it was listed
        except OSError as error:
            listing.unreadable[path.name] = str(error)
        else:
            if stat.S_ISREG(status.st_mode):
                listing.sizes[path.name] = status.st_size
            else:
                listing.unreadable[path.name] = "it is not a file"
    return listing


class Tail:
    """Wakes its owner when a shard changes, and every ``poll_seconds`` in any case."""

    def __init__(self, directory: Path, poll_seconds: float) -> None:
        self.directory = directory
        self._poll_seconds = poll_seconds
        self._changed = asyncio.Event()
        self._observer: BaseObserver | None = None

    def start(self) -> None:
        """Start watching. Where events can't be had, polling remains.

        Raises:
            UserError: the folder is missing and can't be made.
        """
        found = self.directory.exists()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"daemon.traces {self.directory} can't be used ({error.strerror}): name the folder "
                "that the sidecar writes"
            ) from None
        if not found:
            logger.warning(
                "daemon.traces %s did not exist and has been made: see that it is the folder the "
                "sidecar writes",
                self.directory.absolute(),
            )
        observer = Observer()
        try:
            observer.schedule(
                _Waker(asyncio.get_running_loop(), self._changed), str(self.directory)
            )
            observer.start()
            self._observer = observer
        except OSError as error:
            logger.warning(
                "no file events for %s (%s): polling every %g s",
                self.directory,
                error,
                self._poll_seconds,
            )

    def stop(self) -> None:
        if self._observer is not None:
            self._observer.stop()
            self._observer.join()

    async def wait(self) -> None:
        """Return when something changed, at the latest after ``poll_seconds``."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), self._poll_seconds)
        self._changed.clear()


class _Waker(FileSystemEventHandler):
    """Carries events from watchdog's thread into the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, changed: asyncio.Event) -> None:
        self._loop, self._changed = loop, changed

    def on_any_event(self, event: FileSystemEvent) -> None:
        # Reading a shard makes events too (opened, closed); reacting to those would never end.
        if event.event_type in ("created", "modified", "moved", "deleted"):
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                self._loop.call_soon_threadsafe(self._changed.set)
