"""Who may write the daemon's directory: one process at a time."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.errors import UserError

DATABASE = "daemon.db"


@contextmanager
def owned(directory: Path) -> Iterator[None]:
    """Hold the directory's lock: two daemons on one state would train the same samples.

    Raises:
        UserError: another process holds it, or the directory can't be used.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / "daemon.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(f"daemon.directory {directory} can't be used: {error}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another daemon runs on {directory}: stop it, or choose another daemon.directory"
            ) from None
        yield
    finally:
        os.close(lock)
